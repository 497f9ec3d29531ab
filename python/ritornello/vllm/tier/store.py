"""Calls of a scheduler to its store. These calls must not wait for another process.

A store that this process owns answers from memory. If another process owns the store, calls go over
a socket to that process, which may be stopped. Lookups then run on vLLM's lookup thread, and calls
without a result (`release`, `touch`) on a background thread.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.meter import Meter
from ritornello.vllm.settings import Settings

if TYPE_CHECKING:
    from ritornello._core import Scope, Store

logger = logging.getLogger("vllm.ritornello")

# Maximum number of queued calls while the owner does not answer. Further calls are dropped: a lease
# that is not released expires, and a page that is not touched is evicted earlier.
DEFERRED_CALLS_MAX = 4096


class TierStore(FailSafeStore):
    """The store of a tier, opened at construction. A store that refuses keys of `hash_algorithm` is
    not used.
    """

    def __init__(self, settings: Settings, meter: Meter, hash_algorithm: str = "") -> None:
        super().__init__(settings, logger, lambda operation: meter.add(f"errors:{operation}"))
        self._meter = meter
        self._is_owner: bool | None = None
        self._role_of: Store | None = None
        self._deferred_calls: queue.Queue[Callable[[], object] | None] | None = None
        self.expect_hash(hash_algorithm)
        self.open()

    def answers_at_once(self) -> bool:
        """Returns whether this process owns the store, so that lookups read its memory."""
        if self._is_owner is None or self._role_of is not self._store:
            self._role_of = self._store
            self._is_owner = self.call("role", lambda store: store.role, "") == "owner"
        return self._is_owner

    def end_step(self) -> None:
        """Makes a client check its role again, because it becomes the owner when the owner dies. An
        owner remains the owner until the store is reopened.
        """
        if not self._is_owner:
            self._is_owner = None

    def release(self, lease: int) -> None:
        self._call_deferred("release", lambda store: store.release(lease))

    def touch(self, scope: "Scope", keys: Sequence[bytes]) -> None:
        self._call_deferred("touch", lambda store: store.touch(scope, keys))

    def close(self) -> None:
        """Stops the background thread and closes the store. All tickets must be done."""
        calls, self._deferred_calls = self._deferred_calls, None
        if calls is not None:
            with contextlib.suppress(queue.Full):
                calls.put_nowait(None)
        super().close()

    def _call_deferred(self, operation: str, action: "Callable[[Store], object]") -> None:
        def deferred_call() -> object:
            return self.call(operation, action, None)

        if self.broken:
            return
        if self.answers_at_once():
            deferred_call()
            return
        if self._deferred_calls is None:
            self._deferred_calls = queue.Queue(DEFERRED_CALLS_MAX)
            threading.Thread(
                target=run_deferred_calls,
                args=(self._deferred_calls,),
                name="ritornello-deferred",
                daemon=True,
            ).start()
        try:
            self._deferred_calls.put_nowait(deferred_call)
        except queue.Full:
            self._meter.add(f"errors:{operation}")


def run_deferred_calls(calls: "queue.Queue[Callable[[], object] | None]") -> None:
    while (deferred_call := calls.get()) is not None:
        deferred_call()
