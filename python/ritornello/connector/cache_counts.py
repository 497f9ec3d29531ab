"""The counters of a cache over tiers, under the names that the engines' metrics use, and their help
texts.
"""

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from ritornello.connector.meter import Counts

# Outcomes of prefetches from the remote.
PREFETCHES = ("completed", "not_worthwhile", "cancelled", "failed", "queue_full")
# Counters of the remote in `Cache.stats()`, which the engines' metrics name `remote_NAME`.
REMOTE_COUNTS = ("read_bytes", "written_bytes", "breaker_openings", "breaker_open_seconds")
# Help texts of the counters without reasons.
CACHE_COUNTERS = {
    "gate_load_seconds": "Seconds of the loads whose duration the gate had estimated.",
    "gate_regret_seconds": "Seconds by which loads that the gate had estimated, and the estimated "
    "time to compute the remaining tokens, exceeded the estimated time to compute all tokens.",
    "remote_read_bytes": "Bytes of objects read from the remote, without answers after their "
    "deadline.",
    "remote_written_bytes": "Bytes of objects written to the remote, without writes that ended "
    "after their deadline.",
    "remote_breaker_openings": "Times that the circuit breaker of the remote opened.",
    "remote_breaker_open_seconds": "Seconds that the circuit breaker of the remote was open.",
}


def help_by_reason(pages: str) -> dict[str, str]:
    """Returns the help texts of the counters with reasons. `pages`: the engine's word, in the
    plural, for the pages that a tier holds.
    """
    counted = pages.capitalize()
    return {
        "gate_decisions": f"Decisions of the gate to load all, some or none of the found {pages}.",
        "prefetches": "Prefetches from the remote, by outcome.",
        "tier_written_pages": f"{counted} written to a tier from the tier above, by tier.",
        "tier_dropped_pages": f"{counted} not written to a tier, by tier: its queue was full, it "
        "refused or failed the write, or the beginning of the prompt was not known.",
        "tier_lost_pages": f"{counted} not written to a tier because no other tier could supply "
        "them, by tier.",
        "remote_calls": "Calls to the remote: made (calls), failed (failures), and skipped after "
        "failures or while all threads were busy (spared).",
    }


class CacheCounts:
    """Computes by how much a cache's counters grew between two calls of `growth`. `is_due` returns
    whether `interval` seconds have passed since the last call of `growth`. Not thread-safe.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._taken: Counts = {}
        self._taken_at = 0.0

    def is_due(self) -> bool:
        return perf_counter() - self._taken_at >= self._interval

    def growth(self, stats: Mapping[str, Any]) -> Counts:
        """Returns by how much each counter of `stats` grew since the last call; the whole counters
        at the first call.
        """
        self._taken_at = perf_counter()
        before, self._taken = self._taken, counts_of(stats)
        amounts = {}
        for name, amount in self._taken.items():
            last = before.get(name, 0.0)
            # The counters of tiers that were reopened begin at zero.
            amounts[name] = amount - last if amount >= last else amount
        return amounts


def counts_of(stats: Mapping[str, Any]) -> Counts:
    """Returns the counters in `Cache.stats()` under the names that the engines' metrics use."""
    gate, prefetch = stats["gate"], stats["prefetch"]
    return {
        **{f"gate_decisions:{what}": gate[what] for what in ("all", "some", "none")},
        **{f"prefetches:{what}": prefetch[what] for what in PREFETCHES},
        **{
            f"tier_{what}_pages:{tier['tier']}": tier[f"{what}_pages"]
            for tier in stats["tiers"]
            for what in ("written", "dropped", "lost")
        },
        **{
            f"remote_calls:{what}": tier["remote"][what]
            for tier in stats["tiers"]
            if tier["remote"]
            for what in ("calls", "failures", "spared")
        },
        **{
            f"remote_{what}": tier["remote"][what]
            for tier in stats["tiers"]
            if tier["remote"]
            for what in REMOTE_COUNTS
        },
        "gate_load_seconds": gate["load_seconds"],
        "gate_regret_seconds": gate["regret_seconds"],
    }
