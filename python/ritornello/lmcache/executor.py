"""Questions to the store, put where waiting for the answer is in nobody's way.

Where this process owns the store they take microseconds and are asked on the spot. Where another
does, they go over a socket whose other end may be dead or stopped: one thread asks them in turn.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic

# A question that has waited this long is not asked any more: what it was for is late.
QUERY_SECONDS = 10.0
# Closing waits this long for the question that is being asked.
CLOSE_SECONDS = 35.0
# Its answer is awaited by somebody; `True` says that it was not asked.
Query = Callable[[bool], None]


class LookupExecutor:
    """`at_once` says whether a question would be answered without waiting for another process."""

    def __init__(self, at_once: Callable[[], bool]) -> None:
        self._answers_at_once = at_once
        self._queue: SimpleQueue[tuple[float, Query] | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, query: Query) -> None:
        """Calls `query` once, now or later. It must not raise."""
        # The order is kept: what waits is asked first.
        if self._thread is None and self._answers_at_once():
            query(self._closed)
            return
        with self._lock:
            if not self._closed:
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="ritornello-ask", daemon=True)
                    self._thread.start()
                self._queue.put((monotonic() + QUERY_SECONDS, query))
                return
        query(True)

    def close(self) -> None:
        """Gives up what waits. Again: does nothing."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            until, query = waiting
            query(self._closed or monotonic() > until)
