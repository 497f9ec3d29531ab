"""The formats in which objects of a family (model, object group and salt) are stored. A lookup
needs these formats, because a format is a part of the scope of an object, and LMCache does not tell
in which formats objects were stored.

The formats are read from the store's scopes, so that they survive restarts and include formats in
which other processes stored objects. Reading the formats is expensive. After a miss and before a
deletion they are therefore read at limited intervals only. A query of LMCache for usage or keys
always reads them.
"""

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

from ritornello.lmcache.naming import Family, ObjectFormat, parse_scope, scope_of

if TYPE_CHECKING:
    from ritornello._core import Scope

# Minimum time between two reads of the store's scopes by `refresh`: `REFRESH_SECONDS`, or
# `REFRESH_FACTOR` times the duration of the last read if that is longer. Objects that another
# process stores in a new format are missed until the first lookup after this time.
REFRESH_SECONDS = 1.0
REFRESH_FACTOR = 50.0


class FormatCatalog:
    """The known formats. Thread-safe. `ask` returns the store's scopes, each with its number of
    pages and its bytes on disk.
    """

    def __init__(
        self,
        ask: "Callable[[], list[tuple[Scope, int, int]]]",
        namespace: str,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._ask = ask
        self._namespace = namespace
        self._clock = clock
        self._lock = Lock()
        self._scopes: dict[Family, dict[ObjectFormat, Scope]] = {}
        # By model and object group: the salt of an object does not change its format.
        self._used: dict[tuple[str, int], frozenset[ObjectFormat]] = {}
        # The values of `is_serialized` of the formats that this process has put or read.
        self._serialized: frozenset[bool] = frozenset()
        self._due = clock()

    def of(self, family: Family) -> "dict[ObjectFormat, Scope]":
        """Returns the known formats of a family, the latest first."""
        return self._scopes.get(family, {})

    def used(self, family: Family) -> frozenset[ObjectFormat]:
        """Returns the formats of the objects of the family's model and object group, with any salt,
        that this process has put or read.
        """
        return self._used.get((family.model, family.group), frozenset())

    def record_use(self, family: Family, object_format: ObjectFormat) -> None:
        """Adds the format of an object that this process puts or reads to the used formats."""
        if object_format not in self.used(family):
            with self._lock:
                self._used[family.model, family.group] = self.used(family) | {object_format}
                self._serialized |= {object_format.is_serialized}

    def is_loadable(self, object_format: ObjectFormat) -> bool:
        """Returns whether this process may load objects of a format: LMCache serializes all objects
        of an adapter or none. True before the first put or read of an object.
        """
        return not self._serialized or object_format.is_serialized in self._serialized

    def scope(self, family: Family, object_format: ObjectFormat, *, is_stored: bool) -> "Scope":
        """Returns the scope of a format. With `is_stored`, adds the format to the known formats."""
        scope = self._scopes.get(family, {}).get(object_format)
        if scope is None:
            scope = scope_of(family, object_format, self._namespace)
            if is_stored:
                with self._lock:
                    self._add(family, object_format, scope)
        return scope

    def refresh(self) -> bool:
        """Reads the formats if the minimum time since the last read has passed (`REFRESH_SECONDS`).
        Returns whether new formats were found. While one thread reads, calls of other threads
        return False without waiting for the read.
        """
        started = self._clock()
        with self._lock:
            if started < self._due:
                return False
            self._due = float("inf")
            before = sum(map(len, self._scopes.values()))
        try:
            stored = self.stored_formats()
        finally:
            now = self._clock()
            self._due = now + max(REFRESH_SECONDS, REFRESH_FACTOR * (now - started))
        with self._lock:
            for family, object_format, scope, _ in stored:
                if object_format not in self._scopes.get(family, {}):
                    self._add(family, object_format, scope)
            return sum(map(len, self._scopes.values())) > before

    def stored_formats(self) -> "list[tuple[Family, ObjectFormat, Scope, int]]":
        """Returns the formats in the store, in a fixed order, each with its number of objects."""
        stored = []
        for scope, pages, _ in self._ask():
            ours = parse_scope(scope.describe(), self._namespace)
            if ours is not None:
                stored.append((*ours, scope, pages))
        return stored

    def _add(self, family: Family, object_format: ObjectFormat, scope: "Scope") -> None:
        # Replace the dictionary instead of modifying it, because other threads may be reading it.
        self._scopes[family] = {object_format: scope, **self._scopes.get(family, {})}
