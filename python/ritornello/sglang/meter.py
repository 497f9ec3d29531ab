"""Counters of a storage, and the pages and GB/s of each transfer for SGLang's metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ritornello.connector.meter import Counts, Meter

GB = 1e9
# Maximum number of loads, and of saves, whose rates wait for SGLang's scheduler, which collects
# them at every step. Rates of further transfers are dropped.
RATES_MAX = 1024
# Counters of the time of transfers.
SECONDS = {"loaded": "load_seconds", "saved": "save_seconds"}


@dataclass(slots=True)
class Rates:
    """Pages and GB/s of each transfer, in order: loads (`prefetch`) and saves (`backup`)."""

    prefetch_pages: list[int] = field(default_factory=list)
    backup_pages: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class RateMeter(Meter):
    """Counts and rates. `export` is called with all amounts as they are added. Thread-safe."""

    def __init__(self, export: Callable[[Counts], object] = lambda amounts: None) -> None:
        super().__init__()
        self._rates = Rates()
        self._export = export

    def add_all(self, amounts: Counts) -> None:
        super().add_all(amounts)
        self._export(amounts)

    def take_rates(self) -> Rates:
        """Returns the rates since the last call."""
        with self._lock:
            rates, self._rates = self._rates, Rates()
        return rates

    def probed(self, pages: int, hits: int) -> None:
        """Counts pages that were looked up, and the `hits` among them that can be loaded."""
        self.add("probed_pages", pages)
        self.add("hit_pages", hits)

    def moved(self, what: str, pages: int, page_bytes: int, seconds: float) -> None:
        """Counts the pages that one call moved. `what`: "loaded" or "saved"."""
        if not pages:
            return
        moved_bytes = pages * page_bytes
        self.add(f"{what}_pages", pages)
        self.add(f"{what}_bytes", moved_bytes)
        self.add(SECONDS[what], seconds)
        rate = moved_bytes / GB / max(seconds, 1e-9)
        with self._lock:
            loads = what == "loaded"
            moved = self._rates.prefetch_pages if loads else self._rates.backup_pages
            rates = self._rates.prefetch_bandwidth if loads else self._rates.backup_bandwidth
            if len(moved) < RATES_MAX:
                moved.append(pages)
                rates.append(rate)
