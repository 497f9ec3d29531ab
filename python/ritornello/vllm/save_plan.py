"""Plans the saves of each step: which pages of which requests are full and unsaved.

With one token per step, a request fills a page at predictable steps: it is examined at those steps
only, and in steps that compute several of its tokens.
"""

from collections.abc import Mapping, Sequence
from time import time

from ritornello.vllm.identity import Identity
from ritornello.vllm.matching import Matcher
from ritornello.vllm.metadata import PageBlocks, Save
from ritornello.vllm.request_state import CacheManager, RequestState


class SavePlan:
    """The requests to examine, by step. Advances `RequestState.saved`."""

    def __init__(self, identity: Identity, matcher: Matcher) -> None:
        self._step = 0
        self._wakes: dict[int, list[str]] = {}
        # Examined in the next step in any case.
        self._due_requests: list[str] = []
        # Block number that vLLM puts in place of blocks outside a window.
        self._null_block = -1
        self.set_identity(identity, matcher)

    def set_identity(self, identity: Identity, matcher: Matcher) -> None:
        self._identity = identity
        self._matcher = matcher

    def set_null_block(self, block: int) -> None:
        self._null_block = block

    def add_due(self, request_id: str) -> None:
        """Examines the request in the next step."""
        self._due_requests.append(request_id)

    def clear_due(self) -> None:
        self._due_requests.clear()

    def plan(
        self,
        scheduled: Mapping[str, int],
        requests: Mapping[str, RequestState],
        cache: CacheManager | None,
    ) -> Sequence[Save]:
        """Returns the saves of a step that computes `scheduled` tokens of each request."""
        self._step += 1
        due, self._due_requests = self._due_requests, []
        due += self._wakes.pop(self._step, ())
        if {*scheduled.values()} != {1}:
            due += [request_id for request_id, tokens in scheduled.items() if tokens != 1]
        saves: list[Save] = []
        for request_id in dict.fromkeys(due):
            state = requests.get(request_id)
            if state is None or state.shares_failed_block:
                continue
            if state.options.stores and cache is not None:
                self._add_saves(saves, state, scheduled.get(request_id, 0), cache)
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
        full = min(computed, len(hashes) * self._identity.hash_tokens)
        until = time() + retain if retain else None
        blocks: Sequence[Sequence[int]] = ()
        # Groups with equally long pages share their keys.
        names: dict[tuple[int, int], tuple[bytes, ...]] = {}
        wait = self._identity.alignment
        for number, group in enumerate(self._identity.groups):
            size, first = group.page_tokens, saved[number]
            end = full // size
            if scheduled and end > first:
                saved[number] = end
                blocks = blocks or cache.get_block_ids(request.request_id)
                chained = group.rule.reach is None
                if not chained:
                    table = blocks[number]
                    while first < end and table[first] == self._null_block:
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
