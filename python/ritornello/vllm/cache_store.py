"""The connector's calls to a cache over tiers, behind the interface of `VllmStore`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ritornello.connector.cache_counts import CacheCounts
from ritornello.connector.meter import Meter
from ritornello.vllm.cache_groups import ObjectId
from ritornello.vllm.identity import Identity
from ritornello.vllm.metadata import PageBlocks, WorkerReport
from ritornello.vllm.meter import REPORT_SECONDS
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import Lease, PromptLength, StoreHit, VllmStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ritornello._core import Cache, Gate, Lookup, TierName

T = TypeVar("T")

# Maximum number of pending lookups that are remembered. A further pending lookup replaces all of
# them: their prompts then look up all objects again, and the leases of their objects expire.
PENDING_LOOKUPS_MAX = 1024


class CacheStore(VllmStore):
    """The tiers of one connector process. Each object of a page is looked up separately. The prefix
    that can be loaded is the shortest of the objects' prefixes.
    """

    wants_timings = True

    def __init__(self, settings: Settings, meter: Meter) -> None:
        super().__init__(settings, meter)
        self._meter = meter
        self._counts = CacheCounts(REPORT_SECONDS)
        # For each prompt whose lookup is pending, by `_lookup_key`: the pending object, and the
        # leases of the lookups so far.
        self._pending_lookups: dict[
            tuple[ObjectId, bytes], tuple[ObjectId, list[tuple[TierName, int]]]
        ] = {}

    def lookup(
        self,
        identity: Identity,
        object_ids: Sequence[ObjectId],
        keys: Sequence[bytes],
        ttl: float,
        prompt: PromptLength,
    ) -> StoreHit | None:
        group = identity.groups[object_ids[0].group]
        chained = group.reach.tokens is None
        # For a prompt that may load no pages, "never" keeps the cache from fetching pages from the
        # remote.
        gate: Gate = "never"
        if prompt.loads:
            gate = self._settings.gate if chained else "always"
        moved = sum(
            identity.groups[p.group].object_bytes(p.stage, p.head_range) for p in object_ids
        )

        def find(cache: "Cache", object_id: ObjectId) -> "Lookup":
            return cache.lookup(
                self._scope_for(identity, object_id),
                keys,
                ttl=ttl,
                gate=gate,
                page_tokens=group.page_tokens if chained and prompt.loads else 0,
                page_bytes=moved,
                computed=prompt.computed,
                tokens=prompt.tokens,
            )

        def action(cache: "Cache") -> StoreHit:
            key = _lookup_key(object_ids, keys)
            pending, leased_before = self._pending_lookups.pop(key, (None, []))
            # Retries are frequent, so a retry looks up the pending object first, and the other
            # objects only if this object is ready.
            order = (
                object_ids
                if pending is None
                else (pending, *(p for p in object_ids if p != pending))
            )
            found: list[Lookup] = []
            unfinished = None
            try:
                for object_id in order:
                    found.append(find(cache, object_id))
                    if found[-1].state != "ready":
                        unfinished = object_id
                        if pending is not None:
                            break
            except BaseException:
                for each in found:
                    leased_before += each.leases
                for lease in leased_before:
                    cache.release(lease)
                raise
            hit = min(found, key=lambda object_found: object_found.load)
            leases = [lease for object_found in found for lease in object_found.leases]
            if unfinished is not None:
                if len(self._pending_lookups) >= PENDING_LOOKUPS_MAX:
                    self._pending_lookups.clear()
                self._pending_lookups[key] = (unfinished, leased_before + leases)
                return StoreHit(0, 0, pending=True)
            for lease in leased_before if hit.load else leased_before + leases:
                cache.release(lease)
            if not hit.load:
                leases = []
            present = min(object_found.local for object_found in found)
            # The cache reports a fetch once, with the first lookup after its end. Objects whose
            # fetches ended before an earlier lookup therefore report 0 here.
            fetched = max(object_found.fetched for object_found in found)
            return StoreHit(hit.load, present, leases, False, _tiers(hit, fetched), hit)

        return self._on_cache("lookup", action)

    def release(self, lease: Lease) -> None:
        def action(cache: "Cache") -> None:
            for each in lease:
                cache.release(each)

        self._on_cache("release", action)

    def cancel_lookup(
        self, identity: Identity, object_ids: Sequence[ObjectId], keys: Sequence[bytes]
    ) -> None:
        _, leased_before = self._pending_lookups.pop(_lookup_key(object_ids, keys), (None, []))

        def action(cache: "Cache") -> None:
            for lease in leased_before:
                cache.release(lease)
            for object_id in object_ids:
                cache.cancel(self._scope_for(identity, object_id), keys)

        self._on_cache("cancel_lookup", action)

    def take_loads(self) -> list[tuple[str, int, float]]:
        return [*(self._on_cache("take_loads", lambda cache: cache.take_loads()) or ())]

    def record_timings(self, report: WorkerReport, decisions: dict[str, Any]) -> None:
        def action(cache: "Cache") -> None:
            if report.prefill is not None:
                cache.record_prefill(*report.prefill)
            for tier, moved, seconds in report.loads:
                cache.record_load(tier, moved, seconds)
            for request, seconds in report.load_seconds.items():
                found = decisions.pop(request, None)
                if found is not None and found.estimate is not None:
                    cache.record_outcome(found, seconds)

        self._on_cache("record_timings", action)
        self.report_stats()

    def report_stats(self) -> None:
        """Adds the growth of the cache's counters since the last report to the meter, if at least
        `REPORT_SECONDS` have passed since then.
        """
        if self._counts.is_due():
            growth = self._on_cache("stats", lambda cache: self._counts.growth(cache.stats()))
            for name, amount in (growth or {}).items():
                self._meter.add(name, amount)

    def _get_options(self, pages: PageBlocks) -> dict[str, Any]:
        return {"parent": pages.parent}

    def _put_options(self, pages: PageBlocks) -> tuple[Sequence[bytes], dict[str, Any]]:
        if len(pages.before) != pages.first:
            return pages.keys, {"parent": pages.parent}
        return [*pages.before, *pages.keys], {"first": pages.first}

    def _on_cache(self, operation: str, action: "Callable[[Cache], T]") -> T | None:
        return self.call(operation, lambda cache: action(cast("Cache", cache)), None)


def _lookup_key(object_ids: Sequence[ObjectId], keys: Sequence[bytes]) -> tuple[ObjectId, bytes]:
    """Returns a name of a lookup: its first object, and the last key."""
    return object_ids[0], keys[-1] if keys else b""


def _tiers(found: "Lookup", fetched: int) -> list[tuple[str, int]]:
    """Returns the tiers of the local pages, in order. The last `fetched` of these pages count as
    remote, because they were fetched for this prompt.
    """
    tiers: list[tuple[str, int]] = []
    fetched = min(fetched, found.local)
    left = found.local - fetched
    for tier, pages in found.spans:
        local = min(pages, left)
        if local:
            tiers.append((tier, local))
        left -= local
    return [*tiers, ("remote", fetched)] if fetched else tiers
