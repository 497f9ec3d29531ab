"""Counters on the engine's own threads: additions to a dictionary, reported at intervals."""

from time import perf_counter

# Minimum time between reports of times alone: each report is a message between processes.
REPORT_SECONDS = 0.1

# Counters with a label `reason`, counted as "name:reason".
BY_REASON = (
    "missed_pages",
    "skipped_pages",
    "gate_decisions",
    "prefetches",
    "tier_written_pages",
    "tier_dropped_pages",
    "tier_lost_pages",
    "remote_calls",
)

Counts = dict[str, float]


class Meter:
    """Counts since the last `take`. Not thread-safe: each side of the connector has its own meter
    and uses it from one thread.
    """

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._news = False
        self._taken = perf_counter()
        self._step = 0.0

    def add(self, name: str, amount: float) -> None:
        """Adds to a counter of pages or calls, which is reported at the end of this step."""
        if amount:
            self._counts[name] = self._counts.get(name, 0.0) + amount
            self._news = True

    def missed(self, reason: str, pages: int) -> None:
        """Counts pages that were requested and not loaded."""
        self.add(f"missed_pages:{reason}", pages)

    def skipped(self, reason: str, pages: int) -> None:
        """Counts pages that were offered and not stored."""
        self.add(f"skipped_pages:{reason}", pages)

    def hook(self, started: float) -> None:
        """Records the duration of a connector hook that began at `started` (perf_counter)."""
        self._time("hook_seconds", perf_counter() - started)

    def begin_step(self) -> None:
        self._step = perf_counter()

    def end_step(self) -> None:
        if self._step:
            self._time("step_seconds", perf_counter() - self._step)
            self._time("steps", 1)
            self._step = 0.0

    def take(self) -> Counts | None:
        """Returns the counts and resets them; None if there is nothing to report yet."""
        now = perf_counter()
        if not self._counts or not (self._news or now - self._taken >= REPORT_SECONDS):
            return None
        counts, self._counts = self._counts, {}
        self._news, self._taken = False, now
        return counts

    def _time(self, name: str, amount: float) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + amount
