"""One lookup of a piece of a prompt in a cache over tiers.

The main pool is looked up first: its keys chain, so a remote answers with a number of leading
pages. The keys of side pools do not chain, so a remote is asked about each page. In pools that need
all pages, the pages of the whole prefix are looked up; in pools that need a window, the window at
the end of the prefix, and only if it is incomplete the windows before it. Found pages of the remote
are fetched to the disk. The pages that this machine then has decide the answer.
"""

from collections.abc import Callable, Sequence
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from ritornello.sglang.hits import (
    ALL,
    TRAILING,
    RestorablePrefixes,
    SidePool,
    restorable_prefixes,
)
from ritornello.sglang.identity import KV

if TYPE_CHECKING:
    from ritornello._core import Cache, Gate, Lookup, Scope
    from ritornello.connector.settings import StoreSettings

# Time for which found pages stay leased after their lookup. SGLang reads them within seconds, or
# never.
LEASE_SECONDS = 30.0
# Pause before a pending lookup is repeated.
POLL_SECONDS = 0.003
# Maximum time that a lookup waits for a remote. The cache's prefetch policies (the setting
# `prefetch`) end the wait for the pages of one pool after at most 30 seconds.
WAIT_SECONDS = 35.0
# Time after the beginning of the first round of lookups of windows, after which no further round
# begins.
WINDOWS_SECONDS = 1.0
# The first round of lookups is for the window of the longest prefix only. Each later round adds the
# windows of up to `WINDOWS_STEP` shorter prefixes. In each pool these windows together have at most
# 16 pages that no earlier round looked up, so a round queries the remote for at most 16 objects of
# each scope.
WINDOWS_STEP = 16


class Piece(NamedTuple):
    """The pages of a lookup. `scopes`: scopes of the main pool, one for each part of a page; none
    if the main pool holds no bytes. `before`: the keys of all pages of the prompt before these
    pages; None if they are unknown. `sides`: the side pools that hold further parts of the pages.
    """

    scopes: "Sequence[Scope]"
    keys: Sequence[bytes]
    before: Sequence[bytes] | None
    page_tokens: int
    sides: Sequence[SidePool] = ()


class Request(NamedTuple):
    """Arguments of one lookup of the cache. `ttl`: duration of the leases in seconds. The default
    includes the time in which the first leased pages wait for the lookups of all other pools.
    """

    scope: "Scope"
    keys: Sequence[bytes]
    ttl: float = LEASE_SECONDS + WAIT_SECONDS
    gate: "Gate" = "always"
    page_tokens: int = 0
    page_bytes: int = 0
    computed: int = 0
    tokens: int = 0

    def lookup(self, cache: "Cache") -> "Lookup":
        return cache.lookup(
            self.scope,
            self.keys,
            ttl=self.ttl,
            gate=self.gate,
            page_tokens=self.page_tokens,
            page_bytes=self.page_bytes,
            computed=self.computed,
            tokens=self.tokens,
        )


def main_requests(piece: Piece, gate: "Gate") -> list[Request]:
    """Returns the lookups of the main pool. With side pools the gate does not choose a length,
    because the pools together decide which lengths can be restored.
    """
    prompt = [*(piece.before or ()), *piece.keys]
    whole = [scope for side in piece.sides if side.policy == ALL for scope in side.scopes]
    return [
        Request(
            scope,
            prompt,
            ttl=LEASE_SECONDS + (WAIT_SECONDS if piece.sides else 0.0),
            gate="always" if piece.sides and gate == "auto" else gate,
            page_tokens=piece.page_tokens,
            page_bytes=sum(each.page_bytes for each in (*piece.scopes, *whole)),
            computed=(len(prompt) - len(piece.keys)) * piece.page_tokens,
            tokens=len(prompt) * piece.page_tokens,
        )
        for scope in piece.scopes
    ]


class PieceLookup:
    """Looks up one piece. `held`: the lookups whose leases are not released yet; the caller
    releases these leases, also if a method raises. `hit`: the lookup that decided the number of
    pages of the main pool. `waits`: whether this thread may wait for a remote, until `ended` is
    set.
    """

    def __init__(
        self,
        cache: "Cache",
        settings: "StoreSettings",
        piece: Piece,
        release: "Callable[[list[Lookup]], None]",
        ended: Event,
        *,
        waits: bool,
    ) -> None:
        self.held: list[Lookup] = []
        self.hit: Lookup | None = None
        self._cache = cache
        self._gate = settings.gate
        # Whether windows of shorter prefixes are looked up too. Not with "best_effort": its lookups
        # return before the remote answers, and start a fetch in the background. Each window looked
        # up would then be fetched, although one is enough.
        self._searches = settings.has_remote and settings.prefetch != "best_effort"
        self._piece = piece
        self._release = release
        self._ended = ended
        self._waits = waits
        # Whether pending lookups were cancelled, because `ended` was set or the deadline passed.
        # After that no lookup begins that may query the remote.
        self._cancelled = False
        self._deadline = monotonic() + WAIT_SECONDS
        # For each side pool, which of the piece's leading pages this machine has.
        self._present: list[list[bool]] = []
        self._serves_all = all(side.is_served for side in piece.sides)

    def find(self) -> RestorablePrefixes:
        """Returns the prefixes of the piece for which all pools have the pages on this machine."""
        leading = self._leading()
        sides = self._piece.sides
        if not sides or not leading or self._gate == "never":
            return restorable_prefixes(KV, leading if not sides else 0, [])
        self._present = [self._exists(side, 0, leading) for side in sides]
        if self._serves_all:
            self._fetch_windows(self._fetch_whole(leading))
        return self._prefixes(leading)

    def _leading(self) -> int:
        """Returns how many of the piece's leading pages can be loaded into the main pool. The
        remote's pages are fetched first, if the keys before the piece are known and all side pools
        are served.
        """
        piece = self._piece
        if not piece.scopes:
            return len(piece.keys)
        # A side pool that is not served permits no prefix, so the remote's pages are not needed.
        if piece.before is None or not self._serves_all:
            return self._local()
        found = self._ask(main_requests(piece, self._gate))
        if any(each.state != "ready" for each in found):
            self._release_from(0)
            return self._local()
        hit = min(found, key=lambda each: each.load)
        before = len(piece.before)
        if hit.load > before:
            self.hit = hit
            return hit.load - before
        self._release_from(0)
        # The tiers may lack pages before the piece. SGLang has these pages, so the piece's pages on
        # this machine can still be loaded.
        if self._gate != "never" and min(each.local for each in found) < before:
            return self._local()
        return 0

    def _local(self) -> int:
        """Returns the number of leading pages of the main pool on this machine, without a query to
        the remote and without leases.
        """
        if self._gate == "never":
            return 0
        scopes, keys = self._piece.scopes, self._piece.keys
        return min(self._cache.lookup(scope, keys, gate="never").local for scope in scopes)

    def _fetch_whole(self, leading: int) -> int:
        """Fetches and leases the pages of the side pools that need all pages of a prefix. Returns
        the length, at most `leading`, of the longest prefix whose pages all these pools have.
        """
        piece, tokens = self._piece, self._piece.page_tokens
        whole = [at for at, side in enumerate(piece.sides) if side.policy == ALL]
        self._ask(
            [
                Request(scope, piece.keys[:leading], page_tokens=tokens, tokens=leading * tokens)
                for at in whole
                for scope in piece.sides[at].scopes
            ]
        )
        for at in whole:
            self._present[at] = self._exists(piece.sides[at], 0, leading)
            leading = min(leading, (*self._present[at], False).index(False))
        return leading

    def _fetch_windows(self, leading: int) -> None:
        """Fetches and leases the windows of the longest prefix of at most `leading` pages that can
        be restored. Begins no further round of lookups after `WINDOWS_SECONDS`.
        """
        windows = [at for at, side in enumerate(self._piece.sides) if side.policy == TRAILING]
        if not windows or not leading:
            return
        until, first = monotonic() + WINDOWS_SECONDS, len(self.held)
        # Each round looks up the windows of all prefixes of at least `length` pages. `known`: for
        # each pool, the first page that was looked up so far.
        length, known = leading, dict.fromkeys(windows, leading)
        while True:
            requests = []
            for at in windows:
                start = self._piece.sides[at].first_page(length)
                requests += self._window(at, start, known[at])
                known[at] = min(start, known[at])
            self._ask(requests)
            for at in windows:
                self._present[at][known[at] : leading] = self._exists(
                    self._piece.sides[at], known[at], leading
                )
            best = self._prefixes(leading).pages
            if self._cancelled:
                return
            waits = self._waits and self._searches and monotonic() < until
            if best >= length - 1 or not waits:
                break
            length = max(best + 1, length - WINDOWS_STEP)
        if best < leading:
            searched = len(self.held)
            for at in windows:
                start = self._piece.sides[at].first_page(best)
                self._ask(self._window(at, start, best))
            self._release_from(first, searched)

    def _window(self, side: int, start: int, past: int) -> list[Request]:
        """Returns the lookups of pages `start` to `past - 1` of a side pool."""
        keys = self._piece.keys[start:past]
        return [Request(scope, keys) for scope in self._piece.sides[side].scopes if keys]

    def _ask(self, requests: Sequence[Request]) -> "list[Lookup]":
        """Looks pages up. If this thread may wait, repeats pending lookups until the remote's pages
        have arrived, the maximum time of the setting `prefetch` or `WAIT_SECONDS` has passed, or
        SGLang ends the prefetch. Looks nothing up once `_cancelled` is set, because SGLang would
        not cancel a lookup that begins after the end of the prefetch.
        """
        if self._cancelled:
            return []
        first = len(self.held)
        for request in requests:
            self.held.append(request.lookup(self._cache))
        while self._waits and any(each.state != "ready" for each in self.held[first:]):
            if self._ended.wait(POLL_SECONDS) or monotonic() > self._deadline:
                self._cancelled = True
                for request in requests:
                    self._cache.cancel(request.scope, request.keys)
                break
            for at, request in enumerate(requests, first):
                if self.held[at].state != "ready":
                    self.held[at] = request.lookup(self._cache)
        return self.held[first:]

    def _exists(self, side: SidePool, start: int, past: int) -> list[bool]:
        """Returns whether this machine has pages `start` to `past - 1` of a side pool."""
        keys = self._piece.keys[start:past]
        return side.in_all_scopes([self._cache.exists(scope, keys) for scope in side.scopes])

    def _prefixes(self, leading: int) -> RestorablePrefixes:
        sides = zip(self._piece.sides, self._present, strict=True)
        return restorable_prefixes(KV, leading, [side.presence(pages) for side, pages in sides])

    def _release_from(self, first: int, past: int | None = None) -> None:
        released = self.held[first:past]
        del self.held[first:past]
        self._release(released)
