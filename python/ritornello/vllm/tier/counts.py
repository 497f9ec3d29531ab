"""Counters of the tier, besides the counters that vLLM's tiering manager keeps for every tier."""

import threading

# Name on /metrics, help text, and whether the counter has a label `reason`.
PREFIX = "vllm:kv_offload_ritornello_"
COUNTERS = {
    "lookups": ("Calls to the store that answered lookups; one call answers many chunks.", False),
    "lookup_seconds": ("Time of the calls that answered lookups, in seconds.", False),
    "failed_chunks": ("Chunks that a lookup promised and a load did not fill, by reason.", True),
    "skipped_chunks": ("Chunks that were offered and not stored, by reason.", True),
    "ignored_retentions": (
        "Requests to retain pages that the store's policy does not permit.",
        False,
    ),
    "errors": ("Calls to the store that failed, by call.", True),
}


class Counts:
    """Amounts by name and reason since the last `take`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts: dict[tuple[str, str], float] = {}

    def add(self, name: str, reason: str = "", amount: float = 1) -> None:
        if amount:
            with self._lock:
                self._amounts[name, reason] = self._amounts.get((name, reason), 0) + amount

    def take(self) -> dict[tuple[str, str], float]:
        with self._lock:
            amounts, self._amounts = self._amounts, {}
        return amounts
