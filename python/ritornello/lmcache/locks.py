"""Locked objects: the leases that protect them, from lookup to unlock."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from time import monotonic
from typing import Any

from ritornello.lmcache.naming import Family

# Each call of `lock` removes the expired leases of this number of families. With 1, calls that each
# add a family would remove at most as many families as they add, so that a large number of families
# would never shrink.
FAMILIES_SWEPT = 2


@dataclass(slots=True, eq=False)
class LeasedKeys:
    """A lease, its keys that are still locked, and the time at which it expires."""

    lease: Any
    keys: Sequence[bytes]
    until: float


class Locks:
    """Locks on objects, by family. Thread-safe. Locks that are never released expire with their
    lease.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = Lock()
        # The leases of each family, oldest first. A lease stays from the lookup of a request until
        # its objects are unlocked, or until it is removed after it has expired. Expired leases are
        # removed from the first families of the dictionary; each of these families then moves to
        # the end, if it still has leases.
        self._leases: OrderedDict[Family, deque[LeasedKeys]] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of locks, without locks that have expired."""
        now = self._clock()
        with self._lock:
            return sum(
                len(leased.keys)
                for leases in self._leases.values()
                for leased in leases
                if leased.until > now
            )

    def lock(self, family: Family, keys: Sequence[bytes], lease: Any) -> None:
        """Locks `keys`, which must not change afterwards, under `lease`."""
        now = self._clock()
        with self._lock:
            leased = LeasedKeys(lease, keys, now + self._seconds)
            self._leases.setdefault(family, deque()).append(leased)
            for swept in list(islice(self._leases, FAMILIES_SWEPT)):
                self._sweep(swept, now)

    def _sweep(self, family: Family, now: float) -> None:
        leases = self._leases[family]
        while leases and leases[0].until <= now:
            leases.popleft()
        if leases:
            self._leases.move_to_end(family)
        else:
            del self._leases[family]

    def unlock(self, family: Family, keys: Iterable[bytes]) -> list[Any]:
        """Releases the oldest lock of each key. Returns the leases that no longer protect a locked
        key. Ignores keys that are not locked.
        """
        released, remaining = [], set(keys)
        with self._lock:
            leases = self._leases.get(family, deque())
            for leased in tuple(leases):
                taken = remaining.intersection(leased.keys)
                remaining -= taken
                leased.keys = [key for key in leased.keys if key not in taken]
                if not leased.keys:
                    leases.remove(leased)
                    released.append(leased.lease)
                if not remaining:
                    break
            if not leases:
                self._leases.pop(family, None)
        return released

    def clear(self) -> None:
        with self._lock:
            self._leases.clear()
