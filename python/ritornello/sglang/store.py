"""Calls of SGLang's storage threads to the store. All calls have deadlines."""

import logging
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ritornello.connector.fail_safe import FailSafeStore
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.settings import Settings

if TYPE_CHECKING:
    from ritornello._core import PoolPages, Scope, Store

logger = logging.getLogger("ritornello.sglang")

# Deadlines of one call of SGLang, which moves at most 128 pages of the main pool. A load that takes
# longer is assumed to be slower than computing, and delays SGLang's other loads.
GET_SECONDS = 10.0
PUT_SECONDS = 30.0


class SGLangStore(FailSafeStore):
    """The store of one rank. While `stale` returns true, the pages in SGLang's cache may belong to
    weights that differ from the current weights: lookups miss and nothing is stored.
    """

    def __init__(
        self, settings: Settings, meter: RateMeter, stale: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(settings, logger, lambda _: meter.add("errors", 1))
        self._meter = meter
        self._stale = stale

    def probe(self, scope: "Scope", keys: Sequence[bytes]) -> int:
        """Returns the number of leading pages that are stored, from the index."""
        if self._stale():
            return 0
        return self.call("probe", lambda store: store.probe(scope, keys), 0)

    def exists(self, scope: "Scope", keys: Sequence[bytes]) -> list[bool]:
        if self._stale():
            return [False] * len(keys)
        return self.call("exists", lambda store: store.exists(scope, keys), [False] * len(keys))

    def get(self, scope: "Scope", keys: Sequence[bytes], out: "Iterable[Any] | PoolPages") -> int:
        """Returns the number of leading pages filled and verified. Nothing writes to `out`
        afterwards.
        """
        if self._stale():
            self._meter.missed("before_reset", len(keys))
            return 0

        def action(store: "Store") -> int:
            started = perf_counter()
            limit = store.time_limit(len(keys) * scope.page_bytes, GET_SECONDS)
            outcome = store.submit_get(scope, keys, out, timeout=limit).wait()
            if outcome is None:
                return 0
            self._meter.moved("loaded", outcome.pages, scope.page_bytes, perf_counter() - started)
            self._meter.missed(outcome.reason or "error", len(keys) - outcome.pages)
            return outcome.pages

        return self.call("get", action, 0)

    def put(
        self,
        scope: "Scope",
        keys: Sequence[bytes],
        pages: "Iterable[Any] | PoolPages",
        parent: bytes | None,
    ) -> int:
        """Returns the number of leading pages that are stored now, including those stored
        before.
        """
        if self._stale():
            self._meter.skipped("before_reset", len(keys))
            return 0

        def action(store: "Store") -> int:
            started = perf_counter()
            limit = store.time_limit(len(keys) * scope.page_bytes, PUT_SECONDS, put=True)
            ticket = store.submit_put(scope, keys, pages, parent=parent, timeout=limit)
            outcome = ticket.wait()
            if outcome is None:
                return 0
            self._meter.moved("saved", outcome.pages, scope.page_bytes, perf_counter() - started)
            self._meter.skipped(outcome.reason or "error", len(keys) - outcome.pages)
            return outcome.pages

        return self.call("put", action, 0)

    def drop(self, scope: "Scope") -> None:
        self.call("clear", lambda store: store.drop_scope(scope), None)
