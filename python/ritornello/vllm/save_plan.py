"""Plans the saves of each step: which pages of which requests are full and unsaved.

A request that computes one token per step fills its pages at predictable steps. A request is
examined for full pages at these steps, in steps that compute several of its tokens, and after its
blocks changed, a load failed, or a worker reported a save to repeat.

The saves travel to the workers with the step's metadata. After the forward pass a worker's `save`
(`worker`) submits one put for each object that this worker writes. `save` drops all saves of a step
if the weights changed, the layout is not supported, the KV memory is not registered yet, or a
synchronous load of the step failed (inside MultiConnector, `deferred` handles failed loads). In the
last two cases the saves are planned again.

Invariants:
* `RequestState.saved` has for each group of a request the number of its leading pages that are not
  planned again: they are stored, are being saved, or will not be saved. Until vLLM admits the
  request again, the number decreases only if a load of this or another connector failed, or if a
  worker reports a save to repeat.
* Inside MultiConnector a page is saved only after the outcome of the loads from which it was
  computed is known (`deferred`).
"""

from collections.abc import Collection, Mapping, Sequence
from time import time

from ritornello.vllm.deferred import DeferredSaves, StepSaves
from ritornello.vllm.epoch import Epoch
from ritornello.vllm.matching import Matcher
from ritornello.vllm.metadata import PageBlocks, Save
from ritornello.vllm.request_state import CacheManager, LeasedMatch, RequestState, Step


