"""Reads the next batch of a prefetch while SGLang still waits for the current batch or uses it, and
ends the reads of a prefetch that SGLang has terminated.

Invariants: at most one batch of each pool is read ahead. When `close` returns, no read that was
begun here writes to memory, so SGLang may take the memory of the transfer back.
"""

from collections.abc import Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ritornello.sglang.pools import Pool, PoolRead
    from ritornello.sglang.store import SGLangStore
    from ritornello.sglang.transfers import Transfer

# Time between the beginning of the next read and the expected end of the current read. Both reads
# share the disk, so the next read may delay the current read by this time, and SGLang may stop
# waiting for the current read at a deadline.
LEAD_SECONDS = 0.025
# Interval at which a wait for a read checks whether SGLang has terminated the operation, which no
# event tells. SGLang forgets a terminated operation, but a flush of its cache waits at most 10
# seconds for the thread that reads, and then ends the server.
CHECK_SECONDS = 0.05


class Paces:
    """Seconds for each page that the batches of each pool took, for all transfers of a storage."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def record(self, pool: str, pages: int, seconds: float) -> None:
        """Records a batch. The times of batches that overlap alternate between long and short, so
        the pace becomes the mean of the earlier pace and the pace of this batch.
        """
        pace = seconds / pages
        self._seconds[pool] = (self._seconds.get(pool, pace) + pace) / 2

    def expected(self, pool: str, pages: int) -> float:
        """Returns the seconds that a batch is expected to take; infinity if none was recorded."""
        pace = self._seconds.get(pool)
        return float("inf") if pace is None else pages * pace


class ReadAhead:
    """The reads of one transfer, on the thread on which SGLang runs the transfer. After `close` no
    batch is read ahead; SGLang then reads the windows and states of the same operation.
    """

    def __init__(self, transfer: "Transfer", store: "SGLangStore", paces: Paces) -> None:
        self._transfer = transfer
        self._store = store
        self._paces = paces
        # The reads that were begun ahead, by the names of their pools.
        self._begun: dict[str, tuple[Pool, PoolRead]] = {}
        # When the last read ended. The duration of the next read counts from this time, even if the
        # read began earlier.
        self._ended = 0.0
        self._closed = False

    def get(self, pool: "Pool", keys: Sequence[bytes], indices: Any) -> int:
        """Reads a batch of pages to their places. Returns the number of leading pages filled."""
        ids = pool.page_ids(keys, indices)
        if ids is None:
            return 0
        read = self._take(pool, keys, ids) or pool.begin_get(keys, ids)
        self._begin_next(pool, read, keys, ids)
        return self._finish(pool, read, len(keys))

    def get_flat(self, pool: "Pool", keys: Sequence[bytes], pages: Sequence[Any]) -> Sequence[Any]:
        """Reads a batch of pages into `pages` or, if it was read ahead, into other tensors. Returns
        the tensors of the leading pages that were loaded.
        """
        read = self._take(pool, keys, None) or pool.begin_get_flat(keys, pages)
        self._begin_next(pool, read, keys, None)
        return read.copies[: self._finish(pool, read, len(keys))]

    def close(self) -> None:
        """Cancels the reads of batches that SGLang did not ask for, and waits until nothing writes
        to their memory.
        """
        self._closed = True
        begun = [*self._begun.values()]
        self._begun.clear()
        for _, read in begun:
            read.cancel()
        for pool, read in begun:
            pool.abandon_get(read)

    def _take(
        self, pool: "Pool", keys: Sequence[bytes], ids: Sequence[int] | None
    ) -> "PoolRead | None":
        """Returns the read of this batch that was begun ahead. Abandons a read of other pages."""
        if pool.name not in self._begun:
            return None
        _, read = self._begun.pop(pool.name)
        if read.scopes is pool.scopes and (read.keys, read.ids) == (keys, ids):
            return read
        pool.abandon_get(read)
        return None

    def _begin_next(
        self, pool: "Pool", read: "PoolRead", keys: Sequence[bytes], ids: Sequence[int] | None
    ) -> None:
        """Waits until `LEAD_SECONDS` before the expected end of `read`, or until `read` ends, and
        then begins to read the next batch. Does not raise, because the caller must still wait for
        `read`.
        """

        def action() -> None:
            expected = self._paces.expected(pool.name, len(keys))
            self._wait(read, max(read.began, self._ended) + expected - LEAD_SECONDS)
            next_keys, next_ids = self._transfer.next_batch(pool.name, keys, ids)
            if not next_keys:
                return
            if ids is None:
                pages = [pool.new_page() for _ in next_keys]
                begun = pool.begin_get_flat(next_keys, pages, behind=len(keys))
            else:
                begun = pool.begin_get(next_keys, next_ids, behind=len(keys))
            if begun.is_running:
                self._begun[pool.name] = pool, begun
            else:
                pool.abandon_get(begun)

        if not self._closed:
            self._store.attempt("read ahead", action, None)

    def _wait(self, read: "PoolRead", moment: float) -> None:
        """Waits until `read` ends, at most until `moment` of `perf_counter`. Cancels it if SGLang
        terminates the operation.
        """
        while perf_counter() < moment:
            if read.wait(min(moment, perf_counter() + CHECK_SECONDS)):
                return
            if self._transfer.is_terminated():
                read.cancel()
                return

    def _finish(self, pool: "Pool", read: "PoolRead", pages: int) -> int:
        self._store.attempt("get", lambda: self._wait(read, inf), None)
        filled, since = pool.finish_get(read, self._ended), max(read.began, self._ended)
        self._ended = perf_counter()
        if pages and filled == pages:
            self._paces.record(pool.name, pages, self._ended - since)
        return filled
