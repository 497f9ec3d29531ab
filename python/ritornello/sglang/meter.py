"""Counters for several of SGLang's threads, and the rates that SGLang collects."""

from dataclasses import dataclass, field
from threading import Lock

GB = 1e9
# Maximum number of entries. SGLang's scheduler collects them at every step.
RATES_MAX = 1024


@dataclass(slots=True)
class Rates:
    """One entry for each call: pages moved, and GB/s."""

    prefetch_pages: list[int] = field(default_factory=list)
    backup_pages: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class Meter:
    """Counts and rates. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[str, float] = {}
        self._rates = Rates()

    def add(self, name: str, amount: float) -> None:
        if amount:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + amount

    def prefetched(self, pages: int, page_bytes: int, seconds: float) -> None:
        self._moved("loaded", pages, page_bytes, seconds)

    def backed_up(self, pages: int, page_bytes: int, seconds: float) -> None:
        self._moved("saved", pages, page_bytes, seconds)

    def counts(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)

    def take_rates(self) -> Rates:
        """Returns the rates since the last call."""
        with self._lock:
            rates, self._rates = self._rates, Rates()
        return rates

    def _moved(self, what: str, pages: int, page_bytes: int, seconds: float) -> None:
        if not pages:
            return
        self.add(f"{what}_pages", pages)
        self.add(f"{what}_bytes", pages * page_bytes)
        self.add(f"{what}_seconds", seconds)
        rate = pages * page_bytes / GB / max(seconds, 1e-9)
        with self._lock:
            loads = what == "loaded"
            moved = self._rates.prefetch_pages if loads else self._rates.backup_pages
            rates = self._rates.prefetch_bandwidth if loads else self._rates.backup_bandwidth
            if len(moved) < RATES_MAX:
                moved.append(pages)
                rates.append(rate)
