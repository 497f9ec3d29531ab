"""The scheduler's side: requests and steps of one engine, and the epoch of its pages.

`LoadPlan` selects the pages that a request may load, `SavePlan` the pages that can be saved.
Invariants:
* A load that a step waits for (not `asynchronous`) happens only with one computing worker and one
  step in flight: a failure is then known before pages that were computed from unfilled blocks can
  be saved.
* If the weights are watched (`guard`), no page is promised to vLLM or saved while they differ from
  the weights at the beginning of the epoch.
"""

from collections.abc import Collection, Sequence

from ritornello.connector.meter import Meter
from ritornello.vllm.decisions import DecisionLog
from ritornello.vllm.deferred import stale_blocks
from ritornello.vllm.epoch import Epoch
from ritornello.vllm.identity import Identity
from ritornello.vllm.load_plan import LEASE_SECONDS, LoadPlan
from ritornello.vllm.matching import Matcher
from ritornello.vllm.metadata import IDLE, StepMetadata, WorkerReport
from ritornello.vllm.prefill_times import PREFILL_SHARE, TOKENS_MIN
from ritornello.vllm.request_state import CacheManager, Request, RequestState, Step
from ritornello.vllm.save_plan import SavePlan
from ritornello.vllm.settings import RequestOptions
from ritornello.vllm.store import VllmStore
from ritornello.vllm.weights.guard import WeightGuard


