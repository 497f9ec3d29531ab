"""Finds the longest prefix of a request that the store can restore.

A page consists of several objects: one for each part of the model, pipeline stage and group of KV
heads. Objects with the same keys are looked up together. Full attention comes first: the shortest
prefix of its objects bounds the result. The other parts (windows) must have the pages that a length
needs; if they lack some, the longest shorter length that they can serve is used. All pages that are
promised are under leases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ritornello.vllm.identity import Identity
from ritornello.vllm.parts import Bundle, Slice, bundles, longest_resumable

# Protects pages from eviction. Opaque: only the store that issued a lease can interpret it.
Lease = Any


class Prompt(NamedTuple):
    """`computed`: leading tokens that the engine has, of `tokens`. `loads`: whether pages may be
    loaded for the prompt.
    """

    computed: int
    tokens: int
    loads: bool = True


class Hit(NamedTuple):
    """Result of a lookup. `pages`: leading pages to load, protected by `lease`. `present`: leading
    pages that are known to be stored. `pending`: the lookup must be repeated, and holds no lease.
    `tiers`: where the present pages lie, in order. `decision`: what the gate decided on.
    """

    pages: int
    present: int
    lease: Lease = None
    pending: bool = False
    tiers: Sequence[tuple[str, int]] = ()
    decision: Any = None


class PageStore(Protocol):
    """The calls that `Matcher` makes; None means that the store failed."""

    def lookup(
        self,
        identity: Identity,
        slices: Sequence[Slice],
        keys: Sequence[bytes],
        ttl: float,
        prompt: Prompt,
    ) -> Hit | None: ...
    def exists(
        self, identity: Identity, piece: Slice, keys: Sequence[bytes]
    ) -> list[bool] | None: ...
    def release(self, lease: Lease) -> None: ...
    def cancel_lookup(
        self, identity: Identity, slices: Sequence[Slice], keys: Sequence[bytes]
    ) -> None: ...


@dataclass(slots=True)
class PrefixMatch:
    """What the store has of a request: all that the first `tokens` need, under `leases`. `stored`:
    leading pages of each part that are known to be stored. `pending`, `tiers` and `decision` are
    those of a `Hit`, for pages of `page_tokens` tokens.
    """

    tokens: int
    stored: list[int]
    leases: list[Lease] = field(default_factory=list)
    pending: bool = False
    page_tokens: int = 1
    tiers: Sequence[tuple[str, int]] = ()
    decision: Any = None


class Matcher:
    """Looks up requests of one model in one store."""

    def __init__(self, store: PageStore, identity: Identity, ttl: float) -> None:
        self._store = store
        self._identity = identity
        self._ttl = ttl
        self._parts = identity.parts
        together = bundles(identity.parts)
        self._whole = [bundle for bundle in together if bundle.rule.reach is None]
        self._windows = together[len(self._whole) :]

    def keys(self, part: int, hashes: Sequence[bytes], pages: range) -> tuple[bytes, ...]:
        """Returns the keys of a part's pages. The key of a page is the last block hash in it."""
        step = self._parts[part].page_tokens // self._identity.hash_tokens
        return tuple(hashes[(pages.start + 1) * step - 1 : pages.stop * step : step])

    def find(self, hashes: Sequence[bytes], tokens: int, prompt: Prompt) -> PrefixMatch | None:
        """Returns the longest prefix of at most `tokens` that can be restored; None if the store
        failed.
        """
        most = self._floor(tokens)
        stored = [0] * len(self._parts)
        leases: list[Lease] = []
        match = PrefixMatch(0, stored, leases)
        for bundle in self._whole:
            if not most:
                break
            hit = self._lease(leases, bundle, hashes, range(most // bundle.page_tokens), prompt)
            if hit is None or hit.pending:
                self._release(leases)
                return hit and PrefixMatch(0, stored, pending=True)
            for part in bundle.parts:
                stored[part] = hit.present
            if bundle is self._whole[0]:
                match.page_tokens, match.tiers = bundle.page_tokens, hit.tiers
                match.decision = hit.decision
            most = self._floor(hit.pages * bundle.page_tokens)
        if most and self._windows:
            most = self._with_windows(leases, hashes, most, prompt)
        for bundle in self._windows:
            for part in bundle.parts:
                stored[part] = most // bundle.page_tokens
        if not most:
            self._release(leases)
        match.tokens = most
        return match

    def cancel_lookup(self, hashes: Sequence[bytes], tokens: int) -> None:
        """Cancels the transfers of a `find` that was pending."""
        for bundle in self._whole:
            pages = range(self._floor(tokens) // bundle.page_tokens)
            keys = self.keys(bundle.parts[0], hashes, pages)
            self._store.cancel_lookup(self._identity, bundle.slices, keys)

    def _with_windows(
        self, leases: list[Lease], hashes: Sequence[bytes], most: int, prompt: Prompt
    ) -> int:
        """Leases the windows of the longest possible length up to `most`, and returns that
        length.
        """
        if self._lease_windows(leases, hashes, most, prompt):
            return most
        present = {}
        for bundle in self._windows:
            pages = range(most // bundle.page_tokens)
            keys = self.keys(bundle.parts[0], hashes, pages)
            for piece in bundle.slices:
                present[piece] = self._store.exists(self._identity, piece, keys) or [False] * len(
                    pages
                )
        most = longest_resumable(self._parts, present, most, self._identity.alignment)
        return most if most and self._lease_windows(leases, hashes, most, prompt) else 0

    def _lease_windows(
        self, leases: list[Lease], hashes: Sequence[bytes], tokens: int, prompt: Prompt
    ) -> bool:
        window_leases: list[Lease] = []
        for bundle in self._windows:
            needed = bundle.rule.needed(tokens // bundle.page_tokens, bundle.page_tokens)
            hit = self._lease(window_leases, bundle, hashes, needed, prompt)
            if hit is None or hit.pages < len(needed):
                self._release(window_leases)
                return False
        leases += window_leases
        return True

    def _lease(
        self,
        leases: list[Lease],
        bundle: Bundle,
        hashes: Sequence[bytes],
        pages: range,
        prompt: Prompt,
    ) -> Hit | None:
        keys = self.keys(bundle.parts[0], hashes, pages)
        hit = self._store.lookup(self._identity, bundle.slices, keys, self._ttl, prompt)
        if hit is not None and hit.lease:
            leases.append(hit.lease)
        return hit

    def _release(self, leases: list[Lease]) -> None:
        while leases:
            self._store.release(leases.pop())

    def _floor(self, tokens: int) -> int:
        return tokens // self._identity.alignment * self._identity.alignment
