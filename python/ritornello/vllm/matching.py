"""Finds the longest prefix of a request that can be loaded from the store.

A page consists of several objects: one per KV cache group, pipeline stage and range of KV heads.
Objects with the same keys are looked up together. Full attention comes first: the shortest prefix
of its objects bounds the result. Groups with a window come next: to resume after a prefix, the
engine needs their pages in the window before its end. If some of these pages are missing, the
result is the longest shorter prefix whose windows are complete. All pages of the result are leased.
While pages are fetched from a remote, the result is pending.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ritornello.vllm.cache_groups import Bundle, bundles, longest_resumable
from ritornello.vllm.epoch import Epoch
from ritornello.vllm.store import Lease, PromptLength, StoreHit, VllmStore


@dataclass(slots=True)
class PrefixMatch:
    """The longest prefix of a request that can be loaded: the first `tokens` tokens.
    `leases` protect the pages of the prefix from eviction. `stored`: for each group, the number of
    leading pages that saves skip: pages that are stored, and pages before the group's window.
    `pending`, `tiers` and `decision`: see `store.StoreHit`, for pages of `page_tokens` tokens.
    `present`: leading pages of full attention that are stored. `declined`: `present` is not 0,
    and the gate chose to load none of these pages. `whole`: tokens that full attention permits to
    load; 0 without full attention. `declined_end`: at least `whole`; the pages of full attention
    between `whole` and `declined_end` tokens are stored, and the gate chose not to load them.
    """

    tokens: int
    stored: list[int]
    leases: list[Lease] = field(default_factory=list)
    pending: bool = False
    page_tokens: int = 1
    tiers: Sequence[tuple[str, int]] = ()
    decision: Any = None
    present: int = 0
    declined: bool = False
    whole: int = 0
    declined_end: int = 0


# Maximum number of requests with pending windows that are remembered, to cancel the fetches of a
# request that ends. A further request replaces all of them, and their fetches are not cancelled.
PENDING_LOOKUPS_MAX = 1024


class Matcher:
    """Looks up requests of one model in one store. `has_remote`: one of the store's tiers is a
    remote, which finds a page only by the keys of all pages up to it.
    """

    def __init__(
        self, store: VllmStore, epoch: Epoch, ttl: float, *, has_remote: bool = False
    ) -> None:
        self._has_remote = has_remote
        self._store = store
        self._epoch = epoch
        self._ttl = ttl
        self._groups = epoch.identity.groups
        together = bundles(self._groups)
        self._whole = [bundle for bundle in together if bundle.reach.tokens is None]
        self._windows = together[len(self._whole) :]
        # Tokens of prefixes whose windows are pending, by the last hash of the request.
        self._pending_windows: dict[bytes, int] = {}

    @property
    def first_bundle(self) -> Bundle:
        """The bundle that is looked up first."""
        return (self._whole or self._windows)[0]

    def keys(self, group: int, hashes: Sequence[bytes], pages: range) -> tuple[bytes, ...]:
        """Returns the keys of a group's pages. The key of a page is the last block hash in it."""
        step = self._groups[group].page_tokens // self._epoch.identity.hash_tokens
        return tuple(hashes[(pages.start + 1) * step - 1 : pages.stop * step : step])

    def keys_before(self, group: int, hashes: Sequence[bytes], first: int) -> tuple[bytes, ...]:
        """Returns the keys before page `first` that the store needs to load or save it."""
        if not first or self._groups[group].reach.tokens is not None:
            return ()
        return self.keys(group, hashes, range(0 if self._has_remote else first - 1, first))

    def lookup(
        self, hashes: Sequence[bytes], tokens: int, prompt: PromptLength
    ) -> PrefixMatch | None:
        """Returns the longest prefix of at most `tokens` that can be loaded; None if a lookup of
        pages of full attention failed. Pages of windows whose lookup failed count as missing.
        """
        most = stored_end = self._floor(tokens)
        stored = [0] * len(self._groups)
        leases: list[Lease] = []
        match = PrefixMatch(0, stored, leases)
        for bundle in self._whole:
            if not most:
                break
            hit = self._lease(leases, bundle, hashes, range(most // bundle.page_tokens), prompt)
            if hit is None or hit.pending:
                self._release(leases)
                return hit and PrefixMatch(0, stored, pending=True)
            for group in bundle.groups:
                stored[group] = hit.present
            if bundle is self._whole[0]:
                match.page_tokens, match.tiers = bundle.page_tokens, hit.tiers
                match.decision = hit.decision
                match.present = hit.present
                match.declined = not hit.pages and hit.present > 0
            # Later bundles are looked up only for the pages that the gate chose in this bundle.
            # Unless a bundle lacks one of them, the pages that the gate declined stay declined.
            present = self._floor(hit.present * bundle.page_tokens)
            stored_end = present if present < most else stored_end
            most = self._floor(hit.pages * bundle.page_tokens)
        if self._whole:
            match.whole, match.declined_end = most, stored_end
        if most and self._windows:
            most, pending = self._with_windows(leases, hashes, most, prompt)
            if pending:
                self._release(leases)
                if len(self._pending_windows) >= PENDING_LOOKUPS_MAX:
                    self._pending_windows.clear()
                self._pending_windows[hashes[-1]] = most
                return PrefixMatch(0, stored, pending=True)
        for bundle in self._windows:
            for group in bundle.groups:
                stored[group] = most // bundle.page_tokens
        if not most:
            self._release(leases)
        match.tokens = most
        return match

    def cancel_lookup(self, hashes: Sequence[bytes], tokens: int) -> None:
        """Cancels the fetches from a remote that a pending `lookup` of the same `tokens` began."""
        for bundle in self._whole:
            pages = range(self._floor(tokens) // bundle.page_tokens)
            keys = self.keys(bundle.groups[0], hashes, pages)
            self._store.cancel_lookup(self._epoch.identity, bundle.object_ids, keys)
        most = self._pending_windows.pop(hashes[-1], 0) if hashes else 0
        for bundle in self._windows if most else ():
            needed = bundle.reach.pages_needed(most // bundle.page_tokens, bundle.page_tokens)
            keys = self.keys(bundle.groups[0], hashes, needed)
            self._store.cancel_lookup(self._epoch.identity, bundle.object_ids, keys)

    def _with_windows(
        self, leases: list[Lease], hashes: Sequence[bytes], most: int, prompt: PromptLength
    ) -> tuple[int, bool]:
        """Leases the windows of the longest possible length up to `most`. Returns that length, and
        whether its windows are pending, in which case they are not leased.
        """
        complete = self._lease_windows(leases, hashes, most, prompt)
        if complete is not False:
            return most, complete is None
        present, identity = {}, self._epoch.identity
        for bundle in self._windows:
            pages = range(most // bundle.page_tokens)
            keys = self.keys(bundle.groups[0], hashes, pages)
            for object_id in bundle.object_ids:
                found = self._store.exists(identity, object_id, keys)
                present[object_id] = found or [False] * len(pages)
        most = longest_resumable(self._groups, present, most, identity.alignment)
        complete = self._lease_windows(leases, hashes, most, prompt) if most else False
        return (0, False) if complete is False else (most, complete is None)

    def _lease_windows(
        self, leases: list[Lease], hashes: Sequence[bytes], tokens: int, prompt: PromptLength
    ) -> bool | None:
        """Leases the windows of a prefix of `tokens`. Returns whether they are complete; None while
        pages are pending.
        """
        window_leases: list[Lease] = []
        pending = False
        for bundle in self._windows:
            needed = bundle.reach.pages_needed(tokens // bundle.page_tokens, bundle.page_tokens)
            hit = self._lease(window_leases, bundle, hashes, needed, prompt)
            if hit is not None and hit.pending:
                # Continue with the other windows, so that the fetches of all windows begin in this
                # call.
                pending = True
            elif hit is None or hit.pages < len(needed):
                self._release(window_leases)
                return False
        if pending:
            self._release(window_leases)
            return None
        leases += window_leases
        return True

    def _lease(
        self,
        leases: list[Lease],
        bundle: Bundle,
        hashes: Sequence[bytes],
        pages: range,
        prompt: PromptLength,
    ) -> StoreHit | None:
        keys = self.keys(bundle.groups[0], hashes, pages)
        hit = self._store.lookup(self._epoch.identity, bundle.object_ids, keys, self._ttl, prompt)
        if hit is not None and hit.lease:
            leases.append(hit.lease)
        return hit

    def _release(self, leases: list[Lease]) -> None:
        while leases:
            self._store.release(leases.pop())

    def _floor(self, tokens: int) -> int:
        return tokens // self._epoch.identity.alignment * self._epoch.identity.alignment
