"""The scheduler's side: pages that a request may load, and pages that are ready to be saved.

Invariants:
* A page is claimed only under a lease. Leases are held until the workers have reported the load, or
  released if it does not happen; without a report they expire.
* The last token of a request is never claimed: the engine must compute one token to answer.
* The first `RequestState.saved` pages of each group of a request are stored or being saved. The
  number only grows within an admission, unless a worker reports a save that failed.
* A load that a step waits for (not `asynchronous`) happens only with one computing worker and one
  step in flight: a failure is then known before anything computed on top of it can be saved.
* A request whose load failed computes the remaining tokens without a further lookup.
* Inside MultiConnector a page is saved only after the outcome of the loads it rests on is known
  (`deferred`).
* No page is claimed or saved while the weights differ from the weights at the beginning of the
  epoch.
"""

import logging
from collections.abc import Collection, Sequence
from time import monotonic
from typing import Any

from ritornello.connector.meter import Meter
from ritornello.vllm.deferred import DeferredSaves, StepSaves, stale_blocks
from ritornello.vllm.identity import Identity
from ritornello.vllm.matching import Lease, Matcher, PrefixMatch, PromptLength
from ritornello.vllm.metadata import IDLE, Load, PageBlocks, Save, StepMetadata, WorkerReport
from ritornello.vllm.request_state import CacheManager, LeasedMatch, Request, RequestState, Step
from ritornello.vllm.save_plan import SavePlan
from ritornello.vllm.settings import RequestOptions
from ritornello.vllm.store import VllmStore
from ritornello.vllm.weights.guard import WeightGuard

logger = logging.getLogger("vllm.ritornello")

# Covers the step that claims the pages, and the load's own deadline. A waiting request is looked up
# again when half of this time has passed.
LEASE_SECONDS = 60.0
# A load of more bytes per worker is asynchronous: it would delay the other requests of its step by
# more than the time of a step.
ASYNC_LOAD_BYTES = 16 << 20
# Maximum time a request waits for its pages; the tiers' own limits are expected to end earlier.
WAIT_SECONDS = 60.0


