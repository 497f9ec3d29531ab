"""Lookups of objects, which may be in different scopes.

LMCache passes the keys of a prompt row by row, one row for each object group and KV rank, from the
first chunk of the prompt. Each chunk's hash covers all chunks before it, but the objects are looked
up one by one: LMCache's own memory may hold the beginning of a row, groups with a window have no
objects before the window, and blended prompts find chunks at other positions.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ritornello.lmcache.lmcache_objects import ObjectStore
from ritornello.lmcache.naming import Family, Group, ObjectFormat

if TYPE_CHECKING:
    from ritornello._core import Scope


class ObjectLease(NamedTuple):
    """A lease, and the objects it protects."""

    lease: Any
    family: Family
    keys: list[bytes]


class ObjectLookup:
    """A lookup of `count` objects, the members of `groups`. `expected`: the required format of
    objects, by LMCache's object group; groups without an entry accept any layout. If `expected` is
    None, only objects without a layout are found, as `NativeClient` stores them.

    The caller repeats `advance` until it returns True. After that `found[i]` is whether object `i`
    is stored. If `seconds` is not 0, `leases` protect the found objects from eviction, up to the
    limit of leased space that `Store.lease_prefix` names.
    """

    def __init__(
        self,
        objects: ObjectStore,
        groups: Sequence[Group],
        count: int,
        seconds: float,
        expected: Mapping[int, ObjectFormat] | None = None,
    ) -> None:
        self.found = [False] * count
        self.leases: list[ObjectLease] = []
        self._objects = objects
        self._store = objects.store
        self._formats = objects.formats
        self._seconds = seconds
        self._expected = expected
        self._running = list(map(self._lookup_group, groups))

    def advance(self) -> bool:
        """Continues all parts of the lookup. Returns whether all are done."""
        self._running = [part for part in self._running if next(part, True) is None]
        if not self._running:
            hits = self.found.count(True)
            self._store.meter.add_all({"probed_pages": len(self.found), "hit_pages": hits})
        return not self._running

    def cancel(self) -> None:
        """Cancels the transfers that the lookup started, releases its leases, and makes all objects
        count as not found.
        """
        for part in self._running:
            part.close()
        self._running = []
        for leased in self.leases:
            self._store.release(leased.lease)
        self.leases = []
        self.found = [False] * len(self.found)

    def _lookup_group(self, group: Group) -> Generator[None]:
        """Looks up the objects of a family. Yields while a remote is waited for."""
        if self._objects.refuses_hashes(group.keys):
            return
        present = [False] * len(group.keys)
        for scope in self._candidates(group.family):
            yield from self._lookup_in_scope(scope, group, present)
            if all(present):
                break
        if len(present) == len(self.found):
            self.found = present
        else:
            for index, is_present in zip(group.indices, present, strict=True):
                self.found[index] = is_present

    def _candidates(self, family: Family) -> "Iterator[Scope]":
        """Yields the scopes to search, one for each format that the caller can use. First come the
        formats that this machine is known to store, beginning with the formats that this process
        has put or read; then the formats that a refresh finds in addition. A remote may have
        objects in a format that this machine does not store. If there is a remote, the last scopes
        are therefore of the formats that this process has put or read or, if there are none, of the
        expected format. A format that was yielded before is left out.
        """
        wanted = (self._expected or {}).get(family.group)
        own = [each for each in self._formats.used(family) if self._is_usable(each, wanted)]
        tried: set[ObjectFormat] = set()
        while True:
            known = self._formats.of(family)
            for object_format in sorted(known, key=lambda each: each not in own):
                if object_format not in tried and self._is_usable(object_format, wanted):
                    tried.add(object_format)
                    yield known[object_format]
            if not self._formats.refresh():
                break
        if not self._store.has_remote:
            return
        for object_format in own or ([] if wanted is None else [wanted]):
            if object_format not in tried and self._formats.is_loadable(object_format):
                scope_of = partial(self._formats.scope, family, object_format, is_stored=False)
                # The core refuses a scope with too long pages, and this scope is then skipped. The
                # objects that LMCache expects may be too long although their serialized forms,
                # which are stored, are not.
                scope = self._store.attempt("scope", scope_of, None)
                if scope is not None:
                    yield scope

    def _is_usable(self, stored: ObjectFormat, wanted: ObjectFormat | None) -> bool:
        """Returns whether the caller can load objects of a format. `wanted`: the expected format,
        None if it is unknown.
        """
        if bool(stored.layout) != (self._expected is not None):
            return False
        # Objects that were stored before a change of LMCache's serde have the same keys as objects
        # that are stored now, and cannot be loaded.
        return self._formats.is_loadable(stored) and (wanted is None or fits(stored, wanted))

    def _lookup_in_scope(
        self, scope: "Scope", group: Group, present: list[bool]
    ) -> Generator[None]:
        """Looks up the objects that are not yet in `present`, and adds the found objects."""
        missing: Sequence[int] = range(len(present))
        keys = group.keys
        if any(present):
            missing = [index for index, is_present in enumerate(present) if not is_present]
            keys = [keys[index] for index in missing]
        found = self._store.find(scope, keys, self._seconds)
        while found.pending:
            try:
                yield
            except GeneratorExit:
                self._store.cancel_lookup(scope, keys)
                raise
            found = self._store.find(scope, keys, self._seconds)
        for index, is_present in zip(missing, found.present, strict=True):
            present[index] = is_present
        if found.lease is not None:
            pinned = keys
            if not all(found.present):
                pinned = [key for key, stored in zip(keys, found.present, strict=True) if stored]
            self.leases.append(ObjectLease(found.lease, group.family, pinned))


@lru_cache(maxsize=256)
def fits(stored: ObjectFormat, wanted: ObjectFormat) -> bool:
    """Returns whether an object in the format `stored` can be loaded where an object in the format
    `wanted` is expected. Serialized objects do not show their layout, so they fit every format.
    """
    layout, expected = (each.layout.partition("@")[0] for each in (stored, wanted))
    return layout == expected or stored.is_serialized
