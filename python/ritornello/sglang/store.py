"""Calls of SGLang's storage threads to the store. Gets and puts have deadlines."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ritornello.connector.fail_safe import FailSafeStore
from ritornello.sglang.hits import RestorablePrefixes, SidePool, restorable_prefixes
from ritornello.sglang.identity import KV
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.settings import Settings

if TYPE_CHECKING:
    from ritornello._core import PoolPages, Scope, Store, Ticket

logger = logging.getLogger("ritornello.sglang")

# Minimum deadlines in seconds of one call of SGLang, which moves at most 128 pages of the main
# pool; for many bytes the deadline is up to 60 seconds (`Store.time_limit`). A load that would take
# longer is assumed to be slower than computing, and would delay SGLang's other loads.
GET_SECONDS = 10.0
PUT_SECONDS = 30.0


@dataclass(slots=True)
class Read:
    """A get that has begun. `began`: a time of `perf_counter`. `ticket`: None if the get could not
    be submitted.
    """

    scope: "Scope"
    keys: Sequence[bytes]
    began: float
    ticket: "Ticket | None"

    def wait(self, moment: float) -> bool:
        """Waits until the get ends, at most until `moment` of `perf_counter`. Returns whether it
        has ended.
        """
        left = max(moment - perf_counter(), 0.0)
        return self.ticket is None or self.ticket.wait(left) is not None

    def cancel(self) -> None:
        """Makes the get begin no further I/O. I/O in flight still writes to memory."""
        if self.ticket is not None:
            self.ticket.cancel()


class SGLangStore(FailSafeStore):
    """The store of one rank. While `stale` returns true, the pages in SGLang's cache may belong to
    weights that differ from the current weights: lookups miss and nothing is stored.

    The pages of one call are a piece of a prompt. `before`: the keys of all pages before the piece,
    from the prompt's first page; None if they are unknown.
    """

    # Whether lookups and puts use all keys in `before`; otherwise puts use only the last.
    uses_prompts = False

    def __init__(
        self, settings: Settings, meter: RateMeter, stale: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(settings, logger, lambda _: meter.add("errors", 1))
        self._meter = meter
        self._stale = stale

    def find(
        self,
        scopes: "Sequence[Scope]",
        keys: Sequence[bytes],
        before: Sequence[bytes] | None,
        page_tokens: int,
    ) -> int:
        """Returns the number of leading pages that can be loaded: a page is stored in parts, one
        under each scope, and all must be stored. Called by SGLang's lookup thread and, on a decode
        server of a disaggregated pair, by its scheduler, which must not wait for a remote.
        """
        if self._stale():
            return 0

        def action(store: "Store") -> int:
            return min((store.probe(scope, keys) for scope in scopes), default=0)

        return self.call("probe", action, 0)

    def find_prefixes(
        self,
        scopes: "Sequence[Scope]",
        keys: Sequence[bytes],
        before: Sequence[bytes] | None,
        page_tokens: int,
        sides: Sequence[SidePool],
    ) -> RestorablePrefixes:
        """Returns the prefixes that can be loaded, if side pools hold further parts of the pages.
        Without `scopes` the main pool holds no bytes, so only the side pools limit the prefixes.
        """
        leading = self.find(scopes, keys, before, page_tokens) if scopes else len(keys)
        found = []
        for side in sides:
            pages = [self.exists(scope, keys[:leading]) for scope in side.scopes]
            found.append(side.presence(side.in_all_scopes(pages)))
        return restorable_prefixes(KV, leading, found)

    def exists(self, scope: "Scope", keys: Sequence[bytes]) -> list[bool]:
        if self._stale():
            return [False] * len(keys)
        return self.call("exists", lambda store: store.exists(scope, keys), [False] * len(keys))

    def get(self, scope: "Scope", keys: Sequence[bytes], out: "Iterable[Any] | PoolPages") -> int:
        """Returns the number of leading pages filled and verified. Nothing writes to `out`
        afterwards.
        """
        return self.finish_get(self.begin_get(scope, keys, out))

    def begin_get(
        self,
        scope: "Scope",
        keys: Sequence[bytes],
        out: "Iterable[Any] | PoolPages",
        behind: int = 0,
    ) -> Read:
        """Begins a get. Until `finish_get` or `abandon_get` returns, `out` is written to. `behind`:
        the number of pages whose get is in progress, and may delay this get.
        """
        began = perf_counter()

        def action(store: "Store") -> "Ticket":
            limit = store.time_limit((behind + len(keys)) * scope.page_bytes, GET_SECONDS)
            return store.submit_get(scope, keys, out, timeout=limit)

        ticket = None if self._stale() else self.call("get", action, None)
        return Read(scope, keys, began, ticket)

    def finish_get(self, read: Read, since: float = 0.0) -> int:
        """Waits for a get. Returns the number of leading pages filled and verified; nothing writes
        to its memory afterwards. Time before `since` is not counted as time of this get.
        """
        pages, ticket = len(read.keys), read.ticket
        outcome = None if ticket is None else self.attempt("get", ticket.wait, None)
        if self._stale():
            # If the weights changed during the load, the pages are of earlier weights.
            self._meter.missed("before_reset", pages)
            return 0
        if outcome is None:
            return 0
        seconds = perf_counter() - max(read.began, since)
        self._meter.moved("loaded", outcome.pages, read.scope.page_bytes, seconds)
        self._meter.missed(outcome.reason or "error", pages - outcome.pages)
        return outcome.pages

    def abandon_get(self, read: Read) -> None:
        """Cancels a get, whose pages are not needed. Nothing writes to its memory afterwards."""
        read.cancel()
        if read.ticket is not None:
            self.attempt("get", read.ticket.wait, None)

    def put(
        self,
        scope: "Scope",
        keys: Sequence[bytes],
        pages: "Iterable[Any] | PoolPages",
        before: Sequence[bytes] | None,
    ) -> int:
        """Returns the number of leading pages that are stored now, including pages that were
        already stored.
        """
        if self._stale():
            self._meter.skipped("before_reset", len(keys))
            return 0

        def action(store: "Store") -> int:
            started = perf_counter()
            limit = store.time_limit(len(keys) * scope.page_bytes, PUT_SECONDS, put=True)
            named, options = self._put_options(scope, keys, before)
            ticket = store.submit_put(scope, named, pages, timeout=limit, **options)
            outcome = ticket.wait()
            if outcome is None:
                return 0
            self._meter.moved("saved", outcome.pages, scope.page_bytes, perf_counter() - started)
            self._meter.skipped(outcome.reason or "error", len(keys) - outcome.pages)
            return outcome.pages

        return self.call("put", action, 0)

    def drop(self, scope: "Scope") -> None:
        self.call("clear", lambda store: store.drop_scope(scope), None)

    def begin_lookup(
        self,
        scopes: "Sequence[Scope]",
        keys: Sequence[bytes],
        before: Sequence[bytes],
        page_tokens: int,
        sides: Sequence[SidePool] = (),
    ) -> None:
        """Does nothing here. With tiers (`cache_store`), starts to fetch the main pool's pages from
        a remote, without waiting for the remote; a later `find` of these pages waits for the fetch.
        """

    def cancel_fetch(self, scopes: "Sequence[Scope]", prompt: Sequence[bytes]) -> None:
        """Does nothing here. With tiers, cancels the fetch that `begin_lookup` began. `prompt`: all
        keys of the prompt.
        """

    def cancel_lookup(self, keys: Sequence[bytes]) -> None:
        """Does nothing here, where `find` waits for no remote. With tiers, makes a waiting `find`
        whose last key is the last of `keys` return.
        """

    def forget(self) -> None:
        """Does nothing here, where lookups lease no pages. With tiers, makes every waiting `find`
        return, and releases the leases of pages that SGLang has not read.
        """

    def report(self, last: bool = False) -> None:
        """Does nothing here. With tiers, adds the growth of their counters to the meter."""

    def record_prefill(self, before: int, tokens: int, seconds: float) -> None:
        """Records that the engine computed `tokens` tokens after `before` tokens in `seconds`."""
        self.call("prefill", lambda store: store.record_prefill(before, tokens, seconds), None)

    def note_prefill_avoided(self, tokens: int, seconds: float) -> None:
        """Counts tokens that were loaded in `seconds` and not computed. Their position in the
        prompt is unknown, so the avoided time is estimated as if they began the prompt.
        """
        self.call("prefill", lambda store: store.note_prefill_avoided(0, tokens, seconds), None)

    def _put_options(
        self, scope: "Scope", keys: Sequence[bytes], before: Sequence[bytes] | None
    ) -> tuple[Sequence[bytes], dict[str, Any]]:
        """Returns the keys and options with which `submit_put` stores a piece. They include the
        keys of pages `before` the piece that the store uses.
        """
        return keys, {"parent": before[-1] if before else None}
