"""Calls that may wait for the process that owns a store, on a separate thread."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

# Maximum number of calls that wait for the thread. An owner that does not answer may block the
# thread, and calls then accumulate.
QUEUED_CALLS_MAX = 4096


class Call:
    """A queued call. `value` is its result once it is done."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self._done = threading.Event()
        self.value: Any = None

    def run(self) -> None:
        try:
            self.value = self._action()
        finally:
            self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Returns whether the call is done within `seconds`."""
        return self._done.wait(seconds)


class CallThread:
    """Runs calls in order. The thread starts with the first call. Actions must not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.Queue[Call | None] | None = None

    def submit(self, action: Callable[[], Any]) -> Call | None:
        """Queues a call. Returns None, and drops the call, if `QUEUED_CALLS_MAX` calls are queued,
        or if the thread cannot be started; the next call then tries again to start it.
        """
        if self._calls is None:
            calls: queue.Queue[Call | None] = queue.Queue(QUEUED_CALLS_MAX)
            thread = threading.Thread(target=_run, args=(calls,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return None
            self._calls = calls
        call = Call(action)
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            return None
        return call

    def stop(self) -> None:
        """Ends the thread after the queued calls, without waiting. If the queue is full, the thread
        stays until the process ends.
        """
        calls, self._calls = self._calls, None
        if calls is not None:
            with contextlib.suppress(queue.Full):
                calls.put_nowait(None)


def _run(calls: "queue.Queue[Call | None]") -> None:
    while (call := calls.get()) is not None:
        call.run()