class SavePlan:
    """The requests to examine for full pages, by step. Advances `RequestState.saved` of `requests`,
    the requests of the scheduler's side. `composed`: the engine has other connectors, which fill
    blocks too.
    """

    def __init__(
        self,
        epoch: Epoch,
        matcher: Matcher,
        requests: Mapping[str, RequestState],
        *,
        read_only: bool,
        composed: bool,
    ) -> None:
        self._epoch = epoch
        self._matcher = matcher
        self._requests = requests
        self._read_only = read_only
        self._cache: CacheManager | None = None
        self._deferred = DeferredSaves() if composed else None
        self._step = 0
        self._wakes: dict[int, list[str]] = {}
        # Requests that are examined for full pages in the next step, however many of their tokens
        # it computes.
        self._due_requests: list[str] = []

    def bind_cache(self, cache: CacheManager) -> None:
        self._cache = cache

    def add_request(self, request_id: str) -> None:
        """Schedules a request for examination in the next step, and drops its deferred saves: its
        blocks may have changed.
        """
        self._due_requests.append(request_id)
        if self._deferred is not None:
            self._deferred.drop_request(request_id)

    def set_stored(self, state: RequestState, match: LeasedMatch | None) -> None:
        """Sets `RequestState.saved` to the pages that `match` found stored. Pages that the engine
        has and the store lacks are saved with the request's new pages.
        """
        state.saved = list(match.found.stored) if match else [0] * len(self._epoch.identity.groups)
        if state.options.retain:
            # The last stored page is put again, because a put with a retention protects the page
            # that it puts, and all pages before this page.
            state.saved = [max(pages - 1, 0) for pages in state.saved]

    def plan(self, step: Step) -> StepSaves:
        """Returns the saves that the workers execute with `step`: saves of pages that `step` or
        earlier steps fill.
        """
        paused, waits = self._epoch.is_paused(), self._epoch.awaits_memory()
        saves: list[Save] = []
        if self._read_only or (paused and not waits):
            self._due_requests.clear()
        elif paused:
            # Requests whose blocks change before all workers have registered their memory are kept,
            # and examined after the registration.
            due = dict.fromkeys(self._due_requests)
            self._due_requests = [name for name in due if name in self._requests]
        else:
            saves = self._full_pages(step.num_scheduled_tokens)
        if self._deferred is None or self._cache is None:
            return StepSaves(saves)
        if paused and not waits:
            self._deferred.clear()
        return self._deferred.plan(step, saves, self._cache)

    def complete_step(self, step: int, invalid: set[int], failed: Collection[str]) -> None:
        """Takes the outcome of the steps up to number `step`. Cancels all deferred saves of the
        requests that hold a block that failed to load, or a block computed after such a block, and
        of the requests in `failed`; marks the pages of these saves as unsaved; and evicts these
        blocks from vLLM's prefix cache. `invalid`: blocks that failed to load; `failed`: requests
        whose load failed, if vLLM cannot name the blocks. Does nothing outside MultiConnector.
        """
        if self._deferred is None:
            return
        result = self._deferred.complete_steps(step, invalid, failed)
        for save in result.dropped:
            self.mark_unsaved(save.request, save.pages.group, save.pages.first)
        if result.stale and self._cache is not None:
            self._cache.evict_blocks(result.stale)

    def mark_unsaved(self, request_id: str, group: int, first: int) -> None:
        """Marks the pages of a group, starting at `first`, as unsaved, so that they are saved
        again.
        """
        state = self._requests.get(request_id)
        if state is not None and state.saved:
            state.saved[group] = min(state.saved[group], first)
            self._due_requests.append(request_id)

    def keeps_blocks(self, request_id: str) -> bool:
        """Returns whether vLLM must keep the blocks of a finished request until each worker has
        reported, in `finished_sending`, that it no longer reads them.
        """
        if self._deferred is None or self._cache is None:
            return False
        return self._deferred.keeps_blocks(request_id, self._cache)

    def drop_deferred(self) -> None:
        if self._deferred is not None:
            self._deferred.clear()

    def _full_pages(self, scheduled: Mapping[str, int]) -> list[Save]:
        """Returns saves of the pages that are full after a step that computes `scheduled` tokens of
        each request.
        """
        self._step += 1
        due, self._due_requests = self._due_requests, []
        due += self._wakes.pop(self._step, ())
        if {*scheduled.values()} != {1}:
            due += [request_id for request_id, tokens in scheduled.items() if tokens != 1]
        saves: list[Save] = []
        for request_id in dict.fromkeys(due):
            state = self._requests.get(request_id)
            if state is None or state.shares_failed_block:
                continue
            if state.options.stores and self._cache is not None:
                self._add_saves(saves, state, scheduled.get(request_id, 0), self._cache)
        return saves

    def _add_saves(
        self, saves: list[Save], state: RequestState, scheduled: int, cache: CacheManager
    ) -> None:
        """Adds saves of the pages that are full after this step, and schedules the next
        examination.
        """
        request = state.request
        hashes, saved, retain = request.block_hashes, state.saved, state.options.retain
        computed = request.num_computed_tokens + scheduled
        # A page is full when its tokens are computed and a block hash covers them.
        full = min(computed, len(hashes) * self._epoch.identity.hash_tokens)
        until = time() + retain if retain else None
        blocks: Sequence[Sequence[int]] = ()
        # Keys by page length in tokens and first page: groups with equally long pages share them.
        names: dict[tuple[int, int], tuple[bytes, ...]] = {}
        wait = self._epoch.identity.alignment
        for number, group in enumerate(self._epoch.identity.groups):
            size, first = group.page_tokens, saved[number]
            end = full // size
            if scheduled and end > first:
                saved[number] = end
                blocks = blocks or cache.get_block_ids(request.request_id)
                chained = group.reach.tokens is None
                if not chained:
                    # vLLM puts the null block in place of blocks outside a window.
                    table, null = blocks[number], cache.block_pool.null_block.block_id
                    while first < end and table[first] == null:
                        first += 1
                if first < end:
                    keys = names.get((size, first))
                    if keys is None:
                        keys = self._matcher.keys(number, hashes, range(first, end))
                        names[size, first] = keys
                    before = self._matcher.keys_before(number, hashes, first)
                    pages = PageBlocks(
                        number, first, keys, tuple(blocks[number][first:end]), before
                    )
                    saves.append(Save(request.request_id, pages, until))
            wait = min(wait, (saved[number] + 1) * size - computed)
        wake = self._step + max(wait, 1)
        if not self._step < state.wake_step <= wake:
            state.wake_step = wake
            self._wakes.setdefault(wake, []).append(request.request_id)
