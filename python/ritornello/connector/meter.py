"""Counters of an adapter. Each adapter reports them in its engine's own way."""

from threading import Lock

Counts = dict[str, float]


class Meter:
    """Amounts by name since the start, or since the last `take`. Amounts with a reason are named
    "name:reason". Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counts = {}

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            self.add_all({name: amount})

    def add_all(self, amounts: Counts) -> None:
        """Adds several amounts under one lock. A counter to which 0 is added appears in the
        counts.
        """
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] = self._counts.get(name, 0) + amount

    def missed(self, reason: str, pages: int) -> None:
        """Counts pages that were requested and not loaded."""
        self.add(f"missed_pages:{reason}", pages)

    def skipped(self, reason: str, pages: int) -> None:
        """Counts pages that were offered and not stored."""
        self.add(f"skipped_pages:{reason}", pages)

    def counts(self) -> Counts:
        with self._lock:
            return dict(self._counts)

    def take(self) -> Counts:
        """Returns the counts and resets them."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts
