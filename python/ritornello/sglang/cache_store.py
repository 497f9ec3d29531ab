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
from ritornello.sglang.store import SGLangStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ritornello._core import Cache, Lookup, PoolPages, Scope, TierName
    from ritornello.sglang.meter import RateMeter
    from ritornello.sglang.settings import Settings

# Duration of a lease. SGLang reads the pages that a lookup found within seconds, or never.
LEASE_SECONDS = 30.0
# Maximum number of pieces with leased pages that SGLang has not read yet. A further piece releases
# the leases of the oldest piece.
LEASED_MAX = 256
POLL_SECONDS = 0.003
# Maximum time that a lookup waits for a remote. The core's prefetch policies end the wait earlier,
# after at most 30 seconds.
WAIT_SECONDS = 35.0
REPORT_SECONDS = 1.0
# Stands for the page before a piece whose place in its prompt is unknown. The tiers of this machine
# store such a piece without its place; a remote, which needs the place, does not store it.
UNKNOWN_PARENT = bytes(32)


@dataclass(slots=True)
class Leased:
    """A piece of a prompt whose pages are leased until SGLang has read them. `last`: the key of its
    last page. `reads`: the remaining reads of this page, one for each scope. `began`: when the
    first read of the piece began.
    """

    last: bytes
    reads: int
    found: "Lookup"
    leases: "list[tuple[TierName, int]]" = field(default_factory=list)
    at: float = field(default_factory=monotonic)
    began: float = 0.0


class SGLangCacheStore(SGLangStore):
    """The tiers of one rank. Created by the thread of SGLang's scheduler, which must not wait for a
    remote.
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
        if self._stale() or not keys or not scopes:
            return 0

        def action(cache: "Cache") -> int:
            if before is None:
                return self._local(cache, scopes, keys)
            return self._find(cache, scopes, keys, before, page_tokens)

        pages: int = self._on_cache("lookup", action, 0)
        self.report()
        return pages

    def get(self, scope: "Scope", keys: Sequence[bytes], out: "Iterable[Any] | PoolPages") -> int:
        self._begin_read(keys)
        try:
            return super().get(scope, keys, out)
        finally:
            self._end_read(keys)
            self.report()

    def begin_lookup(
        self,
        scopes: "Sequence[Scope]",
        keys: Sequence[bytes],
        before: Sequence[bytes],
        page_tokens: int,
    ) -> None:
        def action(cache: "Cache") -> None:
            prompt = [*before, *keys]
            lookup = self._lookup(cache, scopes, len(before), len(keys), page_tokens)
            # Scopes whose pages are all on this machine are left to `find`: a lookup here would
            # count these pages a second time.
            lacking = [scope for scope in scopes if not all(cache.exists(scope, prompt))]
            self._release_found([lookup(scope, prompt) for scope in lacking])

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

    def record_prefill(self, before: int, tokens: int, seconds: float) -> None:
        self._on_cache("prefill", lambda cache: cache.record_prefill(before, tokens, seconds), None)

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

    def _find(
        self,
        cache: "Cache",
        scopes: "Sequence[Scope]",
        keys: Sequence[bytes],
        before: Sequence[bytes],
        page_tokens: int,
    ) -> int:
        prompt = [*before, *keys]
        lookup = self._lookup(cache, scopes, len(before), len(keys), page_tokens)
        # SGLang may end the prefetch while the first lookup runs.
        with self._cancellable(prompt) as ended:
            found = [lookup(scope, prompt) for scope in scopes]
            if any(each.state != "ready" for each in found):
                found = self._wait(lookup, scopes, prompt, found, ended)
        if any(each.state != "ready" for each in found):
            self._release_found(found)
            return self._local(cache, scopes, keys)
        hit = min(found, key=lambda each: each.load)
        pages = hit.load - len(before)
        if pages > 0:
            self._keep_leases(keys, pages, hit, found)
            return pages
        self._release_found(found)
        # A lookup counts no page after the first missing page. The tiers may lack pages before the
        # piece, which SGLang has: then count the pages of the piece alone.
        if self._settings.gate != "never" and min(each.local for each in found) < len(before):
            return self._local(cache, scopes, keys)
        return 0

    def _lookup(
        self,
        cache: "Cache",
        scopes: "Sequence[Scope]",
        before: int,
        pages: int,
        page_tokens: int,
    ) -> "Callable[[Scope, Sequence[bytes]], Lookup]":
        """Returns a function that looks up a prompt whose first `before` pages SGLang has."""
        return partial(
            cache.lookup,
            ttl=LEASE_SECONDS,
            gate=self._settings.gate,
            page_tokens=page_tokens,
            page_bytes=sum(scope.page_bytes for scope in scopes),
            computed=before * page_tokens,
            tokens=(before + pages) * page_tokens,
        )

    def _wait(
        self,
        lookup: "Callable[[Scope, Sequence[bytes]], Lookup]",
        scopes: "Sequence[Scope]",
        prompt: Sequence[bytes],
        found: "list[Lookup]",
        ended: Event,
    ) -> "list[Lookup]":
        """Repeats pending lookups until the remote's pages have arrived, the policy gives up, or
        SGLang ends the prefetch.
        """
        if get_ident() == self._scheduler_thread:
            return found
        deadline = monotonic() + WAIT_SECONDS
        while any(each.state != "ready" for each in found):
            if ended.wait(POLL_SECONDS) or monotonic() > deadline:
                self.cancel_fetch(scopes, prompt)
                break
            found = [
                each if each.state == "ready" else lookup(scope, prompt)
                for scope, each in zip(scopes, found, strict=True)
            ]
        return found

    @contextmanager
    def _cancellable(self, prompt: Sequence[bytes]) -> Iterator[Event]:
        """Yields an event that `cancel_lookup` of the prompt, or closing, sets."""
        ended, last = Event(), prompt[-1] if prompt else b""
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

    def _local(self, cache: "Cache", scopes: "Sequence[Scope]", keys: Sequence[bytes]) -> int:
        """Returns the number of leading pages on this machine, without a query to the remote and
        without leases.
        """
        if self._settings.gate == "never":
            return 0
        return min(cache.lookup(scope, keys, gate="never").local for scope in scopes)

    def _keep_leases(
        self, keys: Sequence[bytes], pages: int, hit: "Lookup", found: "list[Lookup]"
    ) -> None:
        """Keeps the leases on the piece's first `pages` pages until SGLang has read these pages."""
        leases = [lease for each in found for lease in each.leases]
        piece, dropped = Leased(keys[pages - 1], len(found), hit, leases), []
        with self._state_lock:
            while self._leased:
                oldest = next(iter(self._leased.values()))
                if len(self._leased) < LEASED_MAX and piece.at - oldest.at < LEASE_SECONDS:
                    break
                dropped.append(self._leased.popitem(last=False)[1])
            if keys[0] in self._leased:
                dropped.append(self._leased.pop(keys[0]))
            self._leased[keys[0]] = piece
        for each in dropped:
            self._release(each.leases)

    def _begin_read(self, keys: Sequence[bytes]) -> None:
        with self._state_lock:
            piece = self._leased.get(keys[0]) if keys else None
            if piece is not None and piece is not self._reading:
                piece.began = monotonic()
                self._reading = piece

    def _end_read(self, keys: Sequence[bytes]) -> None:
        """Releases the leases of the piece whose last page was read."""
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
        if piece.found.estimate is not None:
            seconds = monotonic() - piece.began
            self._on_cache(
                "outcome", lambda cache: cache.record_outcome(piece.found, seconds), None
            )

    def _release_found(self, found: "list[Lookup]") -> None:
        self._release([lease for each in found for lease in each.leases])

    def _release(self, leases: "Sequence[tuple[TierName, int]]") -> None:
        for lease in leases:
            self._on_cache("release", partial(_release, lease), None)

    def report(self, last: bool = False) -> None:
        """Adds the growth of the cache's counters to the meter, if the report is due or is the
        `last`.
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
