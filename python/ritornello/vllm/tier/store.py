"""Calls of a scheduler to its store. They must not wait for another process or for a disk.

A store that this process owns answers from memory, unless its index has files (`lsm`), which may
wait for a disk. If another process owns the store, calls go over a socket to that process, which
may be stopped. In both cases lookups run on vLLM's lookup thread, and calls without a result
(`release`, `touch`) on a background thread. Loads and puts run on the threads of the store.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.meter import Meter
from ritornello.vllm.settings import Settings
from ritornello.vllm.tier.call_thread import CallThread

if TYPE_CHECKING:
    from ritornello._core import DecisionOutcome, PoolPages, Scope, Store, Ticket

logger = logging.getLogger("vllm.ritornello")

# Maximum duration of a lease, which lasts from a lookup to the end of its load or, without a load,
# to the end of the step.
LEASE_SECONDS = 60.0
# Minimum deadline of a load; a long load may take up to 60 seconds (`Store.time_limit`). A load
# that takes longer is assumed to be slower than computing.
LOAD_SECONDS = 10.0
# Minimum deadline of a put; a long put may take up to 60 seconds. Until a put ends, vLLM pins its
# chunks in the host tier.
STORE_SECONDS = 30.0


class ChunkStore(FailSafeStore):
    """The store of a tier, opened at construction. A store that refuses keys of `hash_algorithm` is
    not used. `TierStore` is one store, `TierCache` a cache over several tiers.
    """

    def __init__(self, settings: Settings, meter: Meter, hash_algorithm: str = "") -> None:
        super().__init__(settings, logger, lambda operation: meter.add(f"errors:{operation}"))
        self._meter = meter
        self._calls = CallThread("ritornello-calls")
        self.expect_hash(hash_algorithm)
        self.open()

    def submit_get(
        self, scope: "Scope", keys: Sequence[bytes], pages: "PoolPages", *, staged: bool
    ) -> "Ticket | None":
        """Starts to fill `pages`, rows of vLLM's host tier, with the chunks `keys`. None if the
        load could not be started.
        """

        def action(store: "Store") -> "Ticket":
            limit = store.time_limit(len(keys) * scope.page_bytes, LOAD_SECONDS)
            return store.submit_get(scope, keys, pages, staged=staged, timeout=limit)

        return self.call("get", action, None)

    def submit_put(
        self,
        scope: "Scope",
        before: Sequence[bytes],
        first: int,
        keys: Sequence[bytes],
        pages: "PoolPages",
        retain_until: float | None,
    ) -> "Ticket | None":
        """Starts to store rows, which must not change until the ticket is done. None if the put
        could not be started. `first`: the chunk number of `keys[0]`, 0 if unknown. `before`: the
        keys before `keys[0]`, all of them from the first chunk, or only the last.
        """

        def action(store: "Store") -> "Ticket":
            limit = store.time_limit(len(keys) * scope.page_bytes, STORE_SECONDS, put=True)
            named, options = self._put_options(before, first, keys)
            return store.submit_put(
                scope, named, pages, retain_until=retain_until, timeout=limit, **options
            )

        return self.call("put", action, None)

    def _put_options(
        self, before: Sequence[bytes], first: int, keys: Sequence[bytes]
    ) -> tuple[Sequence[bytes], dict[str, Any]]:
        """Returns the keys and further arguments of a put, for this kind of store."""
        return keys, {"parent": before[-1] if before else None}

    def note_decision(
        self,
        request: str,
        scope: "Scope",
        keys: Sequence[bytes],
        outcome: "DecisionOutcome",
        *,
        found: int,
        loaded: int,
        detail: str,
        estimate: tuple[float, float] | None,
    ) -> None:
        """Records what was decided about the chunks of a request. Waits for nothing."""
        self.call(
            "note_decision",
            lambda store: store.note_decision(
                request,
                scope,
                keys,
                outcome,
                found=found,
                loaded=loaded,
                detail=detail,
                estimate=estimate,
            ),
            None,
        )

    def record_prefill(self, before: int, tokens: int, seconds: float) -> None:
        """Records that the engine computed `tokens` tokens after `before` in `seconds`."""
        self.call("gate", lambda store: store.record_prefill(before, tokens, seconds), None)

    def note_prefill_avoided(self, before: int, tokens: int, seconds: float) -> None:
        """Counts `tokens` tokens after `before` that were loaded in `seconds` and not computed; 0
        tokens for a load that failed. Waits for nothing.
        """
        self.call("gate", lambda store: store.note_prefill_avoided(before, tokens, seconds), None)

    def touch(self, scope: "Scope", keys: Sequence[bytes]) -> None:
        self.call_later("touch", lambda store: store.touch(scope, keys))

    def end_step(self) -> None:
        """Called at the end of every step. Does nothing unless a subclass overrides it."""

    def close(self) -> None:
        """Stops the background thread and closes the store. All tickets must be done."""
        self._calls.stop()
        super().close()

    def call_later(self, operation: str, action: "Callable[[Store], object]") -> None:
        """Queues a call without a result. A call is dropped while too many calls wait for the
        owner: a lease that is not released expires, and a page that is not touched is evicted
        earlier.
        """
        if self.broken:
            return
        if self._calls.submit(lambda: self.call(operation, action, None)) is None:
            self._meter.add(f"errors:{operation}")


class TierStore(ChunkStore):
    """The store of a tier that is one store, not a cache over several tiers."""

    def __init__(self, settings: Settings, meter: Meter, hash_algorithm: str = "") -> None:
        self._at_once: bool | None = None
        self._asked: Store | None = None
        super().__init__(settings, meter, hash_algorithm)

    def answers_at_once(self) -> bool:
        """Returns whether this process owns the store and lookups read only its memory."""
        if self._at_once is None or self._asked is not self._store:
            self._asked = self._store
            self._at_once = self.call("role", lambda store: store.answers_at_once, False)
        return self._at_once

    def end_step(self) -> None:
        """Makes a client ask again in the next step, because a client becomes the owner if the
        owner dies. An owner remains the owner until the store is reopened.
        """
        if not self._at_once:
            self._at_once = None

    def release(self, lease: Any) -> None:
        self.call_later("release", lambda store: store.release(lease))

    def call_later(self, operation: str, action: "Callable[[Store], object]") -> None:
        if not self.broken and self.answers_at_once():
            self.call(operation, action, None)
        else:
            super().call_later(operation, action)
