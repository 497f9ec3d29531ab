"""Counters of the connector, and the time of its hooks and of the engine's steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from ritornello.connector.meter import Counts, Meter

# Minimum time between reports in which only the time of hooks and steps, and the number of steps,
# have changed, because each report is a message between processes.
REPORT_SECONDS = 0.1


class StepMeter(Meter):
    """Counts of one side of the connector (scheduler or worker). Amounts that `add` added are
    reported after each step. While only the time of hooks and steps, and the number of steps, have
    changed, reports are at least `REPORT_SECONDS` apart. Steps must be measured, and reports taken,
    by one thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._news = False
        self._taken = perf_counter()
        self._step = 0.0

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            self.add_all({name: amount})
            self._news = True

    @contextmanager
    def hook(self) -> Iterator[None]:
        """Records the duration of a connector hook."""
        started = perf_counter()
        yield
        self.add_all({"hook_seconds": perf_counter() - started})

    def begin_step(self) -> None:
        self._step = perf_counter()

    def end_step(self) -> None:
        if self._step:
            self.add_all({"step_seconds": perf_counter() - self._step, "steps": 1})
            self._step = 0.0

    def take_report(self) -> Counts | None:
        """Returns the counts and resets them; None if there is nothing to report yet."""
        now = perf_counter()
        if not (self._news or now - self._taken >= REPORT_SECONDS):
            return None
        counts = self.take()
        if not counts:
            return None
        self._news, self._taken = False, now
        return counts
