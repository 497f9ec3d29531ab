"""What both doors do: objects of many families put, had, looked up and deleted, each by itself.

Nothing here waits for the disk. A put or a get becomes one ticket for each scope that it touches,
and a `Job` that is done when all of them are.
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

# A part of a job is one ticket, and a ticket one thread's work: large jobs are cut so that several
# threads check and move the bytes.
TICKET_BYTES = 8 << 20
SERIALIZED = re.compile(r"uint8\[\d+\]")


class Item(NamedTuple):
    """An object that is moved, and its memory."""

    name: ObjectName
    form: ObjectFormat
    memory: Any


@dataclass(slots=True)
class Job:
    """A put or get under way. `ok[i]`: item `i` is stored, or filled and verified."""

    number: int
    ok: list[bool]
    left: int = 0


class Part(NamedTuple):
    """Which items of a job a ticket is about."""

    job: Job
    at: list[int]
    is_put: bool


class ObjectLease(NamedTuple):
    """A lease, and what it keeps."""

    lease: int
    family: Family
    keys: list[bytes]


class ObjectStore:
    """The store, by LMCache's names. Safe to be called from several threads. `staged`: memory is
    such that gets go through the store's staging memory.
    """

    def __init__(self, settings: Settings) -> None:
        self.store = LMCacheStore(settings)
        self.formats = FormatCatalog(self.store.scopes, settings.namespace)
        self.staged = False
        self._weak_hash_logged = False

    def put(self, number: int, items: Sequence[Item | None], to: "Completions") -> Job | None:
        """Starts a put; what is None is not stored. Returns None, or the job if it is over with
        that: nothing could be started.
        """
        return self._start(number, items, to, True)

    def get(self, number: int, items: Sequence[Item | None], to: "Completions") -> Job | None:
        """Likewise a get. An object that is stored in another form is not there."""
        return self._start(number, items, to, False)

    def finished(self, done: "Iterable[tuple[Part, Outcome]]") -> list[Job]:
        """Takes what tickets came to; the jobs that are over with it."""
        over = []
        for part, outcome in done:
            for at, ok in zip(part.at, outcome.ok, strict=True):
                part.job.ok[at] = ok
            stored = sum(outcome.ok)
            self.store.count("objects_stored" if part.is_put else "objects_loaded", stored)
            if stored < len(part.at):
                doing = "put" if part.is_put else "get"
                self.store.count(f"{doing}_missed:{outcome.reason}", len(part.at) - stored)
            part.job.left -= 1
            if part.job.left == 0:
                over.append(part.job)
        return over

    def lookup(
        self,
        groups: Sequence[Group],
        count: int,
        seconds: float,
        expected: Mapping[int, str] | None = None,
    ) -> tuple[list[bool], list[ObjectLease]]:
        """Which of `count` objects are there, and, with `seconds`, leases on those. `expected`:
        the layout that objects of a group are wanted in, for groups that have any such.
        """
        found = [False] * count
        leases: list[ObjectLease] = []
        for group in groups:
            if self._refuses_hashes(group.keys):
                continue
            layout = expected.get(group.family.group, "") if expected else ""
            there = self._lookup_in_family(group, layout, seconds, leases, None)
            if not all(there) and self.formats.refresh():
                there = self._lookup_in_family(group, layout, seconds, leases, there)
            if len(there) == count:
                found = there
            else:
                for at, is_there in zip(group.places, there, strict=True):
                    found[at] = is_there
        self.store.count_all(objects_asked=count, objects_found=found.count(True))
        return found, leases

    def delete(self, groups: Sequence[Group], count: int) -> list[bool]:
        """Deletes objects in all their forms; which of `count` were there."""
        self.formats.refresh()
        gone = [False] * count
        for group in groups:
            for scope in self.formats.of(group.family).values():
                there = self.store.exists(scope, group.keys)
                if any(there):
                    self.store.delete(scope, group.keys)
                for at, was_there in zip(group.places, there, strict=True):
                    gone[at] = gone[at] or was_there
        self.store.count("objects_deleted", sum(gone))
        return gone

    def usage(self) -> dict[str, int]:
        """Bytes of objects by salt."""
        used: dict[str, int] = {}
        for family, form, _, pages in self.formats.held():
            if pages:
                used[family.salt] = used.get(family.salt, 0) + pages * form.nbytes
        return used

    def _start(
        self, number: int, items: Sequence[Item | None], to: "Completions", is_put: bool
    ) -> Job | None:
        groups: dict[tuple[Family, ObjectFormat], list[tuple[int, Item]]] = {}
        for at, item in enumerate(items):
            if item is not None and not self._refuses_hashes((item.name.key,)):
                groups.setdefault((item.name.family, item.form), []).append((at, item))
        job = Job(number, [False] * len(items))
        tickets: list[tuple[Ticket, Part]] = []
        for (family, form), chosen in groups.items():
            try:
                scope = self.formats.scope(family, form, is_stored=is_put)
            except Exception as error:  # a page that is too long, say
                self.store.record_failure("scope", error)
                continue
            step = max(1, TICKET_BYTES // form.nbytes)
            for start in range(0, len(chosen), step):
                part = chosen[start : start + step]
                keys = [item.name.key for _, item in part]
                memories = [item.memory for _, item in part]
                if is_put:
                    ticket = self.store.submit_put(scope, keys, memories)
                else:
                    ticket = self.store.submit_get(scope, keys, memories, staged=self.staged)
                if ticket is not None:
                    tickets.append((ticket, Part(job, [at for at, _ in part], is_put)))
        # All counted before the first may come back.
        job.left = len(tickets)
        for ticket, piece in tickets:
            to.add(ticket, piece)
        return None if tickets else job

    def _refuses_hashes(self, keys: Sequence[bytes]) -> bool:
        """Whether a key's hash is too short to resist collisions, and the store's policy does not
        allow that: its object is then neither stored nor found.
        """
        if min(map(len, keys)) >= RANK_BYTES + STRONG_HASH_BYTES:
            return False
        why = self.store.hash_refusal(f"fewer than {STRONG_HASH_BYTES} bytes")
        if not why:
            return False
        if not self._weak_hash_logged:
            self._weak_hash_logged = True
            logger.warning("ritornello: %s; neither hits nor stores", why)
        return True

    def _lookup_in_family(
        self,
        group: Group,
        layout: str,
        seconds: float,
        leases: list[ObjectLease],
        known: list[bool] | None,
    ) -> list[bool]:
        there = known
        for form, scope in self.formats.of(group.family).items():
            if layout and form.layout and not fits(form.layout, layout):
                continue
            if there is None:
                there = self._lookup_in_scope(scope, group.family, group.keys, seconds, leases)
                continue
            missing = [at for at, is_there in enumerate(there) if not is_there]
            if not missing:
                break
            keys = [group.keys[at] for at in missing]
            more = self._lookup_in_scope(scope, group.family, keys, seconds, leases)
            for at, is_there in zip(missing, more, strict=True):
                there[at] = is_there
        return [False] * len(group.keys) if there is None else there

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
        match = self.store.pin_prefix(scope, keys, seconds)
        if match is None or not match.lease:
            return [False] * len(keys)
        if match.pages == len(keys):
            leases.append(ObjectLease(match.lease, family, keys))
            return [True] * len(keys)
        there = self.store.exists(scope, keys)
        kept = [key for key, is_there in zip(keys, there, strict=True) if is_there]
        if kept:
            leases.append(ObjectLease(match.lease, family, kept))
        else:
            self.store.release(match.lease)
        return there


@lru_cache(maxsize=256)
def fits(stored: str, wanted: str) -> bool:
    """Whether an object stored in one layout may serve where another is wanted. Bytes that a serde
    made (a row of uint8) look alike whatever they are made of: they may.
    """
    layout = stored.partition("@")[0]
    return layout == wanted or SERIALIZED.fullmatch(layout) is not None
