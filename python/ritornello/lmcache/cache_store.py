"""Calls of LMCache's adapters to a cache over tiers.

LMCache's own memory (L1) is the tier above these tiers. A lookup asks the tiers of this machine
first, and a remote for the pages that they lack. Pages of the remote are put on the disk before a
lookup counts them as found, so that loads read them from this machine.

The gate `auto` loads all found pages, as `always` does: LMCache tells its adapters neither how long
a prefill took nor how many tokens the engine has already, so there is nothing to compare a load
with.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ritornello.connector.cache_counts import counts_of
from ritornello.connector.meter import Counts
from ritornello.lmcache.settings import Settings
from ritornello.lmcache.store import Found, LMCacheStore

if TYPE_CHECKING:
    from ritornello._core import Cache, Scope, TierName

T = TypeVar("T")

# Duration of a lookup's leases if the caller of `find` wants no leases: `find` releases them before
# it returns.
SHORT_SECONDS = 1.0


class LMCacheTiers(LMCacheStore):
    """The tiers of an adapter, opened at construction. A lease of this store is the list of the
    leases that a lookup holds on the tiers.
    """

    def __init__(self, settings: Settings) -> None:
        self.has_remote = settings.has_remote
        self._gate = settings.gate
        super().__init__(settings)

    def find(self, scope: "Scope", keys: Sequence[bytes], seconds: float) -> Found:
        def action(cache: "Cache") -> Found:
            found = cache.lookup(scope, keys, ttl=seconds or SHORT_SECONDS, gate=self._gate)
            leases = found.leases
            if found.state != "ready":
                # Pending lookups lease nothing.
                return Found([False] * len(keys), None, pending=True)
            if self._gate == "never":
                present = [False] * len(keys)
            elif found.local == len(keys):
                present = [True] * len(keys)
            else:
                # Pages after the first missing page count too: LMCache may have that page in its
                # own memory, and object groups with a window lack the pages before the window.
                try:
                    present = cache.exists(scope, keys)
                except BaseException:
                    _release(cache, leases)
                    raise
            if leases and seconds and any(present):
                return Found(present, leases)
            _release(cache, leases)
            return Found(present)

        return self._on_cache("lookup", action, Found([False] * len(keys)))

    def cancel_lookup(self, scope: "Scope", keys: Sequence[bytes]) -> None:
        self._on_cache("cancel_lookup", lambda cache: cache.cancel(scope, keys), False)

    def release(self, lease: Any) -> None:
        self._on_cache("release", lambda cache: _release(cache, lease), None)

    def stats_counts(self) -> Counts:
        return self._on_cache("stats", lambda cache: counts_of(cache.stats()), {})

    def capacity(self) -> int:
        return self._on_cache("capacity", lambda cache: cache.capacity_bytes, 0)

    def _on_cache(self, operation: str, action: "Callable[[Cache], T]", default: T) -> T:
        return self.call(operation, lambda store: action(cast("Cache", store)), default)


def _release(cache: "Cache", leases: "Sequence[tuple[TierName, int]]") -> None:
    for lease in leases:
        cache.release(lease)
