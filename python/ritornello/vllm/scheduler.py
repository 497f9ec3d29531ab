"""The scheduler's side: which pages a request may load, and which are ready to be saved.

Invariants:
* A page is claimed only under leases. They are held until the workers have said that the load is
  over, or released when it does not happen; they end by themselves if nobody says anything.
* The last token of a request is never claimed: the engine must compute something to answer.
* `Tracked.saved` leading pages of each part of a request are in the store or on their way to it. It
  only grows within an admission, except when a worker reports a save that did not happen.
* A load that a step waits for (not `asynchronous`) happens only where one worker computes and one step is
  in flight: what fails is then known before anything computed on top of it can be saved.
* A request whose load failed computes the rest; it does not ask the store a second time.
* Inside MultiConnector a page is saved only after the outcome of the loads it rests on is known
  (`deferred`).
* Nothing is claimed or saved while the weights are others than those that the epoch began with.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, time
from typing import Any, Protocol

from ritornello.model import new_epoch
from ritornello.vllm.deferred import DeferredSaves, StepSaves, stale_blocks
from ritornello.vllm.identity import Identity
from ritornello.vllm.matching import Lease, Matcher, PrefixMatch, Prompt
from ritornello.vllm.metadata import IDLE, Load, Pages, Save, StepMetadata, WorkerReport
from ritornello.vllm.meter import Meter
from ritornello.vllm.settings import DEFAULT_OPTIONS, RequestOptions
from ritornello.vllm.store import VllmStore
from ritornello.vllm.weights.guard import WeightGuard

logger = logging.getLogger("vllm.ritornello")

# Covers the rest of the step that claims the pages and the load's own deadline; a waiting request
# whose leases are half used up is matched again.
LEASE_SECONDS = 60.0
# A load of more bytes a worker than this goes on beside the other requests: it would hold each of
# them up for longer than a step of its own takes.
ASYNC_LOAD_BYTES = 16 << 20
# A request is computed that has waited so long for its pages; the tiers are to say so before.
WAIT_SECONDS = 60.0


class Request(Protocol):
    """What is used of a vLLM request."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_computed_tokens: int
    skip_reading_prefix_cache: bool
    kv_transfer_params: Mapping[str, Any] | None


class BlockPool(Protocol):
    num_gpu_blocks: int
    null_block: Any

    def get_num_free_blocks(self) -> int: ...


class CacheManager(Protocol):
    """What is used of vLLM's KV cache manager."""

    block_pool: BlockPool

    def get_block_ids(self, request_id: str, /) -> Sequence[Sequence[int]]: ...
    def evict_blocks(self, block_ids: set[int], /) -> None: ...


class Step(Protocol):
    """What is used of a SchedulerOutput."""

    num_scheduled_tokens: Mapping[str, int]


@dataclass(slots=True)
class LeasedMatch:
    """What the store has of the `asked` tokens of a request, good until `until`. The engine itself
    had the first `local` tokens when it asked, and was told whether they come `asynchronous`.
    """

    found: PrefixMatch
    asked: int
    until: float
    local: int = 0
    asynchronous: bool = False


@dataclass(slots=True)
class RequestState:
    """`loading`: its blocks are being filled beside other requests. `failed`: a load of it did not
    bring everything. `wake`: the step at which it is to be looked at. `waits`: since when pages are
    on their way to where they can be claimed. `sources`: tokens that were claimed, by tier.
    `shares_failed_block`: another request recomputes a block of this one that failed to load.
    """

    request: Request
    options: RequestOptions = DEFAULT_OPTIONS
    match: LeasedMatch | None = None
    saved: list[int] = field(default_factory=list)
    loading: bool = False
    failed: bool = False
    wake: int = 0
    waits: float | None = None
    sources: dict[str, int] = field(default_factory=dict)
    shares_failed_block: bool = False

    @property
    def loads(self) -> bool:
        return self.options.loads and not self.failed and not self.request.skip_reading_prefix_cache