class SchedulerSide:
    """The scheduler's side of one engine. `asynchronous`: all loads are asynchronous, even small
    loads. `has_remote`: a tier of the store is a remote, which needs all keys of a prompt.
    `composed`: other connectors fill blocks too (MultiConnector). `guard`: knows whether the
    weights changed.
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
        self._meter = meter
        self._epoch = Epoch(identity, guard)
        self._requests: dict[str, RequestState] = {}
        self._cache: CacheManager | None = None
        # Block tables of the last planned step, if it waits for loads. `_evict_failed` needs them
        # for requests that were aborted since: vLLM ends these before it reports the outcome of the
        # step, and leaves their blocks in its prefix cache.
        self._step_tables: list[Sequence[Sequence[int]]] = []
        matcher = Matcher(store, self._epoch, LEASE_SECONDS, has_remote=has_remote)
        self._decision_log = DecisionLog(store, self._epoch, matcher)
        self._load_plan = LoadPlan(
            store,
            self._epoch,
            matcher,
            self._decision_log,
            meter,
            asynchronous=asynchronous,
            composed=composed,
        )
        self._save_plan = SavePlan(
            self._epoch, matcher, self._requests, read_only=read_only, composed=composed
        )

    def bind_cache(self, cache: CacheManager) -> None:
        self._cache = cache
        self._save_plan.bind_cache(cache)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Returns the tokens that can be loaded beyond the first `computed`, and whether
        asynchronously. The number is None while a remote has not answered, or while pages are
        being copied to a tier from which they can be loaded; vLLM must then repeat the call.

        vLLM calls this repeatedly for a waiting request; the store is queried only if the store's
        answer may have changed. A failure is a miss. The methods that vLLM calls next for the
        request raise if they fail, because vLLM relies on the tokens that this method returned.
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
            options = RequestOptions.parse(request.kv_transfer_params)
            state = RequestState(request, options.permitted(self._store, self._meter))
            self._requests[request.request_id] = state
        state.loading = False
        refusal = self._epoch.pause_reason()
        if not refusal and computed % self._epoch.identity.alignment:
            refusal = "unaligned_prefix"
        if refusal:
            self._decision_log.record_without_match(
                state, "not_cacheable", request.num_tokens - 1, refusal
            )
            return 0, False
        return self._load_plan.claim(state, computed)

    def sources(self, request: Request, tokens: int) -> dict[str, int]:
        """Returns how many of the `tokens` of the request's last load come from each tier; empty if
        this is unknown, as without the setting `tiers`.
        """
        state = self._requests.get(request.request_id)
        if state is None or sum(state.sources.values()) != tokens:
            return {}
        return state.sources

    def request_admitted(
        self, request: Request, blocks: Sequence[Sequence[int]], external: int
    ) -> None:
        """Takes the blocks of a request, by group. `external`: how many tokens of the request will
        be loaded into these blocks. vLLM calls this again after an asynchronous load, before it
        computes the request.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        self._save_plan.add_request(request.request_id)
        # A request without computed tokens is new or was preempted: it no longer holds the blocks
        # that it shared before.
        if not request.num_computed_tokens:
            state.shares_failed_block = False
        # After an asynchronous load vLLM calls again with the same blocks.
        if state.loading and not external:
            state.loading = False
            return
        match, state.match = state.match, None
        self._save_plan.set_stored(state, match)
        if match is not None:
            self._load_plan.admit(state, match, blocks, external)

    def plan(self, step: Step) -> StepMetadata:
        """Returns the loads and saves of the step that is about to run."""
        loads = self._load_plan.take_loads()
        work = self._save_plan.plan(step)
        self._step_tables = []
        if self._cache is not None and not all(load.asynchronous for load in loads):
            self._step_tables = [*map(self._cache.get_block_ids, step.num_scheduled_tokens)]
        prefill = self._measured_prefill(step) if self._store.wants_timings else None
        freed = (*step.finished_req_ids, *(step.preempted_req_ids or ()))
        if not loads and not work.saves and prefill is None:
            if not work.number and not work.finished_sending and not freed:
                return IDLE
            return StepMetadata(
                step=work.number, finished_sending=work.finished_sending, freed=freed
            )
        identity, covered = self._epoch.take_identity()
        return StepMetadata(
            identity,
            loads,
            work.saves,
            prefill,
            work.number,
            work.finished_sending,
            covered=covered,
            freed=freed,
        )

    def request_finished(self, request_id: str) -> bool:
        """Ends an answered or aborted request. A load in progress keeps its leases, because it
        still reads. Returns whether vLLM must keep the blocks until each worker has reported, in
        `finished_sending`, that it no longer reads them.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return False
        self._load_plan.end_request(state)
        return self._save_plan.keeps_blocks(request_id)

    def complete_step(
        self,
        report: WorkerReport | None,
        invalid_blocks: set[int],
        loaded: set[str],
        failed: Collection[str] = (),
    ) -> None:
        """Takes the result of a step. `loaded`: requests whose asynchronous load ended on all
        workers. `failed`: requests whose load failed without failed blocks in `invalid_blocks`, as
        with several KV cache groups.
        """
        self._load_plan.complete_step(report, loaded)
        if report is not None:
            self._epoch.add_report(report)
            for request_id, group, first in report.unsaved:
                self._save_plan.mark_unsaved(request_id, group, first)
            for request_id in report.failed:
                if request_id in self._requests:
                    self._requests[request_id].failed = True
        step = report.step if report is not None else 0
        self._save_plan.complete_step(step, invalid_blocks, failed)
        if invalid_blocks:
            self._evict_failed(invalid_blocks)

    def reset(self) -> bool:
        """Begins an epoch. Returns whether all blocks of the engine's cache were free."""
        for state in self._requests.values():
            self._load_plan.drop_match(state)
        self._save_plan.drop_deferred()
        pool = self._cache.block_pool if self._cache is not None else None
        # vLLM's null block is never free.
        clean = pool is None or pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1
        self._epoch.begin(clean=clean)
        return clean

    def on_caches_reset(self) -> None:
        """Begins an epoch if the weights changed. Called when all caches of the engine are empty:
        no page of earlier weights is left to be saved.
        """
        guard = self._epoch.guard
        if guard is None:
            return
        reading = guard.read()
        if not guard.differs(reading) or self.reset():
            guard.cover(reading)

    def close(self) -> None:
        for state in self._requests.values():
            self._load_plan.drop_match(state)
        self._load_plan.close()
        self._store.close()

    def _measured_prefill(self, step: Step) -> tuple[int, int] | None:
        """Returns the numbers of tokens before the step's prefill and in it, if exactly one request
        computes more than one token, and the step is mostly this prefill. In any other step, other
        tokens or the fixed cost of a step take a large part of the duration.
        """
        scheduled = step.num_scheduled_tokens
        many = [(name, count) for name, count in scheduled.items() if count > 1]
        if len(many) != 1:
            return None
        name, count = many[0]
        if count < max(TOKENS_MIN, PREFILL_SHARE * sum(scheduled.values())):
            return None
        state = self._requests.get(name)
        return None if state is None else (state.request.num_computed_tokens, count)

    def _evict_failed(self, invalid_blocks: set[int]) -> None:
        """Evicts blocks that failed to load, and all blocks computed after them, from the engine's
        prefix cache. vLLM recomputes these blocks in place, but not if the request is preempted or
        aborted first: the blocks would then stay in the cache, and other requests would hit them.
        If several requests share a failed block, vLLM recomputes it in one of these requests; pages
        of the other requests are not saved, because the recomputing request may be aborted first.
        """
        if self._cache is None:
            return
        tables = {name: self._cache.get_block_ids(name) for name in self._requests}
        stale = stale_blocks(
            [*self._step_tables, *tables.values()],
            invalid_blocks,
            self._cache.block_pool.null_block.block_id,
        )
        self._cache.evict_blocks(stale)
        for request_id, state in self._requests.items():
            blocks = next(iter(tables[request_id]), ())
            index = next((i for i, block in enumerate(blocks) if block in stale), None)
            if index is not None:
                computed = state.request.num_computed_tokens
                shared = computed > index * self._epoch.identity.groups[0].page_tokens
                state.shares_failed_block = state.shares_failed_block or shared
