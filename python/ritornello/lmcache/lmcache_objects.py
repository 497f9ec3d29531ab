"""LMCache's objects as pages of the store: put, get, delete and usage, for the L2 adapter and for
the client of `native_plugin`. One call may name objects of several scopes.

Puts and gets do not wait for the disk: each has one ticket for each scope, and a `Job` that is done
when all its tickets are done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ritornello.lmcache.cache_store import LMCacheTiers
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


class Item(NamedTuple):
    """An object to be moved, and its memory. `owner`: LMCache's memory object; None if it is
    unknown.
    """

    name: ObjectName
    format: ObjectFormat
    memory: Any
    owner: Any = None


@dataclass(slots=True)
class Job:
    """A put or get in progress. `ok[i]`: in a put, item `i` is stored; in a get, its memory is
    filled with verified bytes. `pending`: number of tickets that are not done.
    """

    number: int
    ok: list[bool]
    pending: int = 0


class TicketItems(NamedTuple):
    """The items of a job that one ticket moves: objects with the keys `keys` in `scope`, of
    `nbytes` each. `owners`: LMCache's memory objects. `started`: when the ticket was submitted.
    """

    job: Job
    indices: list[int]
    is_put: bool
    scope: "Scope"
    keys: list[bytes]
    owners: list[Any]
    nbytes: int
    started: float


class ObjectStore:
    """The store, with LMCache's objects as its pages. Thread-safe. `staged`: gets go through the
    store's staging memory.
    """

    def __init__(self, settings: Settings) -> None:
        self.store = (LMCacheTiers if settings.tiers else LMCacheStore)(settings)
        self.formats = FormatCatalog(self.store.scopes, settings.namespace)
        self.staged = False
        self._weak_hash_logged = False
        # Whether to warn of objects whose dtype does not tell their kind of KV.
        self._warns_of_uint8 = not settings.namespace

    def complete_tickets(self, done: "Iterable[tuple[TicketItems, Outcome]]") -> list[Job]:
        """Records outcomes of tickets. Returns the jobs whose last ticket is among them."""
        finished = []
        for part, outcome in done:
            moved, freed = list(outcome.ok), self._freed(part) if part.is_put else []
            if freed:
                self._delete_freed(part, freed)
                for at in freed:
                    moved[at] = False
            for index, ok in zip(part.indices, moved, strict=True):
                part.job.ok[index] = ok
            self._count(part, sum(moved), "freed" if freed else outcome.reason)
            part.job.pending -= 1
            if part.job.pending == 0:
                finished.append(part.job)
        return finished

    def delete(self, groups: Sequence[Group], count: int) -> list[bool]:
        """Deletes objects in all formats that are known. Returns, for each of the `count` objects
        of the request, whether it was stored and no deletion failed.
        """
        self.formats.refresh()
        deleted, kept = [False] * count, [False] * count
        for group in groups:
            for scope in self.formats.of(group.family).values():
                present = self.store.exists(scope, group.keys)
                if not any(present):
                    continue
                which = deleted if self.store.delete(scope, group.keys) else kept
                for index, was_present in zip(group.indices, present, strict=True):
                    which[index] |= was_present
        deleted = [gone and not left for gone, left in zip(deleted, kept, strict=True)]
        self.store.meter.add("deleted_pages", sum(deleted))
        return deleted

    def usage(self) -> dict[str, int]:
        """Returns the bytes of the stored objects by salt."""
        used: dict[str, int] = {}
        for family, object_format, _, pages in self.formats.stored_formats():
            if pages:
                used[family.salt] = used.get(family.salt, 0) + pages * object_format.nbytes
        return used

    def start(
        self, number: int, items: Sequence[Item | None], completions: "Completions", *, is_put: bool
    ) -> Job | None:
        """Starts a put or a get. Skips items that are None. In a get, an object that is stored in a
        different format is a miss. Returns None or, if no ticket was started, the job, which has
        then ended.
        """
        groups: dict[tuple[Family, ObjectFormat], list[tuple[int, Item]]] = {}
        for index, item in enumerate(items):
            if item is not None and not self.refuses_hashes((item.name.key,)):
                groups.setdefault((item.name.family, item.format), []).append((index, item))
        job = Job(number, [False] * len(items))
        tickets: list[tuple[Ticket, TicketItems]] = []
        for (family, object_format), group_items in groups.items():
            self.formats.record_use(family, object_format)
            if self._warns_of_uint8 and object_format.has_unknown_dtype:
                self._warns_of_uint8 = False
                logger.warning(
                    "ritornello: LMCache does not name the kind of 8-bit KV (such as fp8_e4m3): "
                    'give each --kv-cache-dtype its own "namespace" in adapter_params'
                )
            try:
                scope = self.formats.scope(family, object_format, is_stored=is_put)
            except Exception as error:  # for example, a page that is too long
                self.store.record_failure("scope", error)
                continue
            keys = [item.name.key for _, item in group_items]
            memories = [item.memory for _, item in group_items]
            started = perf_counter()
            if is_put:
                ticket = self.store.submit_put(scope, keys, memories)
            else:
                ticket = self.store.submit_get(scope, keys, memories, staged=self.staged)
            if ticket is not None:
                part = TicketItems(
                    job,
                    [index for index, _ in group_items],
                    is_put,
                    scope,
                    keys,
                    [item.owner for _, item in group_items],
                    object_format.nbytes,
                    started,
                )
                tickets.append((ticket, part))
        # Set the count before a ticket is added: `complete_tickets` may run on another thread, and
        # decrements it.
        job.pending = len(tickets)
        for ticket, ticket_items in tickets:
            completions.add(ticket, ticket_items)
        return None if tickets else job

    def refuses_hashes(self, keys: Sequence[bytes]) -> bool:
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
            logger.warning("ritornello: %s; such objects are neither found nor stored", reason)
        return True

    def _freed(self, part: TicketItems) -> list[int]:
        """Returns the positions, in the ticket, of objects whose memory LMCache has freed."""

        def is_valid(owner: Any) -> bool:
            return owner is None or bool(owner.is_valid())

        attempt = self.store.attempt
        return [
            at
            for at, owner in enumerate(part.owners)
            if not attempt("object", partial(is_valid, owner), False)
        ]

    def _delete_freed(self, part: TicketItems, freed: Sequence[int]) -> None:
        """Deletes the pages of objects that LMCache freed during their put. It may have reused
        their memory before the put read it: the page then has a valid checksum of other bytes.
        """
        if not self.store.delete(part.scope, [part.keys[at] for at in freed]):
            logger.warning(
                "ritornello: LMCache freed %d objects while they were stored, and they cannot be "
                "deleted: they may have wrong bytes; clear the store",
                len(freed),
            )

    def _count(self, part: TicketItems, moved: int, reason: str) -> None:
        """Counts the objects that a ticket moved and, by `reason`, its objects that it did not
        move.
        """
        did, doing = ("saved", "save") if part.is_put else ("loaded", "load")
        meter = self.store.meter
        if moved:
            meter.add_all(
                {
                    f"{did}_pages": moved,
                    f"{did}_bytes": moved * part.nbytes,
                    f"{doing}_seconds": perf_counter() - part.started,
                }
            )
        missed = len(part.indices) - moved
        (meter.skipped if part.is_put else meter.missed)(reason or "error", missed)