class SchedulerSide:
    """`asynchronous`: all loads go on beside the other requests, whatever their size. `has_remote`: the store is
    to know all keys of a prompt. `composed`: other connectors fill blocks too. `guard`: knows
    whether the weights changed.
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
        # Leases of loads that are under way: those of the last step, and those of requests.
        self._step_leases: list[Lease] = []
        self._async_leases: dict[str, list[Lease]] = {}
        # What loads that are under way were decided on.
        self._decisions: dict[str, Any] = {}
        # A request that gets one token a step fills a page every so many steps: it is looked at
        # then, and not in between. `due`: requests to look at in the next step in any case.
        self._step = 0
        self._wake: dict[int, list[str]] = {}
        self._due: list[str] = []
        self._cache: CacheManager | None = None
        # Block tables of a step that waits for loads: vLLM ends aborted requests before it reports
        # the outcome of their step, and leaves their blocks in its prefix cache.
        self._in_step: list[Sequence[Sequence[int]]] = []
        # Stands for blocks that a window has left behind.
        self._null = -1
        # Either ends hits and saves: a worker's for good (it says so once), the other until a
        # clean reset.
        self._worker_refused = False
        self._reset_unclean = False
        self._tokens = identity.alignment
        self._identity_sent = False
        self._async_load_tokens = (
            0 if asynchronous else ASYNC_LOAD_BYTES // _bytes_a_token(identity)
        )
        self._set_identity(identity)

    def bind(self, cache: CacheManager) -> None:
        self._cache = cache
        self._null = cache.block_pool.null_block.block_id

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the first `computed`, and whether beside other requests.
        None where they are on their way to a tier that can be loaded from: ask again.
        May be called many times for a request that waits; the store is asked again only when the
        answer may have changed. Whatever goes wrong here is a miss: nothing was promised yet. The
        calls below have promises to keep, and raise where they cannot.
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
                request, self._permitted(RequestOptions.parse(request.kv_transfer_params))
            )
            self._requests[request.request_id] = state
        state.loading = False
        if self._is_paused() or computed % self._tokens:
            return 0, False
        match = self._match_prefix(state, self._claimable(request), computed)
        if match is None:
            return (0 if state.waits is None else None), False
        tokens = max(match.found.tokens - computed, 0) if state.loads else 0
        slow = tokens > 0 and _outlasts_compute(match.found)
        match.local, match.asynchronous = computed, slow or tokens > self._async_load_tokens
        return tokens, match.asynchronous

    def _permitted(self, options: RequestOptions) -> RequestOptions:
        if not options.retain or self._store.permits_retention():
            return options
        self._meter.add("ignored_retentions", 1)
        return options.without_retention()

    def sources(self, request: Request, tokens: int) -> dict[str, int]:
        """Where the `tokens` that were claimed last come from, by tier; empty: from the store."""
        state = self._requests.get(request.request_id)
        if state is None or sum(state.sources.values()) != tokens:
            return {}
        return state.sources

    def request_admitted(
        self, request: Request, blocks: Sequence[Sequence[int]], external: int
    ) -> None:
        """The request has `blocks` (by part), `external` of its tokens to be loaded into them. Told
        a second time of a request that was loaded apart, when it begins to be computed.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        self._due.append(request.request_id)
        # Behind a load apart vLLM calls a second time, with the same blocks.
        if not request.num_computed_tokens:
            state.shares_failed_block = False
        if self._deferred is not None:
            self._deferred.drop_request(request.request_id)
        if state.loading and not external:
            state.loading = False
            return
        match, state.match = state.match, None
        # What the store lacks of the engine's own prefix is saved again with the rest.
        state.saved = list(match.found.stored) if match else [0] * len(self._parts)
        if state.options.retain:
            # A put of the last page that is there retains all before it.
            state.saved = [max(pages - 1, 0) for pages in state.saved]
        if match is None:
            return
        self._count(state, match, external)
        if not external:
            self._release(match.found.leases)
            return
        pages = self._to_load(request, blocks, match.local, match.local + external)
        state.sources = _by_tier(match.found, match.local, match.local + external)
        if self._store.wants_timings:
            self._decisions[request.request_id] = match.found.decision
        self._loads.append(Load(request.request_id, pages, match.asynchronous))
        if match.asynchronous:
            state.loading = True
            self._async_leases[request.request_id] = match.found.leases
        else:
            self._step_leases += match.found.leases

    def plan(self, step: Step) -> StepMetadata:
        """The loads and saves of the step that is about to run."""
        loads, self._loads = self._loads, []
        if self._read_only or self._is_paused():
            saves: Sequence[Save] = ()
            self._due.clear()
        else:
            saves = self._saves(step)
        waits = self._cache is not None and any(not load.asynchronous for load in loads)
        self._in_step = (
            [self._cache.get_block_ids(name) for name in step.num_scheduled_tokens]
            if waits and self._cache is not None
            else []
        )
        prefill = self._prefill(step) if self._store.wants_timings else None
        work = self._plan_deferred(step, saves)
        if not loads and not work.saves and prefill is None:
            if not work.number and not work.finished_sending:
                return IDLE
            return StepMetadata(step=work.number, finished_sending=work.finished_sending)
        news, self._identity_sent = None if self._identity_sent else self._identity, True
        covered = self._guard.covered if self._guard is not None and news is not None else b""
        return StepMetadata(
            news,
            loads,
            work.saves,
            prefill,
            work.number,
            work.finished_sending,
            covered=covered,
        )

    def request_finished(self, request_id: str) -> bool:
        """Answered or aborted. A load that is under way keeps its leases: it still reads. Returns
        whether vLLM must keep the blocks until a worker reports the request as sent.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return False
        self._drop_match(state)
        self._decisions.pop(request_id, None)
        if state.waits is not None:
            self._matcher.cancel_lookup(state.request.block_hashes, self._claimable(state.request))
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
        """What a step came to. `loaded`: requests whose load all workers have finished. `failed`:
        of those, requests whose load failed and whose blocks vLLM cannot name.
        """
        self._release(self._step_leases)
        for request_id in loaded:
            self._release(self._async_leases.pop(request_id, []))
        if report is not None:
            if self._guard is not None:
                self._guard.merge_counts(report.changes)
            if report.refusal:
                self._refuse(report.refusal)
            if self._store.wants_timings:
                self._store.record_timings(report, self._decisions)
            for request_id, part, first in report.unsaved:
                self._mark_unsaved(request_id, part, first)
            for request_id in report.failed:
                if request_id in self._requests:
                    self._requests[request_id].failed = True
        self._complete_deferred(report.step if report is not None else 0, invalid_blocks, failed)
        if invalid_blocks:
            self._evict_failed(invalid_blocks)

    def reset(self) -> bool:
        """From now on nothing stored before is found: a new random epoch. Where the engine's own
        cache was not emptied first (blocks are in use), its blocks belong to the old epoch and
        could be saved under the new one by mistake: then nothing is served until a reset that
        finds them all free.
        """
        self._set_identity(replace(self._identity, epoch=new_epoch()))
        for state in self._requests.values():
            self._drop_match(state)
        if self._deferred is not None:
            self._deferred.clear()
        pool = self._cache.block_pool if self._cache is not None else None
        # One block is vLLM's null block, never free.
        clean = pool is None or pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1
        self._reset_unclean = not clean
        if not clean:
            logger.warning(
                "ritornello: the cache was reset while blocks were in use; "
                "neither hits nor saves until a reset finds the engine idle"
            )
        return clean

    def on_caches_reset(self) -> None:
        """All caches of the engine are empty: nothing of weights before is left to be saved."""
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

    def _set_identity(self, identity: Identity) -> None:
        self._identity = identity
        self._parts = identity.parts
        self._matcher = Matcher(self._store, identity, LEASE_SECONDS)
        self._identity_sent = False

    def _claimable(self, request: Request) -> int:
        return min(request.num_tokens - 1, len(request.block_hashes) * self._identity.hash_tokens)

    def _match_prefix(
        self, state: RequestState, claimable: int, computed: int
    ) -> LeasedMatch | None:
        """Matches from the very first page, also what the engine has itself: one question tells
        what to load, what is missing before it, and keeps the prefix recent in the store.
        """
        match = state.match
        if match is not None and match.asked == claimable and monotonic() < match.until:
            return match
        self._drop_match(state)
        if claimable < self._tokens:
            return None
        now = monotonic()
        prompt = Prompt(computed, state.request.num_tokens, state.loads)
        found = self._matcher.find(state.request.block_hashes, claimable, prompt)
        since, state.waits = state.waits, None
        if found is None:
            return None
        if found.pending:
            since = now if since is None else since
            if state.loads and now - since < WAIT_SECONDS:
                state.waits = since
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

    def _to_load(
        self, request: Request, blocks: Sequence[Sequence[int]], local: int, end: int
    ) -> list[Pages]:
        """The pages from `local` to `end` tokens, of a window only those that are still needed."""
        loads = []
        for number, part in enumerate(self._parts):
            needed = part.needed(end)
            first = max(needed.start, local // part.page_tokens)
            if first < needed.stop:
                keys = self._matcher.keys(number, request.block_hashes, range(first, needed.stop))
                loaded = tuple(blocks[number][first : needed.stop])
                before = self._before(number, request.block_hashes, first)
                loads.append(Pages(number, first, keys, loaded, before))
        return loads

    def _before(self, number: int, hashes: Sequence[bytes], first: int) -> tuple[bytes, ...]:
        """Keys of the pages before this one that the store is to know."""
        if not first or self._parts[number].rule.reach is not None:
            return ()
        return self._matcher.keys(
            number, hashes, range(0 if self._has_remote else first - 1, first)
        )

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
            self._mark_unsaved(save.request, save.pages.part, save.pages.first)
        if result.stale and self._cache is not None:
            self._cache.evict_blocks(result.stale)

    def _mark_unsaved(self, request_id: str, part: int, first: int) -> None:
        """Marks the pages of a part from `first` on as unsaved."""
        state = self._requests.get(request_id)
        if state is not None and state.saved:
            state.saved[part] = min(state.saved[part], first)
            self._due.append(request_id)

    def _prefill(self, step: Step) -> tuple[int, int] | None:
        """Of a step that computes more than a token of one request only."""
        many = [(name, count) for name, count in step.num_scheduled_tokens.items() if count > 1]
        if len(many) != 1:
            return None
        state = self._requests.get(many[0][0])
        return None if state is None else (state.request.num_computed_tokens, many[0][1])

    def _saves(self, step: Step) -> Sequence[Save]:
        self._step += 1
        scheduled = step.num_scheduled_tokens
        due, self._due = self._due, []
        due += self._wake.pop(self._step, ())
        if {*scheduled.values()} != {1}:
            due += [request_id for request_id, tokens in scheduled.items() if tokens != 1]
        saves: list[Save] = []
        for request_id in dict.fromkeys(due):
            state = self._requests.get(request_id)
            if state is None or state.shares_failed_block:
                continue
            if state.options.stores and self._cache is not None:
                self._plan_saves_of(saves, state, scheduled.get(request_id, 0), self._cache)
        return saves

    def _plan_saves_of(
        self, saves: list[Save], state: RequestState, scheduled: int, cache: CacheManager
    ) -> None:
        """Whatever is full when the step is over, and when to look again."""
        request = state.request
        hashes, saved, retain = request.block_hashes, state.saved, state.options.retain
        computed = request.num_computed_tokens + scheduled
        # A page is full when its tokens are computed, and known (a hash covers them).
        full = min(computed, len(hashes) * self._identity.hash_tokens)
        until = time() + retain if retain else None
        blocks: Sequence[Sequence[int]] = ()
        # Parts whose pages are as long are named by the same keys.
        names: dict[tuple[int, int], tuple[bytes, ...]] = {}
        wait = self._tokens
        for number, part in enumerate(self._parts):
            size, first = part.page_tokens, saved[number]
            end = full // size
            if scheduled and end > first:
                saved[number] = end
                blocks = blocks or cache.get_block_ids(request.request_id)
                chained = part.rule.reach is None
                if not chained:
                    table = blocks[number]
                    while first < end and table[first] == self._null:
                        first += 1
                if first < end:
                    keys = names.get((size, first))
                    if keys is None:
                        keys = self._matcher.keys(number, hashes, range(first, end))
                        names[size, first] = keys
                    before = self._before(number, hashes, first)
                    pages = Pages(number, first, keys, tuple(blocks[number][first:end]), before)
                    saves.append(Save(request.request_id, pages, until))
            wait = min(wait, (saved[number] + 1) * size - computed)
        wake = self._step + max(wait, 1)
        if not self._step < state.wake <= wake:
            state.wake = wake
            self._wake.setdefault(wake, []).append(request.request_id)

    def _evict_failed(self, invalid_blocks: set[int]) -> None:
        """Takes blocks that failed to load, and all that were computed after them, out of the
        engine's prefix cache. vLLM recomputes them in place, but a request that is preempted or
        aborted before that would leave them to be found by the next one. If requests share such a
        block, vLLM recomputes it in one of them; pages of the others are not saved, because that
        request may be aborted first.
        """
        if self._cache is None:
            return
        tables = {name: self._cache.get_block_ids(name) for name in self._requests}
        stale = stale_blocks([*self._in_step, *tables.values()], invalid_blocks, self._null)
        self._cache.evict_blocks(stale)
        for request_id, state in self._requests.items():
            blocks = next(iter(tables[request_id]), ())
            index = next((i for i, block in enumerate(blocks) if block in stale), None)
            if index is not None:
                computed = state.request.num_computed_tokens
                shared = computed > index * self._parts[0].page_tokens
                state.shares_failed_block = state.shares_failed_block or shared

    def _count(self, state: RequestState, match: LeasedMatch, external: int) -> None:
        probed = max(match.asked - match.local, 0) // self._tokens
        hits = external // self._tokens
        self._meter.add("probed_pages", probed)
        self._meter.add("hit_pages", hits)
        if probed > hits:
            reason = "absent" if state.loads else "declined"
            if self._deferred is not None and not external and match.found.tokens > match.local:
                reason = "other_connector"  # earlier in MultiConnector's order
            self._meter.missed(reason, probed - hits)

    def _refuse(self, why: str) -> None:
        if not self._worker_refused:
            logger.warning("ritornello: %s; neither hits nor saves", why)
        self._worker_refused = True

    def _is_paused(self) -> bool:
        changed = self._guard is not None and self._guard.changed()
        return changed or self._worker_refused or self._reset_unclean


def _bytes_a_token(identity: Identity) -> int:
    """Of the KV a worker holds, about: what a token of the prefix costs to load."""
    total = sum(
        len(layers) * max(part.kv_heads // identity.ranks, 1) * part.head_bytes // part.page_tokens
        for part in identity.parts
        for layers in part.stages[:1]
    )
    return max(total, 1)


def _outlasts_compute(found: PrefixMatch) -> bool:
    """Whether loading takes longer than computing the rest, as far as anybody can tell."""
    estimate = getattr(found.decision, "estimate", None)
    return estimate is not None and estimate[0] > estimate[1]


def _by_tier(found: PrefixMatch, start: int, end: int) -> dict[str, int]:
    """Of tokens `start` to `end`, how many lie on each tier."""
    counts: dict[str, int] = {}
    at = 0
    for tier, pages in found.tiers:
        past = at + pages * found.page_tokens
        tokens = min(past, end) - max(at, start)
        if tokens > 0:
            counts[tier] = counts.get(tier, 0) + tokens
        at = past
    return counts
