"""Counters of the tier, in addition to those that vLLM's tiering manager has for every tier."""

import threading

# Name on /metrics, help text, and whether the counter has a label `reason`.
PREFIX = "vllm:kv_offload_ritornello_"
COUNTERS = {
    "questions": ("Calls to the store that answered lookups; one answers many chunks.", False),
    "question_seconds": ("Time those calls took.", False),
    "failed_chunks": ("Chunks that a lookup promised and a load did not bring, by reason.", True),
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
