"""Begins lookups on the remote when SGLang queues them.

SGLang's lookup thread serves one request after another, and waits for the remote. So that requests
do not wait for each other's pages, another thread looks a request's pages up as soon as SGLang
queues the request: the remote is asked, and pages are fetched, while SGLang's thread waits for
pages of earlier requests.
"""

import logging
from collections.abc import Callable, Sequence
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from ritornello.sglang.identity import keys_of
from ritornello.sglang.prompts import UNKNOWN
from ritornello.sglang.store import SGLangStore

if TYPE_CHECKING:
    from ritornello.sglang.hits import SidePool
    from ritornello.sglang.pools import LogicalPool, Pool

logger = logging.getLogger("ritornello.sglang")

# Maximum number of calls of `begin` and `end` that wait for the thread. A further `begin` is
# dropped: only SGLang's thread then looks the request up. After a further `end`, the fetch is not
# cancelled.
QUEUED_MAX = 256
# Interval at which the idle thread checks whether it is to end.
IDLE_SECONDS = 0.2
# Maximum time that `close` waits for the thread, which may be compiling: SGLang compiles its hash
# function at first use.
CLOSE_SECONDS = 2.0

# Arguments: an operation of SGLang, and the number of tokens of a page. Returns the hashes of the
# operation's pages.
Hashes = Callable[[Any, int], list[str]]


class EarlyLookups:
    """Lookups of one storage. `pool` returns the storage's main pool, None while it has no main
    pool; `sides` returns the side pools that SGLang's transfers name.
    """

    def __init__(
        self,
        store: SGLangStore,
        pool: "Callable[[], Pool | LogicalPool | None]",
        hashes: Hashes,
        sides: "Callable[[Sequence[Any]], Sequence[SidePool]]",
    ) -> None:
        self._store = store
        self._pool = pool
        self._hashes = hashes
        self._sides = sides
        self._queue: Queue[tuple[Any, bool]] = Queue(QUEUED_MAX)
        self._thread: Thread | None = None
        self._closed = Event()

    def begin(self, operation: Any) -> None:
        """Begins the lookup of an operation that SGLang queued."""
        self._put(operation, ended=False)

    def end(self, operation: Any) -> None:
        """Cancels the fetch that `begin` started, for an operation that SGLang ended without
        looking it up.
        """
        self._put(operation, ended=True)

    def close(self) -> None:
        """Ends the thread after its current operation, and waits for it at most
        `CLOSE_SECONDS`.
        """
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _put(self, operation: Any, *, ended: bool) -> None:
        if self._closed.is_set() or operation.prefix_keys is None:
            return
        try:
            self._queue.put_nowait((operation, ended))
        except Full:
            return
        if self._thread is None:
            thread = Thread(target=self._run, name="ritornello-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError as reason:  # the next operation tries again
                logger.debug("ritornello: cannot start a thread for early lookups (%s)", reason)
                return
            self._thread = thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                operation, ended = self._queue.get(timeout=IDLE_SECONDS)
            except Empty:
                continue
            try:
                self._act(operation, ended=ended)
            except Exception as error:
                logger.debug("ritornello: an early lookup failed (%s)", error)

    def _act(self, operation: Any, *, ended: bool) -> None:
        pool, before = self._pool(), operation.prefix_keys
        if pool is None or not pool.scopes or UNKNOWN in before[:1]:
            return
        if operation.is_terminated() is not ended:
            return
        keys = keys_of(self._hashes(operation, pool.page_tokens))
        if ended:
            self._store.cancel_fetch(pool.scopes, [*keys_of(before), *keys])
        else:
            sides = self._sides(operation.pool_transfers or ())
            if not all(side.is_served for side in sides):
                return
            self._store.begin_lookup(pool.scopes, keys, keys_of(before), pool.page_tokens, sides)