class SchedulerSide:
    """Claims and saves of one engine. `asynchronous`: all loads are asynchronous, even small loads.
    `has_remote`: the store needs all keys of a prompt. `composed`: other connectors fill blocks
    too. `guard`: knows whether the weights changed.
    """

    def __init__(
        self,
        store: VllmStore,
        identity: Identity,
        meter: Meter,
        *,
        read_only: bool = False,
        asynchronous: bool = False,
        has_remote: bool = False,
        composed: bool = False,
        guard: WeightGuard | None = None,
    ) -> None:
        self._store = store
        self._guard = guard
        self._meter = meter
        self._read_only = read_only
        self._has_remote = has_remote
        self._deferred = DeferredSaves() if composed else None
        self._requests: dict[str, RequestState] = {}
        self._loads: list[Load] = []
        # Leases of loads in progress: leases of the last step, and leases of asynchronous loads by
        # request.
        self._step_leases: list[Lease] = []
        self._async_leases: dict[str, list[Lease]] = {}
        # The gate's decisions on loads in progress, by request.
        self._decisions: dict[str, Any] = {}
        self._cache: CacheManager | None = None
        # Block tables of a step that waits for loads: vLLM ends aborted requests before it reports
        # the outcome of their step, and leaves their blocks in its prefix cache.
        self._step_tables: list[Sequence[Sequence[int]]] = []
        # Block number that vLLM puts in place of blocks outside a window.
        self._null_block = -1
        # Each flag stops hits and saves: an unsupported worker permanently, an unclean reset until
        # a clean reset.
        self._worker_unsupported = False
        self._reset_unclean = False
        self._tokens = identity.alignment
        self._identity_sent = False
        self._async_load_tokens = (
            0 if asynchronous else ASYNC_LOAD_BYTES // _bytes_per_token(identity)
        )
        self._save_plan = SavePlan(identity, self._make_matcher(identity))
        self._set_identity(identity)

    def bind_cache(self, cache: CacheManager) -> None:
        self._cache = cache
        self._null_block = cache.block_pool.null_block.block_id
        self._save_plan.set_null_block(self._null_block)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Returns the tokens that can be loaded beyond the first `computed`, and whether
        asynchronously. None instead of a number: pages are on their way to a tier that can be
        loaded from; vLLM must repeat the call.

        vLLM calls this repeatedly for a waiting request; the store is queried only if its answer
        may have changed. Failures are misses, because nothing was promised yet. The methods below
        must keep promises, and raise if they fail to.
        """
        try:
            return self._claim(request, computed)
        except Exception as error:
            self._store.record_failure("match", error)
            return 0, False

    def _claim(self, request: Request, computed: int) -> tuple[int | None, bool]:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            self.request_finished(request.request_id)
            state = RequestState(
                request, self._permitted_options(RequestOptions.parse(request.kv_transfer_params))
            )
            self._requests[request.request_id] = state
        state.loading = False
        if self._is_paused() or computed % self._tokens:
            return 0, False
        match = self._match_prefix(state, self._claimable_tokens(request), computed)
        if match is None:
            return (0 if state.waiting_since is None else None), False
        tokens = max(match.found.tokens - computed, 0) if state.loads else 0
        slow = tokens > 0 and _loads_slower_than_computing(match.found)
        match.local_tokens, match.asynchronous = computed, slow or tokens > self._async_load_tokens
        return tokens, match.asynchronous

    def _permitted_options(self, options: RequestOptions) -> RequestOptions:
        if not options.retain or self._store.permits_retention():
            return options
        self._meter.add("ignored_retentions", 1)
        return options.without_retention()

    def sources(self, request: Request, tokens: int) -> dict[str, int]:
        """Returns the tiers of the `tokens` claimed last, with their numbers of tokens; empty if
        the connector has a single store.
        """
        state = self._requests.get(request.request_id)
        if state is None or sum(state.sources.values()) != tokens:
            return {}
        return state.sources

    def request_admitted(
        self, request: Request, blocks: Sequence[Sequence[int]], external: int
    ) -> None:
        """Notes the blocks of a request (by group), `external` of whose tokens will be loaded. vLLM
        calls this again after an asynchronous load, before it computes the request.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        self._save_plan.add_due(request.request_id)
        # After an asynchronous load vLLM calls again with the same blocks.
        if not request.num_computed_tokens:
            state.shares_failed_block = False
        if self._deferred is not None:
            self._deferred.drop_request(request.request_id)
        if state.loading and not external:
            state.loading = False
            return
        match, state.match = state.match, None
        # Pages that the engine has and the store lacks are saved with the request's new pages.
        state.saved = list(match.found.stored) if match else [0] * len(self._groups)
        if state.options.retain:
            # A put of the last stored page retains all pages before it.
            state.saved = [max(pages - 1, 0) for pages in state.saved]
        if match is None:
            return
        self._count_hits(state, match, external)
        if not external:
            self._release(match.found.leases)
            return
        pages = self._pages_to_load(
            request, blocks, match.local_tokens, match.local_tokens + external
        )
        state.sources = _tokens_by_tier(
            match.found, match.local_tokens, match.local_tokens + external
        )
        if self._store.wants_timings:
            self._decisions[request.request_id] = match.found.decision
        self._loads.append(Load(request.request_id, pages, match.asynchronous))
        if match.asynchronous:
            state.loading = True
            self._async_leases[request.request_id] = match.found.leases
        else:
            self._step_leases += match.found.leases

    def plan(self, step: Step) -> StepMetadata:
        """Returns the loads and saves of the step that is about to run."""
        loads, self._loads = self._loads, []
        if self._read_only or self._is_paused():
            saves: Sequence[Save] = ()
            self._save_plan.clear_due()
        else:
            saves = self._save_plan.plan(step.num_scheduled_tokens, self._requests, self._cache)
        waits = self._cache is not None and any(not load.asynchronous for load in loads)
        self._step_tables = (
            [self._cache.get_block_ids(name) for name in step.num_scheduled_tokens]
            if waits and self._cache is not None
            else []
        )
        prefill = self._measured_prefill(step) if self._store.wants_timings else None
        work = self._plan_deferred(step, saves)
        if not loads and not work.saves and prefill is None:
            if not work.number and not work.finished_sending:
                return IDLE
            return StepMetadata(step=work.number, finished_sending=work.finished_sending)
        new_identity, self._identity_sent = None if self._identity_sent else self._identity, True
        covered = (
            self._guard.covered if self._guard is not None and new_identity is not None else b""
        )
        return StepMetadata(
            new_identity,
            loads,
            work.saves,
            prefill,
            work.number,
            work.finished_sending,
            covered=covered,
        )

    def request_finished(self, request_id: str) -> bool:
        """Ends an answered or aborted request. A load in progress keeps its leases, because it
        still reads. Returns whether vLLM must keep the blocks until a worker reports the request as
        sent.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return False
        self._drop_match(state)
        self._decisions.pop(request_id, None)
        if state.waiting_since is not None:
            self._matcher.cancel_lookup(
                state.request.block_hashes, self._claimable_tokens(state.request)
            )
        if self._deferred is None or self._cache is None:
            return False
        return self._deferred.keeps_blocks(request_id, self._cache)

    def complete_step(
        self,
        report: WorkerReport | None,
        invalid_blocks: set[int],
        loaded: set[str],
        failed: Collection[str] = (),
    ) -> None:
        """Takes the result of a step. `loaded`: requests whose asynchronous load ended on all
        workers. `failed`: loaded requests whose load failed, if vLLM cannot name the blocks.
        """
        self._release(self._step_leases)
        for request_id in loaded:
            self._release(self._async_leases.pop(request_id, []))
        if report is not None:
            if self._guard is not None:
                self._guard.merge_counts(report.changes)
            if report.unsupported_reason:
                self._set_unsupported(report.unsupported_reason)
            if self._store.wants_timings:
                self._store.record_timings(report, self._decisions)
            for request_id, group, first in report.unsaved:
                self._mark_unsaved(request_id, group, first)
            for request_id in report.failed:
                if request_id in self._requests:
                    self._requests[request_id].failed = True
        self._complete_deferred(report.step if report is not None else 0, invalid_blocks, failed)
        if invalid_blocks:
            self._evict_failed(invalid_blocks)

    def reset(self) -> bool:
        """Begins a random epoch: no page stored before is found again. If blocks of the engine's
        cache are in use, they belong to the old epoch and might be saved under the new epoch: then
        hits and saves stop until a reset finds all blocks free. Returns whether all blocks were
        free.
        """
        self._set_identity(self._identity.with_new_epoch())
        for state in self._requests.values():
            self._drop_match(state)
        if self._deferred is not None:
            self._deferred.clear()
        pool = self._cache.block_pool if self._cache is not None else None
        # vLLM's null block is never free.
        clean = pool is None or pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1
        self._reset_unclean = not clean
        if not clean:
            logger.warning(
                "ritornello: the cache was reset while blocks were in use; "
                "neither hits nor saves until a reset finds the engine idle"
            )
        return clean

    def on_caches_reset(self) -> None:
        """Begins an epoch if the weights changed. Called when all caches of the engine are empty:
        no page of earlier weights is left to be saved.
        """
        if self._guard is None:
            return
        reading = self._guard.read()
        if not self._guard.differs(reading) or self.reset():
            self._guard.cover(reading)

    def close(self) -> None:
        for state in self._requests.values():
            self._drop_match(state)
        for leases in (self._step_leases, *self._async_leases.values()):
            self._release(leases)
        self._store.close()

    def _make_matcher(self, identity: Identity) -> Matcher:
        return Matcher(self._store, identity, LEASE_SECONDS, has_remote=self._has_remote)

    def _set_identity(self, identity: Identity) -> None:
        self._identity = identity
        self._groups = identity.groups
        self._matcher = self._make_matcher(identity)
        self._save_plan.set_identity(identity, self._matcher)
        self._identity_sent = False

    def _claimable_tokens(self, request: Request) -> int:
        return min(request.num_tokens - 1, len(request.block_hashes) * self._identity.hash_tokens)

    def _match_prefix(
        self, state: RequestState, claimable: int, computed: int
    ) -> LeasedMatch | None:
        """Looks up the request starting at its first page, including the engine's pages: one call
        finds the pages to load and the pages that are not stored, and counts as a use of the
        prefix.
        """
        match = state.match
        if match is not None and match.looked_up == claimable and monotonic() < match.valid_until:
            return match
        self._drop_match(state)
        if claimable < self._tokens:
            return None
        now = monotonic()
        prompt = PromptLength(computed, state.request.num_tokens, state.loads)
        found = self._matcher.lookup(state.request.block_hashes, claimable, prompt)
        waiting_since, state.waiting_since = state.waiting_since, None
        if found is None:
            return None
        if found.pending:
            waiting_since = now if waiting_since is None else waiting_since
            if state.loads and now - waiting_since < WAIT_SECONDS:
                state.waiting_since = waiting_since
                return None
        state.match = LeasedMatch(found, claimable, now + LEASE_SECONDS / 2)
        return state.match

    def _drop_match(self, state: RequestState) -> None:
        match, state.match = state.match, None
        if match is not None:
            self._release(match.found.leases)

    def _release(self, leases: list[Lease]) -> None:
        while leases:
            self._store.release(leases.pop())

    def _pages_to_load(
        self, request: Request, blocks: Sequence[Sequence[int]], local: int, end: int
    ) -> list[PageBlocks]:
        """Returns the pages from `local` to `end` tokens; of a window only the pages that are still
        needed.
        """
        loads = []
        for number, group in enumerate(self._groups):
            needed = group.needed(end)
            first = max(needed.start, local // group.page_tokens)
            if first < needed.stop:
                keys = self._matcher.keys(number, request.block_hashes, range(first, needed.stop))
                loaded = tuple(blocks[number][first : needed.stop])
                before = self._matcher.keys_before(number, request.block_hashes, first)
                loads.append(PageBlocks(number, first, keys, loaded, before))
        return loads

    def _plan_deferred(self, step: Step, saves: Sequence[Save]) -> StepSaves:
        """Returns the saves of this step and of earlier steps that execute with this step."""
        if self._deferred is None or self._cache is None:
            return StepSaves(list(saves))
        if self._is_paused():
            self._deferred.clear()
        return self._deferred.plan(step, saves, self._cache)

    def _complete_deferred(self, step: int, invalid: set[int], failed: Collection[str]) -> None:
        if self._deferred is None:
            return
        result = self._deferred.complete_steps(step, invalid, failed)
        for save in result.dropped:
            self._mark_unsaved(save.request, save.pages.group, save.pages.first)
        if result.stale and self._cache is not None:
            self._cache.evict_blocks(result.stale)

    def _mark_unsaved(self, request_id: str, group: int, first: int) -> None:
        """Marks the pages of a group, starting at `first`, as unsaved."""
        state = self._requests.get(request_id)
        if state is not None and state.saved:
            state.saved[group] = min(state.saved[group], first)
            self._save_plan.add_due(request_id)

    def _measured_prefill(self, step: Step) -> tuple[int, int] | None:
        """Returns tokens before and tokens of the step's prefill, if exactly one request computes
        more than one token.
        """
        many = [(name, count) for name, count in step.num_scheduled_tokens.items() if count > 1]
        if len(many) != 1:
            return None
        state = self._requests.get(many[0][0])
        return None if state is None else (state.request.num_computed_tokens, many[0][1])

    def _evict_failed(self, invalid_blocks: set[int]) -> None:
        """Evicts blocks that failed to load, and all blocks computed after them, from the engine's
        prefix cache. vLLM recomputes them in place, but a request that is preempted or aborted
        before that would leave them to be hit. If requests share such a block, vLLM recomputes it
        in one of these requests; pages of the other requests are not saved, because the recomputing
        request may be aborted first.
        """
        if self._cache is None:
            return
        tables = {name: self._cache.get_block_ids(name) for name in self._requests}
        stale = stale_blocks(
            [*self._step_tables, *tables.values()], invalid_blocks, self._null_block
        )
        self._cache.evict_blocks(stale)
        for request_id, state in self._requests.items():
            blocks = next(iter(tables[request_id]), ())
            index = next((i for i, block in enumerate(blocks) if block in stale), None)
            if index is not None:
                computed = state.request.num_computed_tokens
                shared = computed > index * self._groups[0].page_tokens
                state.shares_failed_block = state.shares_failed_block or shared

    def _count_hits(self, state: RequestState, match: LeasedMatch, external: int) -> None:
        probed = max(match.looked_up - match.local_tokens, 0) // self._tokens
        hits = external // self._tokens
        self._meter.add("probed_pages", probed)
        self._meter.add("hit_pages", hits)
        if probed > hits:
            reason = "not_found" if state.loads else "opted_out"
            if (
                self._deferred is not None
                and not external
                and match.found.tokens > match.local_tokens
            ):
                reason = "other_connector"  # earlier in MultiConnector's order
            self._meter.missed(reason, probed - hits)

    def _set_unsupported(self, reason: str) -> None:
        if not self._worker_unsupported:
            logger.warning("ritornello: %s; neither hits nor saves", reason)
        self._worker_unsupported = True

    def _is_paused(self) -> bool:
        changed = self._guard is not None and self._guard.changed()
        return changed or self._worker_unsupported or self._reset_unclean


def _bytes_per_token(identity: Identity) -> int:
    """Returns the approximate bytes that a worker reads to load one token."""
    total = sum(
        len(layers)
        * max(group.kv_heads // identity.ranks, 1)
        * group.head_bytes
        // group.page_tokens
        for group in identity.groups
        for layers in group.stages[:1]
    )
    return max(total, 1)


def _loads_slower_than_computing(found: PrefixMatch) -> bool:
    """Returns whether loading is estimated to take longer than computing; False without an
    estimate.
    """
    estimate = getattr(found.decision, "estimate", None)
    return estimate is not None and estimate[0] > estimate[1]


def _tokens_by_tier(found: PrefixMatch, start: int, end: int) -> dict[str, int]:
    """Returns how many of the tokens from `start` to `end` are stored on each tier."""
    counts: dict[str, int] = {}
    at = 0
    for tier, pages in found.tiers:
        past = at + pages * found.page_tokens
        tokens = min(past, end) - max(at, start)
        if tokens > 0:
            counts[tier] = counts.get(tier, 0) + tokens
        at = past
    return counts
