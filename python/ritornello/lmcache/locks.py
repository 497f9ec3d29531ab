"""Locked objects: which lease keeps which, from the lookup that found them until they are
unlocked.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from time import monotonic

from ritornello.lmcache.naming import Family

# Families whose run-out locks are let go of at each new lock: more than the one it may add.
FAMILIES_SWEPT = 2


@dataclass(slots=True, eq=False)
class LeasedKeys:
    """A lease, and what of it is still locked."""

    lease: int
    keys: Sequence[bytes]
    until: float


class Locks:
    """Safe to be called from several threads. Locks that nobody takes back run out with their
    lease.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = Lock()
        # Oldest first. There are few at a time: one for each request between lookup and load.
        # The family that was swept last is the last.
        self._leases: OrderedDict[Family, deque[LeasedKeys]] = OrderedDict()

    def __len__(self) -> int:
        """Locks held."""
        with self._lock:
            return sum(len(hold.keys) for holds in self._leases.values() for hold in holds)

    def lock(self, family: Family, keys: Sequence[bytes], lease: int) -> None:
        """`keys` must not change from now on."""
        now = self._clock()
        with self._lock:
            hold = LeasedKeys(lease, keys, now + self._seconds)
            self._leases.setdefault(family, deque()).append(hold)
            for swept in list(islice(self._leases, FAMILIES_SWEPT)):
                self._sweep(swept, now)

    def _sweep(self, family: Family, now: float) -> None:
        holds = self._leases[family]
        while holds and holds[0].until <= now:
            holds.popleft()
        if holds:
            self._leases.move_to_end(family)
        else:
            del self._leases[family]

    def unlock(self, family: Family, keys: Iterable[bytes]) -> list[int]:
        """Takes one lock of each key back, the oldest; the leases that nothing needs any more.
        Keys that are not locked are ignored.
        """
        ended, left = [], set(keys)
        with self._lock:
            holds = self._leases.get(family, deque())
            for hold in tuple(holds):
                taken = left.intersection(hold.keys)
                left -= taken
                hold.keys = [key for key in hold.keys if key not in taken]
                if not hold.keys:
                    holds.remove(hold)
                    ended.append(hold.lease)
                if not left:
                    break
            if not holds:
                self._leases.pop(family, None)
        return ended

    def clear(self) -> None:
        with self._lock:
            self._leases.clear()
