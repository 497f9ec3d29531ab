"""Which prefix of a request the store can restore: a hit takes all objects of all its pages.

A page lies in several objects, one for each part of the model, pipeline stage and group of KV
heads; those that are named by the same keys are asked for with one question. The objects of full
attention come first: the shortest of their prefixes is what can be had at most. The others
(windows) must have the pages that this length needs; where they have not, the longest shorter
length at which they have is taken. Everything that is promised is leased.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ritornello.vllm.identity import Identity
from ritornello.vllm.parts import Bundle, Slice, bundles, longest_resumable

# What keeps pages where they are: whoever gave it knows what it is.
Lease = Any


class Prompt(NamedTuple):
    """`computed`: the leading tokens that the engine has itself, of `tokens`. `loads`: whether
    anything may be loaded for it.
    """

    computed: int
    tokens: int
    loads: bool = True


class Hit(NamedTuple):
    """The leading pages of those that were asked for. `pages`: to be loaded, kept by `lease`;
    `there`: present, at least so many. `pending`: ask again, more is on its way, and nothing is
    kept. `tiers`: where those that are there lie, in order. `grounds`: what it was decided on.
    """

    pages: int
    there: int
    lease: Lease = None
    pending: bool = False
    tiers: Sequence[tuple[str, int]] = ()
    grounds: Any = None


class Shelf(Protocol):
    """What is asked of the store; None where it failed."""

    def lookup(
        self,
        identity: Identity,
        of: Sequence[Slice],
        keys: Sequence[bytes],
        ttl: float,
        prompt: Prompt,
    ) -> Hit | None: ...
    def exists(self, identity: Identity, of: Slice, keys: Sequence[bytes]) -> list[bool] | None: ...
    def release(self, lease: Lease) -> None: ...
    def cancel_lookup(
        self, identity: Identity, of: Sequence[Slice], keys: Sequence[bytes]
    ) -> None: ...


@dataclass(slots=True)
class Found:
    """What the store has of a request: all that its first `tokens` need, under `leases`. `stored`:
    the leading pages of each part that are known to be there. `pending`, `tiers` and `grounds` are
    those of a `Hit`, of pages of `page_tokens`.
    """

    tokens: int
    stored: list[int]
    leases: list[Lease] = field(default_factory=list)
    pending: bool = False
    page_tokens: int = 1
    tiers: Sequence[tuple[str, int]] = ()
    grounds: Any = None


class Matcher:
    """Asks one store about the pages of one model."""

    def __init__(self, store: Shelf, identity: Identity, ttl: float) -> None:
        self._store = store
        self._identity = identity
        self._ttl = ttl
        self._parts = identity.parts
        together = bundles(identity.parts)
        self._whole = [bundle for bundle in together if bundle.rule.reach is None]
        self._windows = together[len(self._whole) :]

    def keys(self, part: int, hashes: Sequence[bytes], pages: range) -> tuple[bytes, ...]:
        """The keys of these pages of a part: a page is named by the last hash in it."""
        step = self._parts[part].page_tokens // self._identity.hash_tokens
        return tuple(hashes[(pages.start + 1) * step - 1 : pages.stop * step : step])

    def find(self, hashes: Sequence[bytes], tokens: int, prompt: Prompt) -> Found | None:
        """The longest prefix of at most `tokens` that can be restored; None if the store failed."""
        most = self._floor(tokens)
        stored = [0] * len(self._parts)
        leases: list[Lease] = []
        made = Found(0, stored, leases)
        for bundle in self._whole:
            if not most:
                break
            hit = self._lease(leases, bundle, hashes, range(most // bundle.page_tokens), prompt)
            if hit is None or hit.pending:
                self._release(leases)
                return hit and Found(0, stored, pending=True)
            for part in bundle.parts:
                stored[part] = hit.there
            if bundle is self._whole[0]:
                made.page_tokens, made.tiers = bundle.page_tokens, hit.tiers
                made.grounds = hit.grounds
            most = self._floor(hit.pages * bundle.page_tokens)
        if most and self._windows:
            most = self._with_windows(leases, hashes, most, prompt)
        for bundle in self._windows:
            for part in bundle.parts:
                stored[part] = most // bundle.page_tokens
        if not most:
            self._release(leases)
        made.tokens = most
        return made

    def cancel_lookup(self, hashes: Sequence[bytes], tokens: int) -> None:
        """Nobody wants any more what `find` said was pending."""
        for bundle in self._whole:
            pages = range(self._floor(tokens) // bundle.page_tokens)
            keys = self.keys(bundle.parts[0], hashes, pages)
            self._store.cancel_lookup(self._identity, bundle.slices, keys)

    def _with_windows(
        self, leases: list[Lease], hashes: Sequence[bytes], most: int, prompt: Prompt
    ) -> int:
        """The longest of the lengths up to `most` at which all windows are there, now leased."""
        if self._lease_windows(leases, hashes, most, prompt):
            return most
        present = {}
        for bundle in self._windows:
            pages = range(most // bundle.page_tokens)
            keys = self.keys(bundle.parts[0], hashes, pages)
            for of in bundle.slices:
                present[of] = self._store.exists(self._identity, of, keys) or [False] * len(pages)
        most = longest_resumable(self._parts, present, most, self._identity.alignment)
        return most if most and self._lease_windows(leases, hashes, most, prompt) else 0

    def _lease_windows(
        self, leases: list[Lease], hashes: Sequence[bytes], tokens: int, prompt: Prompt
    ) -> bool:
        taken: list[Lease] = []
        for bundle in self._windows:
            needed = bundle.rule.needed(tokens // bundle.page_tokens, bundle.page_tokens)
            hit = self._lease(taken, bundle, hashes, needed, prompt)
            if hit is None or hit.pages < len(needed):
                self._release(taken)
                return False
        leases += taken
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
