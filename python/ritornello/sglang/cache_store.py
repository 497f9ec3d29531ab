"""Calls of SGLang's storage threads to a cache over tiers.

Only SGLang's lookup thread, which has no other work, waits for a remote: at most for the time that
the setting `prefetch` allows, and no longer than SGLang waits for the prefetch.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock, get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from ritornello.connector.cache_counts import CacheCounts
from ritornello.sglang.hits import GROUPS, RestorablePrefixes, SidePool
from ritornello.sglang.piece_lookup import LEASE_SECONDS, Piece, PieceLookup, main_requests
from ritornello.sglang.store import Read, SGLangStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ritornello._core import Cache, Lookup, Scope, TierName
    from ritornello.sglang.meter import RateMeter
    from ritornello.sglang.settings import Settings

# Maximum number of pieces (the pages of one lookup of SGLang) that are leased until SGLang reads
# them. A further piece takes the place of the oldest piece, whose leases are released.
LEASED_MAX = 256
# Interval at which the cache's counters are added to the meter.
REPORT_SECONDS = 1.0
# Passed as the key before a piece if the keys of the pages before it are unknown. The tiers of this
# machine store such a piece; a remote does not, because it packs pages into objects by their
# position in the prompt.
UNKNOWN_PARENT = bytes(32)


@dataclass(slots=True)
class Leased:
    """A piece whose pages are leased until SGLang has read them. `last`: the key of the last of
    these pages. `reads`: the number of gets of the page `last` that are still to come, one for each
    scope of the main pool and of the side pools whose policy is not `GROUPS`. The last of these
    gets ends the leases. `hit`: the lookup with the gate's decision about the piece; None if the
    gate did not decide. `at`: when the leases began. `began`: when the first read began.
    """

    last: bytes
    reads: int
    hit: "Lookup | None"
    leases: "list[tuple[TierName, int]]" = field(default_factory=list)
    at: float = field(default_factory=monotonic)
    began: float = 0.0


class SGLangCacheStore(SGLangStore):
    """The tiers of one rank. SGLang's scheduler thread creates this object, and must not wait for a
    remote in later calls.
    """

    uses_prompts = True

    def __init__(
        self,
        settings: "Settings",
        meter: "RateMeter",
        stale: "Callable[[], bool]" = lambda: False,
    ) -> None:
        super().__init__(settings, meter, stale)
        self._scheduler_thread = get_ident()
        self._state_lock = Lock()
        # Leased pieces by their first key, oldest first.
        self._leased: OrderedDict[bytes, Leased] = OrderedDict()
        # The piece that is being read: SGLang reads the batches of a piece in order.
        self._reading: Leased | None = None
        # Events that end the wait for a remote, by the last key of the piece that is looked up.
        self._waiting: dict[bytes, Event] = {}
        self._growth = CacheCounts(REPORT_SECONDS)
        self._report_lock = Lock()

    def find(
        self,
        scopes: "Sequence[Scope]",
        keys: Sequence[bytes],
        before: Sequence[bytes] | None,
        page_tokens: int,
    ) -> int:
        return self.find_prefixes(scopes, keys, before, page_tokens, ()).pages if scopes else 0

    def find_prefixes(
        self,
        scopes: "Sequence[Scope]",
        keys: Sequence[bytes],
        before: Sequence[bytes] | None,
        page_tokens: int,
        sides: Sequence[SidePool],
    ) -> RestorablePrefixes:
        nothing = RestorablePrefixes()
        if self._stale() or not keys:
            return nothing
        piece = Piece(scopes, keys, before, page_tokens, sides)
        found: RestorablePrefixes = self._on_cache(
            "lookup", lambda cache: self._find(cache, piece), nothing
        )
        self.report()
        return found

    def finish_get(self, read: Read, since: float = 0.0) -> int:
        self._begin_read(read)
        try:
            return super().finish_get(read, since)
        finally:
            self._end_read(read.keys)
            self.report()

    def begin_lookup(
        self,
        scopes: "Sequence[Scope]",
        keys: Sequence[bytes],
        before: Sequence[bytes],
        page_tokens: int,
        sides: Sequence[SidePool] = (),
    ) -> None:
        requests = main_requests(
            Piece(scopes, keys, before, page_tokens, sides), self._settings.gate
        )

        def action(cache: "Cache") -> None:
            for request in requests:
                # Skip pages that are all on this machine: their lookup would be ready immediately,
                # and would be counted in addition to the lookup by `find`. A pending lookup is not
                # counted.
                if not all(cache.exists(request.scope, request.keys)):
                    self._release_found([request.lookup(cache)])

        if not self._stale():
            self._on_cache("lookup", action, None)

    def cancel_fetch(self, scopes: "Sequence[Scope]", prompt: Sequence[bytes]) -> None:
        for scope in scopes:
            self._on_cache("cancel", partial(_cancel, scope, prompt), False)

    def cancel_lookup(self, keys: Sequence[bytes]) -> None:
        with self._state_lock:
            waiting = self._waiting.get(keys[-1]) if keys else None
        if waiting is not None:
            waiting.set()

    def forget(self) -> None:
        with self._state_lock:
            leased, self._reading = [*self._leased.values()], None
            self._leased.clear()
            for waiting in self._waiting.values():
                waiting.set()
        for piece in leased:
            self._release(piece.leases)

    def close(self) -> None:
        self.forget()
        self.report(last=True)
        super().close()

    def _find(self, cache: "Cache", piece: Piece) -> RestorablePrefixes:
        # SGLang may end the prefetch while the first lookup runs.
        with self._cancellable(piece.keys) as ended:
            waits = get_ident() != self._scheduler_thread
            lookup = PieceLookup(
                cache, self._settings, piece, self._release_found, ended, waits=waits
            )
            try:
                prefixes = lookup.find()
            except BaseException:
                self._release_found(lookup.held)
                raise
        # The weights may have changed while the lookup waited for the remote.
        if self._stale():
            prefixes = RestorablePrefixes()
        if prefixes.pages and lookup.held:
            self._keep_leases(piece, prefixes.pages, lookup)
        else:
            self._release_found(lookup.held)
        return prefixes

    @contextmanager
    def _cancellable(self, keys: Sequence[bytes]) -> Iterator[Event]:
        """Yields an event that is set by `cancel_lookup` of the piece, by `forget` (of all pieces),
        or by closing the store.
        """
        ended, last = Event(), keys[-1]
        with self._state_lock:
            self._waiting[last] = ended
            if self.closed:
                ended.set()
        try:
            yield ended
        finally:
            with self._state_lock:
                if self._waiting.get(last) is ended:
                    del self._waiting[last]

    def _keep_leases(self, piece: Piece, pages: int, lookup: PieceLookup) -> None:
        """Keeps the leases of `lookup` for SGLang's reads of the piece's `pages` leading pages,
        which `find_prefixes` returns. Releases leases older than `LEASE_SECONDS`, the oldest beyond
        `LEASED_MAX` pieces, and leases of an earlier lookup with the same first key.
        """
        keys, sides = piece.keys, [side for side in piece.sides if side.policy != GROUPS]
        leased = Leased(
            keys[pages - 1],
            len(piece.scopes) + sum(len(side.scopes) for side in sides),
            # The gate does not decide about models with side pools.
            None if piece.sides else lookup.hit,
            [lease for each in lookup.held for lease in each.leases],
        )
        dropped = []
        with self._state_lock:
            while self._leased:
                oldest = next(iter(self._leased.values()))
                if len(self._leased) < LEASED_MAX and leased.at - oldest.at < LEASE_SECONDS:
                    break
                dropped.append(self._leased.popitem(last=False)[1])
            if keys[0] in self._leased:
                dropped.append(self._leased.pop(keys[0]))
            self._leased[keys[0]] = leased
        for each in dropped:
            self._release(each.leases)

    def _begin_read(self, read: Read) -> None:
        keys = read.keys
        if not keys:
            return
        with self._state_lock:
            if read.scope.chained:
                piece = self._leased.get(keys[0])
            elif self._reading is not None and self._reading.last in keys:
                return
            else:
                # If the main pool holds no bytes, the first read of a piece is from a side pool,
                # and may lack the piece's first key. The last key identifies the piece.
                leased = self._leased.values()
                piece = next((each for each in leased if each.last in keys), None)
            if piece is not None and piece is not self._reading:
                piece.began = monotonic()
                self._reading = piece

    def _end_read(self, keys: Sequence[bytes]) -> None:
        """Counts a read of the last page of the piece that is being read. After the last such read,
        releases the leases of the piece, and tells the gate how long the reads took.
        """
        with self._state_lock:
            piece = self._reading
            if piece is None or piece.last not in keys:
                return
            piece.reads -= 1
            if piece.reads > 0:
                return
            self._reading = None
            for first, each in self._leased.items():
                if each is piece:
                    del self._leased[first]
                    break
        self._release(piece.leases)
        hit, seconds = piece.hit, monotonic() - piece.began
        if hit is not None and hit.estimate is not None:
            self._on_cache("outcome", lambda cache: cache.record_outcome(hit, seconds), None)

    def _release_found(self, found: "list[Lookup]") -> None:
        self._release([lease for each in found for lease in each.leases])

    def _release(self, leases: "Sequence[tuple[TierName, int]]") -> None:
        for lease in leases:
            self._on_cache("release", partial(_release, lease), None)

    def report(self, last: bool = False) -> None:
        """Adds the growth of the cache's counters since the last report to the meter, if the report
        is due or `last` is set.
        """
        if not self._report_lock.acquire(blocking=last):
            return
        try:
            if last or self._growth.is_due():
                stats = self._on_cache("stats", lambda cache: cache.stats(), None)
                growth = self._growth.growth(stats) if stats is not None else {}
                for name, amount in growth.items():
                    self._meter.add(name, amount)
        finally:
            self._report_lock.release()

    def _put_options(
        self, scope: "Scope", keys: Sequence[bytes], before: Sequence[bytes] | None
    ) -> tuple[Sequence[bytes], dict[str, Any]]:
        if not scope.chained:
            return keys, {"copy": False}
        if before is None:
            return keys, {"parent": UNKNOWN_PARENT, "copy": False}
        return [*before, *keys], {"first": len(before), "copy": False}

    def _on_cache(self, operation: str, action: "Callable[[Cache], Any]", default: Any) -> Any:
        return self.call(operation, lambda store: action(cast("Cache", store)), default)


def _release(lease: "tuple[TierName, int]", cache: "Cache") -> None:
    cache.release(lease)


def _cancel(scope: "Scope", prompt: Sequence[bytes], cache: "Cache") -> bool:
    return cache.cancel(scope, prompt)
