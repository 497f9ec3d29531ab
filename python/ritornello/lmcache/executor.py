"""Runs queries to the store without blocking the engine's threads.

In the process that owns the store, if the index is in memory, a query takes microseconds, and runs
in the caller unless the background thread exists. An index with files may wait for a disk. In other
processes a query passes through a socket to the owner, which may be dead or stopped. Such queries
run on the background thread. A query that waits for a remote moves to this
thread too, which repeats it without delaying the queries behind it. Once the thread exists, it
begins all queries, in the order of their submission.
"""

import logging
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic

logger = logging.getLogger("ritornello.lmcache")

# A query is dropped after this time in the queue: its result would be too late.
QUERY_SECONDS = 10.0
# Pause before a query is repeated.
REPEAT_SECONDS = 0.003
# Maximum time that closing waits for the running query.
CLOSE_SECONDS = 35.0
# A function that is called with True if the query is dropped, otherwise with False. A dropped query
# must report its completion too, because LMCache waits for the report. The function returns True to
# be called again. The repeats end, because the cache limits how long a lookup stays pending.
Query = Callable[[bool], bool | None]


class LookupExecutor:
    """Begins queries in submission order. `at_once` returns whether a query would return without
    waiting for another process or for a disk. Such a query runs in the caller, unless the
    background thread exists.
    """

    def __init__(self, at_once: Callable[[], bool]) -> None:
        self._answers_at_once = at_once
        self._queue: SimpleQueue[tuple[float, Query] | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, query: Query) -> None:
        """Calls `query`, now or on the background thread. `query` must not raise."""
        # Once the thread exists, every query goes through its queue, so that queries run in order.
        if self._thread is None and self._answers_at_once() and not query(self._closed):
            return
        with self._lock:
            if not self._closed and self._has_thread():
                self._queue.put((monotonic() + QUERY_SECONDS, query))
                return
        query(True)

    def _has_thread(self) -> bool:
        """Starts the thread on the first call. Returns False if it cannot be started; the next
        query then tries again. Requires the lock.
        """
        if self._thread is None:
            thread = Thread(target=self._run, name="ritornello-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError as reason:
                logger.debug("ritornello: cannot start a thread for lookups (%s)", reason)
                return False
            self._thread = thread
        return True

    def close(self) -> None:
        """Drops queued and repeated queries and waits for the running query, at most
        `CLOSE_SECONDS`. Idempotent.
        """
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        pending: list[Query] = []
        due = 0.0
        while True:
            if pending and monotonic() >= due:
                pending = [query for query in pending if query(self._closed)]
                due = monotonic() + REPEAT_SECONDS
            try:
                waiting = self._queue.get(timeout=max(due - monotonic(), 0) if pending else None)
            except Empty:
                continue
            if waiting is None:
                break
            until, query = waiting
            if query(self._closed or monotonic() > until):
                pending.append(query)
        for query in pending:
            query(True)
