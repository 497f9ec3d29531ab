"""What a scheduler asks of the store, without waiting for another process.

A store that this process owns answers from its memory. One that another process owns is asked over
a socket, and that process may be stopped: then only the lookup thread may ask it, and what has no
answer (`release`, `touch`) is done by a thread of its own.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ritornello.fail_safe import FailSafeStore
from ritornello.vllm.settings import Settings
from ritornello.vllm.tier.counts import Counts
from ritornello.vllm.tier.memory import HostRows

if TYPE_CHECKING:
    from ritornello._core import Match, Scope, Store, Ticket

logger = logging.getLogger("vllm.ritornello")

# Errands that wait while another process is silent. More are dropped: leases run out by themselves.
DEFERRED_CALLS_MAX = 4096


class TierStore(FailSafeStore):
    """This process's hold on the store, opened at once."""

    def __init__(self, settings: Settings, counts: Counts) -> None:
        super().__init__(settings, logger, lambda doing: counts.add("errors", doing))
        self._counts = counts
        self._owned: bool | None = None
        self._owned_of: Store | None = None
        self._deferred_calls: queue.Queue[Callable[[], object] | None] | None = None
        self.open()

    def answers_at_once(self) -> bool:
        """Whether this process owns the store, so that a question is a look into its memory."""
        if self._owned is None or self._owned_of is not self._store:
            self._owned_of = self._store
            self._owned = self.call("role", lambda store: store.role, "") == "owner"
        return self._owned

    def end_step(self) -> None:
        """An owner stays one until the store is opened anew; a client becomes one when the owner
        dies, and is asked every step.
        """
        if not self._owned:
            self._owned = None

    def pin_prefix(self, scope: "Scope", keys: Sequence[bytes], ttl: float) -> "Match | None":
        """May wait for another process; see `answers_at_once`."""
        return self.call("pin_prefix", lambda store: store.pin_prefix(scope, keys, ttl=ttl), None)

    def release(self, lease: int) -> None:
        self._call_deferred("release", lambda store: store.release(lease))

    def touch(self, scope: "Scope", keys: Sequence[bytes]) -> None:
        self._call_deferred("touch", lambda store: store.touch(scope, keys))

    def submit_get(
        self,
        scope: "Scope",
        keys: Sequence[bytes],
        host: HostRows,
        rows: Sequence[int],
        timeout: float,
    ) -> "Ticket | None":
        """Fills these rows of the host tier."""
        return self.call(
            "get",
            lambda store: store.submit_get(
                scope, keys, host.pool.pages(rows), staged=host.staged, timeout=timeout
            ),
            None,
        )

    def submit_put(
        self,
        scope: "Scope",
        keys: Sequence[bytes],
        host: HostRows,
        rows: Sequence[int],
        parent: bytes | None,
        retain_until: float | None,
        timeout: float,
    ) -> "Ticket | None":
        """Stores these rows of the host tier, from where they are: they must not change until the
        ticket is done. vLLM pins a chunk of the host tier for as long.
        """
        return self.call(
            "put",
            lambda store: store.submit_put(
                scope,
                keys,
                host.pool.pages(rows),
                parent=parent,
                retain_until=retain_until,
                timeout=timeout,
            ),
            None,
        )

    def close(self) -> None:
        """Nothing is asked from here on. Tickets must be done."""
        calls, self._deferred_calls = self._deferred_calls, None
        if calls is not None:
            with contextlib.suppress(queue.Full):
                calls.put_nowait(None)
        super().close()

    def _call_deferred(self, doing: str, action: "Callable[[Store], object]") -> None:
        def deferred_call() -> object:
            return self.call(doing, action, None)

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
                name="ritornello-errands",
                daemon=True,
            ).start()
        try:
            self._deferred_calls.put_nowait(deferred_call)
        except queue.Full:
            self._counts.add("errors", doing)


def run_deferred_calls(calls: "queue.Queue[Callable[[], object] | None]") -> None:
    while (deferred_call := calls.get()) is not None:
        deferred_call()
