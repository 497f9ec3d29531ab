"""Plans the loads of each step: the stored pages that a request may load, and leases on them.

Invariants:
* A page is claimed, that is promised to vLLM as loadable, only under a lease. A lease is released
  when the step that waits for the load has ended, when all workers have ended an asynchronous load,
  or when the claim is dropped before its load. A lease that is not released expires.
* The last token of a request is never claimed: the engine must compute one token to answer.
* A request whose load failed computes the remaining tokens, and loads nothing further.
* Tokens count as loaded instead of computed when all workers have reported their load, and none of
  them a failure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ritornello.connector.meter import Meter
from ritornello.vllm.decisions import DecisionLog
from ritornello.vllm.epoch import Epoch
from ritornello.vllm.identity import Identity
from ritornello.vllm.matching import Matcher, PrefixMatch
from ritornello.vllm.metadata import Load, PageBlocks, WorkerReport
from ritornello.vllm.request_state import LeasedMatch, Request, RequestState
from ritornello.vllm.store import Lease, PromptLength, VllmStore

# Duration of a lease. A claim is valid for half of this time; after that a request that still waits
# is looked up again. When a load is planned, its lease therefore lasts for at least the other half.
# The deadline of a load is 10 seconds, and up to 60 for a long load (`Store.time_limit`).
LEASE_SECONDS = 60.0
# A load that reads more than this number of bytes for each worker is asynchronous: if a step waited
# for it, the other requests of the step would be delayed by more than the usual time of a step.
ASYNC_LOAD_BYTES = 16 << 20
# Maximum time that a request waits for the answer of a remote and for pages that a tier is
# fetching; the tiers' own limits are expected to end the wait earlier.
WAIT_SECONDS = 60.0
NO_REPORT = WorkerReport()


@dataclass(slots=True)
class LoadInProgress:
    """A load of `tokens` tokens after the first `before`. `seconds`: the longest time that a worker
    has reported; None before the first report. `failed`: a worker reported that it failed, wholly
    or in part.
    """

    before: int
    tokens: int
    asynchronous: bool
    seconds: float | None = None
    failed: bool = False


class LoadPlan:
    """Claims and loads of one engine. `asynchronous`: all loads are asynchronous, even small loads.
    `composed`: the engine has other connectors, which load too.
    """

    def __init__(
        self,
        store: VllmStore,
        epoch: Epoch,
        matcher: Matcher,
        decision_log: DecisionLog,
        meter: Meter,
        *,
        asynchronous: bool,
        composed: bool,
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._matcher = matcher
        self._decision_log = decision_log
        self._meter = meter
        self._composed = composed
        self._async_load_tokens = (
            0 if asynchronous else ASYNC_LOAD_BYTES // _bytes_per_token(epoch.identity)
        )
        self._loads: list[Load] = []
        # Leases of loads in progress: leases of the last step, and leases of asynchronous loads by
        # request.
        self._step_leases: list[Lease] = []
        self._async_leases: dict[str, list[Lease]] = {}
        # The gate's decisions on loads in progress, by request.
        self._decisions: dict[str, Any] = {}
        # Loads whose tokens are not counted yet, by request. All synchronous loads here are of the
        # last step.
        self._in_progress: dict[str, LoadInProgress] = {}

    def claim(self, state: RequestState, computed: int) -> tuple[int | None, bool]:
        """Returns the tokens that can be loaded beyond the first `computed`, and whether
        asynchronously. The number is None while a remote has not answered, or while pages are
        being copied to a tier from which they can be loaded.
        """
        match = self._match_prefix(state, computed)
        if match is None:
            return (0 if state.waiting_since is None else None), False
        tokens = max(match.found.tokens - computed, 0) if state.loads else 0
        self._decision_log.record_match(state, match.found, match.looked_up, computed, tokens)
        slow = tokens > 0 and _loads_slower_than_computing(match.found)
        match.local_tokens, match.asynchronous = computed, slow or tokens > self._async_load_tokens
        return tokens, match.asynchronous

    def admit(
        self,
        state: RequestState,
        match: LeasedMatch,
        blocks: Sequence[Sequence[int]],
        external: int,
    ) -> None:
        """Adds the load of `external` claimed tokens into `blocks` (by group); releases the claim
        if `external` is 0.
        """
        self._count_hits(state, match, external)
        if not external:
            self._release(match.found.leases)
            return
        start, end = match.local_tokens, match.local_tokens + external
        name = state.request.request_id
        pages = self._pages_to_load(state.request, blocks, start, end)
        state.sources = _tokens_by_tier(match.found, start, end)
        if self._store.wants_timings:
            self._decisions[name] = match.found.decision
        self._loads.append(Load(name, pages, match.asynchronous))
        self._in_progress[name] = LoadInProgress(start, external, match.asynchronous)
        if match.asynchronous:
            state.loading = True
            self._async_leases[name] = match.found.leases
        else:
            self._step_leases += match.found.leases

    def take_loads(self) -> list[Load]:
        """Returns the loads of the step that is about to run."""
        loads, self._loads = self._loads, []
        return loads

    def complete_step(self, report: WorkerReport | None, loaded: Collection[str]) -> None:
        """Releases the leases of ended loads, and counts their tokens. `loaded`: requests whose
        asynchronous load ended on all workers.
        """
        self._release(self._step_leases)
        for request_id in loaded:
            self._release(self._async_leases.pop(request_id, []))
        if report is not None and self._store.wants_timings:
            self._store.record_timings(report, self._decisions)
        self._count_loaded(report, loaded)

    def drop_match(self, state: RequestState) -> None:
        match, state.match = state.match, None
        if match is not None:
            self._release(match.found.leases)

    def end_request(self, state: RequestState) -> None:
        """Ends the claims of a request. A load in progress keeps its leases, because it still
        reads.
        """
        self.drop_match(state)
        name = state.request.request_id
        self._decisions.pop(name, None)
        # A synchronous load is not removed here: its request may end with the step that waits for
        # the load, and the report of the load follows.
        if name in self._in_progress and self._in_progress[name].asynchronous:
            del self._in_progress[name]
        if state.waiting_since is not None:
            self._matcher.cancel_lookup(
                state.request.block_hashes, self._claimable_tokens(state.request)
            )

    def close(self) -> None:
        for leases in (self._step_leases, *self._async_leases.values()):
            self._release(leases)

    def _claimable_tokens(self, request: Request) -> int:
        return min(
            request.num_tokens - 1, len(request.block_hashes) * self._epoch.identity.hash_tokens
        )

    def _match_prefix(self, state: RequestState, computed: int) -> LeasedMatch | None:
        """Looks up all pages of the request, also pages that the engine's own cache holds: one call
        finds the pages to load and the pages that are not stored, and counts as a use of the whole
        prefix. Returns None if the request has no whole page to load, if the lookup failed, or if
        the lookup must be repeated; only in the last case `RequestState.waiting_since` is set.
        """
        claimable, match = self._claimable_tokens(state.request), state.match
        if match is not None and match.looked_up == claimable and monotonic() < match.valid_until:
            return match
        self.drop_match(state)
        if claimable < self._epoch.identity.alignment:
            self._decision_log.record_without_match(state, "too_short", claimable)
            return None
        now = monotonic()
        prompt = PromptLength(computed, state.request.num_tokens, state.loads)
        found = self._matcher.lookup(state.request.block_hashes, claimable, prompt)
        waiting_since, state.waiting_since = state.waiting_since, None
        if found is None:
            self._decision_log.record_without_match(state, "failed", claimable)
            return None
        if found.pending:
            waiting_since = now if waiting_since is None else waiting_since
            if state.loads and now - waiting_since < WAIT_SECONDS:
                state.waiting_since = waiting_since
                self._decision_log.record_without_match(state, "waiting", claimable)
                return None
        state.match = LeasedMatch(found, claimable, now + LEASE_SECONDS / 2)
        return state.match

    def _release(self, leases: list[Lease]) -> None:
        while leases:
            self._store.release(leases.pop())

    def _pages_to_load(
        self, request: Request, blocks: Sequence[Sequence[int]], local: int, end: int
    ) -> list[PageBlocks]:
        """Returns the pages from `local` to `end` tokens; of a group with a window only the pages
        that are needed to continue after `end` tokens.
        """
        loads = []
        for number, group in enumerate(self._epoch.identity.groups):
            needed = group.needed(end)
            first = max(needed.start, local // group.page_tokens)
            if first < needed.stop:
                keys = self._matcher.keys(number, request.block_hashes, range(first, needed.stop))
                loaded = tuple(blocks[number][first : needed.stop])
                before = self._matcher.keys_before(number, request.block_hashes, first)
                loads.append(PageBlocks(number, first, keys, loaded, before))
        return loads

    def _count_loaded(self, report: WorkerReport | None, loaded: Collection[str]) -> None:
        """Counts the tokens of the loads that ended. A load that failed, wholly or in part, counts
        no tokens, only its time.
        """
        if not self._in_progress:
            return
        report = report or NO_REPORT
        for name, seconds in report.load_seconds.items():
            if (load := self._in_progress.get(name)) is not None:
                load.seconds = max(load.seconds or 0.0, seconds)
                load.failed = load.failed or name in report.failed
        for name, load in [*self._in_progress.items()]:
            if load.asynchronous and name not in loaded:
                continue
            del self._in_progress[name]
            if load.seconds is not None:
                tokens = 0 if load.failed else load.tokens
                self._store.note_prefill_avoided(load.before, tokens, load.seconds)

    def _count_hits(self, state: RequestState, match: LeasedMatch, external: int) -> None:
        """Counts the looked up pages that the engine lacked, of `Identity.alignment` tokens each:
        hits, and misses by reason.
        """
        page, found, local = self._epoch.identity.alignment, match.found, match.local_tokens
        probed = max(match.looked_up - local, 0) // page
        hits = external // page
        self._meter.add("probed_pages", probed)
        self._meter.add("hit_pages", hits)
        missed, reason = probed - hits, "not_found" if state.loads else "opted_out"
        if self._composed and not external and found.tokens > local:
            reason = "other_connector"  # MultiConnector loads the pages by another connector
        elif state.loads:
            first = max(local + external, found.whole)
            declined = max(found.declined_end - first, 0) // page
            self._meter.missed("declined", declined)
            missed -= declined
        if missed > 0:
            self._meter.missed(reason, missed)


def _bytes_per_token(identity: Identity) -> int:
    """Returns the bytes that a worker of the first pipeline stage reads to load one token: rounded
    down for each KV cache group, at least 1.
    """
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
    """Returns whether the gate estimates that the load takes longer than computing the tokens after
    the loaded pages; False without an estimate.
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
