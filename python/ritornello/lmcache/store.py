"""Calls of LMCache's adapters to the store. Gets and puts have deadlines."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.meter import Counts, Meter
from ritornello.lmcache.settings import Settings

if TYPE_CHECKING:
    from ritornello._core import Scope, Store, Ticket

logger = logging.getLogger("ritornello.lmcache")

# Minimum deadlines in seconds: `Store.time_limit` raises the deadline of a large load, to at most
# 60. A load that takes longer is assumed to be slower than computing.
GET_SECONDS = 30.0
PUT_SECONDS = 60.0


class Found(NamedTuple):
    """The result of a lookup in one scope. `present[i]`: key `i` is stored. `lease` protects the
    stored pages from eviction, up to the limit of leased space that `Store.lease_prefix` names;
    None if nothing is leased. `pending`: a remote is being queried or read; the caller repeats the
    lookup, and `present` is preliminary.
    """

    present: list[bool]
    lease: Any = None
    pending: bool = False


class LMCacheStore(FailSafeStore):
    """The store of an adapter, opened at construction. `has_remote`: lookups may become pending."""

    has_remote = False

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, logger, lambda _: self.meter.add("errors"))
        self.meter = Meter()
        self._at_once: Store | None = None
        self.open()

    def is_owner(self) -> bool:
        """Returns whether this process owns the store."""
        return self.call("role", lambda store: store.role, "") == "owner"

    def answers_at_once(self) -> bool:
        """Returns whether no lookup waits for another process or for a disk. The store is not asked
        again once this is true, because the process stays the owner until the store is closed.
        """

        def action(store: "Store") -> bool:
            if self._at_once is not store and store.answers_at_once:
                self._at_once = store
            return self._at_once is store

        return bool(self.broken) or self.call("role", action, False)

    def problem(self) -> str:
        """Returns the reason why the store is not fully usable, "" if it is fully usable."""
        return self.broken or self.call("problem", lambda store: store.problem, "") or self.broken

    def find(self, scope: "Scope", keys: Sequence[bytes], seconds: float) -> Found:
        """Looks up each key and, if `seconds` is not 0, leases the stored pages for `seconds`."""
        none = Found([False] * len(keys))
        if not seconds:
            return Found(self.exists(scope, keys))
        leased = self.lease_prefix(scope, keys, seconds)
        if leased is None or not leased.lease:
            return none
        if leased.pages == len(keys):
            return Found([True] * len(keys), leased.lease)
        present = self.exists(scope, keys)
        if any(present):
            return Found(present, leased.lease)
        self.release(leased.lease)
        return none

    def cancel_lookup(self, scope: "Scope", keys: Sequence[bytes]) -> None:
        """Does nothing here: `find` in one store is never pending. With tiers (`cache_store`),
        cancels a pending `find`.
        """

    def exists(self, scope: "Scope", keys: Sequence[bytes]) -> list[bool]:
        return self.call("exists", lambda store: store.exists(scope, keys), [False] * len(keys))

    def submit_get(
        self, scope: "Scope", keys: Sequence[bytes], out: Sequence[Any], *, staged: bool
    ) -> "Ticket | None":
        def action(store: "Store") -> "Ticket":
            limit = store.time_limit(len(keys) * scope.page_bytes, GET_SECONDS)
            return store.submit_get(scope, keys, out, staged=staged, timeout=limit)

        return self.call("get", action, None)

    def submit_put(
        self, scope: "Scope", keys: Sequence[bytes], pages: Sequence[Any]
    ) -> "Ticket | None":
        """Starts a put. The memory must not change until the ticket is done."""

        def action(store: "Store") -> "Ticket":
            limit = store.time_limit(len(keys) * scope.page_bytes, PUT_SECONDS, put=True)
            return store.submit_put(scope, keys, pages, copy=False, timeout=limit)

        return self.call("put", action, None)

    def delete(self, scope: "Scope", keys: Sequence[bytes]) -> bool:
        """Deletes the pages `keys` of a scope. Returns whether the call succeeded."""

        def action(store: "Store") -> bool:
            store.delete(scope, keys)
            return True

        return self.call("delete", action, False)

    def scopes(self) -> "list[tuple[Scope, int, int]]":
        return self.call("scopes", lambda store: store.scopes(), [])

    def keys(self, scope: "Scope", after: int, limit: int) -> tuple[list[bytes], int]:
        none: tuple[list[bytes], int] = ([], 0)
        return self.call("keys", lambda store: store.keys(scope, after=after, limit=limit), none)

    def stats_counts(self) -> Counts:
        """Returns the counters of tiers, prefetches and the gate: none here, for a single store."""
        return {}

    def capacity(self) -> int:
        """Returns the capacity in bytes; 0 if no store is in use."""
        return self.call("stats", lambda store: int(store.stats()["capacity_bytes"]), 0)
