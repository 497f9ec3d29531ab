"""Operations of both interfaces of LMCache: put, get, lookup and deletion of objects, which may be
in different scopes.

No operation waits for the disk. A put or a get has one ticket for each scope, and a `Job` that is
done when all its tickets are done.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ritornello.lmcache.formats import FormatCatalog
from ritornello.lmcache.naming import (
    RANK_BYTES,
    STRONG_HASH_BYTES,
    Family,
    Group,
    ObjectFormat,
    ObjectName,
)
from ritornello.lmcache.settings import Settings
from ritornello.lmcache.store import LMCacheStore, logger

if TYPE_CHECKING:
    from ritornello._core import Completions, Outcome, Scope, Ticket

SERIALIZED = re.compile(r"uint8\[\d+\]")


class Item(NamedTuple):
    """An object to be moved, and its memory."""

    name: ObjectName
    format: ObjectFormat
    memory: Any


@dataclass(slots=True)
class Job:
    """A put or get in progress. `ok[i]`: item `i` is stored, or filled and verified. `pending`:
    tickets that are not done.
    """

    number: int
    ok: list[bool]
    pending: int = 0


class TicketItems(NamedTuple):
    """The items of a job that one ticket moves."""

    job: Job
    indices: list[int]
    is_put: bool


class ObjectLease(NamedTuple):
    """A lease, and the objects it protects."""

    lease: int
    family: Family
    keys: list[bytes]


class ObjectStore:
    """The store under LMCache's names. Thread-safe. `staged`: gets go through the store's staging
    memory.
    """

    def __init__(self, settings: Settings) -> None:
        self.store = LMCacheStore(settings)
        self.formats = FormatCatalog(self.store.scopes, settings.namespace)
        self.staged = False
        self._weak_hash_logged = False

    def complete_tickets(self, done: "Iterable[tuple[TicketItems, Outcome]]") -> list[Job]:
        """Records outcomes of tickets. Returns the jobs that have no further ticket."""
        finished = []
        for part, outcome in done:
            for index, ok in zip(part.indices, outcome.ok, strict=True):
                part.job.ok[index] = ok
            stored = sum(outcome.ok)
            meter = self.store.meter
            meter.add_all({"objects_stored" if part.is_put else "objects_loaded": stored})
            if stored < len(part.indices):
                operation = "put" if part.is_put else "get"
                meter.add(f"{operation}_missed:{outcome.reason}", len(part.indices) - stored)
            part.job.pending -= 1
            if part.job.pending == 0:
                finished.append(part.job)
        return finished

    def lookup(
        self,
        groups: Sequence[Group],
        count: int,
        seconds: float,
        expected: Mapping[int, str] | None = None,
    ) -> tuple[list[bool], list[ObjectLease]]:
        """Returns which of `count` objects are stored and, if `seconds` is not 0, leases on them.
        `expected`: the required layout of objects, by LMCache's object group; groups without an
        entry accept any.
        """
        found = [False] * count
        leases: list[ObjectLease] = []
        for group in groups:
            if self._refuses_hashes(group.keys):
                continue
            layout = expected.get(group.family.group, "") if expected else ""
            present = self._lookup_in_family(group, layout, seconds, leases, None)
            if not all(present) and self.formats.refresh():
                present = self._lookup_in_family(group, layout, seconds, leases, present)
            if len(present) == count:
                found = present
            else:
                for index, is_present in zip(group.indices, present, strict=True):
                    found[index] = is_present
        self.store.meter.add_all({"objects_asked": count, "objects_found": found.count(True)})
        return found, leases

    def delete(self, groups: Sequence[Group], count: int) -> list[bool]:
        """Deletes objects in all their formats. Returns which of `count` were stored."""
        self.formats.refresh()
        deleted = [False] * count
        for group in groups:
            for scope in self.formats.of(group.family).values():
                present = self.store.exists(scope, group.keys)
                if any(present):
                    self.store.delete(scope, group.keys)
                for index, was_present in zip(group.indices, present, strict=True):
                    deleted[index] = deleted[index] or was_present
        self.store.meter.add_all({"objects_deleted": sum(deleted)})
        return deleted

    def usage(self) -> dict[str, int]:
        """Returns bytes of objects by salt."""
        used: dict[str, int] = {}
        for family, object_format, _, pages in self.formats.stored_formats():
            if pages:
                used[family.salt] = used.get(family.salt, 0) + pages * object_format.nbytes
        return used

    def start(
        self, number: int, items: Sequence[Item | None], completions: "Completions", *, is_put: bool
    ) -> Job | None:
        """Starts a put or a get. Skips items that are None. In a get, an object that is stored in a
        different format is a miss. Returns None, or the job if it has ended already, because no
        ticket could be started.
        """
        groups: dict[tuple[Family, ObjectFormat], list[tuple[int, Item]]] = {}
        for index, item in enumerate(items):
            if item is not None and not self._refuses_hashes((item.name.key,)):
                groups.setdefault((item.name.family, item.format), []).append((index, item))
        job = Job(number, [False] * len(items))
        tickets: list[tuple[Ticket, TicketItems]] = []
        for (family, object_format), group_items in groups.items():
            try:
                scope = self.formats.scope(family, object_format, is_stored=is_put)
            except Exception as error:  # for example, a page that is too long
                self.store.record_failure("scope", error)
                continue
            keys = [item.name.key for _, item in group_items]
            memories = [item.memory for _, item in group_items]
            if is_put:
                ticket = self.store.submit_put(scope, keys, memories)
            else:
                ticket = self.store.submit_get(scope, keys, memories, staged=self.staged)
            if ticket is not None:
                indices = [index for index, _ in group_items]
                tickets.append((ticket, TicketItems(job, indices, is_put)))
        # Set the count before a ticket is added: `complete_tickets` may run on another thread, and
        # decrements it.
        job.pending = len(tickets)
        for ticket, ticket_items in tickets:
            completions.add(ticket, ticket_items)
        return None if tickets else job

    def _refuses_hashes(self, keys: Sequence[bytes]) -> bool:
        """Returns whether a key's hash is too short to resist collisions and the store's policy
        does not permit it. An object with a refused hash is neither stored nor found.
        """
        if min(map(len, keys)) >= RANK_BYTES + STRONG_HASH_BYTES:
            return False
        reason = self.store.hash_refusal(f"fewer than {STRONG_HASH_BYTES} bytes")
        if not reason:
            return False
        if not self._weak_hash_logged:
            self._weak_hash_logged = True
            logger.warning("ritornello: %s; neither hits nor stores", reason)
        return True

    def _lookup_in_family(
        self,
        group: Group,
        layout: str,
        seconds: float,
        leases: list[ObjectLease],
        known: list[bool] | None,
    ) -> list[bool]:
        present = known
        for object_format, scope in self.formats.of(group.family).items():
            if layout and object_format.layout and not fits(object_format.layout, layout):
                continue
            if present is None:
                present = self._lookup_in_scope(scope, group.family, group.keys, seconds, leases)
                continue
            missing = [index for index, is_present in enumerate(present) if not is_present]
            if not missing:
                break
            keys = [group.keys[index] for index in missing]
            more = self._lookup_in_scope(scope, group.family, keys, seconds, leases)
            for index, is_present in zip(missing, more, strict=True):
                present[index] = is_present
        return [False] * len(group.keys) if present is None else present

    def _lookup_in_scope(
        self,
        scope: "Scope",
        family: Family,
        keys: list[bytes],
        seconds: float,
        leases: list[ObjectLease],
    ) -> list[bool]:
        if not seconds:
            return self.store.exists(scope, keys)
        match = self.store.lease_prefix(scope, keys, seconds)
        if match is None or not match.lease:
            return [False] * len(keys)
        if match.pages == len(keys):
            leases.append(ObjectLease(match.lease, family, keys))
            return [True] * len(keys)
        present = self.store.exists(scope, keys)
        pinned = [key for key, is_present in zip(keys, present, strict=True) if is_present]
        if pinned:
            leases.append(ObjectLease(match.lease, family, pinned))
        else:
            self.store.release(match.lease)
        return present


@lru_cache(maxsize=256)
def fits(stored: str, wanted: str) -> bool:
    """Returns whether an object of one layout can be used as another. Serialized bytes (a row of
    uint8) do not show their layout, so they fit.
    """
    layout = stored.partition("@")[0]
    return layout == wanted or SERIALIZED.fullmatch(layout) is not None
