"""In which forms the objects of a family are stored: what a lookup, which knows no sizes, asks.

The store's own scopes are the memory of it, so it survives restarts, and other processes on the
same directory are seen. Asking for them is not free: it is done when something was not found, and
not all the time.
"""

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

from ritornello.lmcache.naming import Family, ObjectFormat, parse_scope, scope_of

if TYPE_CHECKING:
    from ritornello._core import Scope

# What others store is found this much later at most, or so many times what asking takes.
REFRESH_SECONDS = 1.0
REFRESH_FACTOR = 50.0


class FormatCatalog:
    """Safe to be called from several threads. `call` returns the store's scopes."""

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
        self._due = clock()

    def of(self, family: Family) -> "dict[ObjectFormat, Scope]":
        """Known forms of a family, the latest first."""
        return self._scopes.get(family, {})

    def scope(self, family: Family, form: ObjectFormat, *, is_stored: bool) -> "Scope":
        """The scope of a form. One that is stored, or about to be, is known from then on."""
        scope = self._scopes.get(family, {}).get(form)
        if scope is None:
            scope = scope_of(family, form, self._namespace)
            if is_stored:
                with self._lock:
                    self._add(family, form, scope)
        return scope

    def refresh(self) -> bool:
        """Asks the store, if it is time; whether anything is known now that was not. One thread
        asks, and none waits for it: the answer may take its time.
        """
        begun = self._clock()
        with self._lock:
            if begun < self._due:
                return False
            self._due = float("inf")
            before = sum(map(len, self._scopes.values()))
        try:
            held = self.held()
        finally:
            now = self._clock()
            self._due = now + max(REFRESH_SECONDS, REFRESH_FACTOR * (now - begun))
        with self._lock:
            for family, form, scope, _ in held:
                if form not in self._scopes.get(family, {}):
                    self._add(family, form, scope)
            return sum(map(len, self._scopes.values())) > before

    def held(self) -> "list[tuple[Family, ObjectFormat, Scope, int]]":
        """What the store holds now, in a fixed order: each form, and its number of objects."""
        held = []
        for scope, pages, _ in self._ask():
            ours = parse_scope(scope.describe(), self._namespace)
            if ours is not None:
                held.append((*ours, scope, pages))
        return held

    def _add(self, family: Family, form: ObjectFormat, scope: "Scope") -> None:
        # Replaced and not changed: others may be reading it.
        self._scopes[family] = {form: scope, **self._scopes.get(family, {})}
