"""Answers vLLM's lookups of chunks (pages of its host tier) if our tier is a cache over several
tiers.

Invariants:
* A lookup names all chunks of its prompt from the first, also chunks that vLLM already has, because
  a remote packs chunks into objects by their position in the prompt. `Prompt.computed` tells the
  gate how many tokens vLLM has. A chunk is looked up alone if vLLM has not recorded its position,
  or the position of a chunk before it. In a group with a window, a lookup names the chunks of one
  window.
* While the remote is asked, or chunks are fetched from it, the answer is `PENDING`, and vLLM
  repeats the lookup in a later step. The cache's prefetch policy limits this time.
* vLLM searches for a complete window, and begins with the window at the end of the found prefix.
  While the answer for a window is pending, vLLM asks for earlier windows in the same step. Each
  lookup on the remote fetches its window, although one complete window is enough. Therefore one
  window is looked up first. If it is incomplete, the two windows before it are looked up
  concurrently, then four, and so on. A window whose last chunk is missing is not looked up again
  for the request, until the request is preempted.
* After the answer for the first window, lookups of further windows begin on the remote for
  `WINDOWS_SECONDS` only, and each waits as long as the prefetch policy permits; with "best_effort"
  further windows are looked up on this machine only. An incomplete window is later looked up on
  this machine only.
* The gate decides once per request, until the request is preempted: later lookups promise no chunk
  after the chunks that the gate chose. Otherwise the gate would decide about the refused chunks
  again in each step in which the request waits for its loads.
* When an answer is used, its leases are handed to the request or, if the answer about leading
  chunks is a miss, released. Leases of an answer that is not used are released at the latest when
  its request ends.
"""

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from ritornello.connector.meter import Meter
from ritornello.vllm.tier.cache import Found, Prompt, TierCache
from ritornello.vllm.tier.decisions import DecisionLog
from ritornello.vllm.tier.requests import (
    Decision,
    LookupAnswer,
    PromptLookup,
    RequestState,
    WindowSearch,
)
from ritornello.vllm.tier.sequence import Context, Group, chunk_number, group_of

if TYPE_CHECKING:
    from ritornello._core import Lookup, Scope

# Maximum time that the scheduler waits for a lookup: longer than a lookup takes in the process that
# owns the disk tier, or over the socket of an owner that responds. After a lookup that took longer,
# the scheduler waits for no lookup until an answer arrives.
ANSWER_SECONDS = 0.005
# Minimum time between two lookups of a prompt that is being fetched.
POLL_SECONDS = 0.002
# Time after the answer for the first window after which no further windows are looked up on the
# remote.
WINDOWS_SECONDS = 1.0


class CacheLookups:
    """Lookups of all requests. `groups` returns the KV cache groups; `row_bytes`: the bytes of one
    chunk of one group.
    """

    def __init__(
        self,
        cache: TierCache,
        groups: Callable[[], Sequence[Group]],
        row_bytes: int,
        meter: Meter,
        decisions: DecisionLog,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._row_bytes = row_bytes
        self._meter = meter
        self._decisions = decisions
        # Whether a lookup took longer than `ANSWER_SECONDS`, and no answer has arrived since.
        self._slow = False
        self._step = 0

    def find(
        self, state: RequestState, group: Group, scope: "Scope", key: bytes, context: Context
    ) -> LookupAnswer:
        """Returns whether the request may load the chunk, and leases all chunks of the prompt that
        the request may load. `PENDING`: repeat the lookup in a later step.
        """
        number = chunk_number(context, key, group)
        asked = self._lookup_of(state, group, scope, key, number, context)
        if asked.end is not None and number is not None and number >= asked.end:
            return LookupAnswer.MISS
        search = None if group.chained else self._search_of(state, group, key)
        # In each step vLLM first looks up the first chunk that it lacks. If the answer is pending,
        # so is the answer for every further chunk in this step.
        if asked.pending_in == self._step or (
            search is not None and self._waits(state, search, key)
        ):
            return LookupAnswer.PENDING
        if asked.call is None:
            if asked.pending and monotonic() < asked.next_at:
                return self._pend(state, asked, search)
            computed = (number or 0) * asked.prompt.chunk_tokens
            asked.prompt = asked.prompt._replace(computed=computed)
            if search is not None and not asked.pending:
                is_late = key != search.first and monotonic() >= search.until
                asked.prompt = asked.prompt._replace(is_local=is_late or asked.incomplete)
            asked.started = perf_counter()
            asked.call = None if self._cache.broken else self._cache.submit_lookup(asked.prompt)
            if asked.call is None:
                self._record(state, asked, number or 0, group, context, without_result="failed")
                return LookupAnswer.MISS
            if not self._slow:
                self._slow = not asked.call.wait(ANSWER_SECONDS)
        if not asked.call.is_done():
            return self._pend(state, asked, search)
        self._slow = False
        found, asked.call = asked.call.value, None
        self._meter.add("lookups")
        self._meter.add("lookup_seconds", perf_counter() - asked.started)
        return self._answer(state, asked, search, found, key, number or 0, group, context)

    def _search_of(self, state: RequestState, group: Group, key: bytes) -> WindowSearch:
        search = state.searches.get(group.number)
        if search is None:
            # With "best_effort" no answer is pending, so all windows are looked up in one step, and
            # each window that is looked up on the remote is fetched. Therefore only the first
            # window is looked up on the remote.
            until = inf if self._cache.waits_for_remote else 0.0
            search = state.searches[group.number] = WindowSearch(key, until)
        if search.step != self._step:
            search.step, search.pending = self._step, 0
            search.keys.clear()
        return search

    def _waits(self, state: RequestState, search: WindowSearch, key: bytes) -> bool:
        """Returns whether `key`, the last chunk of a window, is not looked up in this step: because
        the lookup of a chained group, which decides where the window must end, is pending; because
        a pending window contains `key`; or because the next round of windows must not begin yet.
        """
        if state.prefix_pending_in == self._step or key in search.keys:
            return True
        # Windows are looked up in rounds of 1, 2, 4, ... windows. A round begins when all windows
        # of the rounds before it are incomplete. `begun`: windows of the begun rounds.
        begun = (1 << (search.incomplete + 1).bit_length()) - 1
        return search.pending + search.incomplete >= begun

    def _pend(
        self, state: RequestState, asked: PromptLookup, search: WindowSearch | None
    ) -> LookupAnswer:
        asked.pending_in = self._step
        if search is not None:
            search.pending += not asked.incomplete
            search.keys.update(asked.keys)
        elif asked.prompt.chunk_tokens:
            state.prefix_pending_in = self._step
        return LookupAnswer.PENDING

    def end_step(self) -> None:
        self._step += 1

    def forget(self, state: RequestState) -> None:
        """Cancels the pending lookups of a request, and forgets its decisions."""
        for asked in state.prompts.values():
            self._abandon(asked)
        state.prompts.clear()
        state.searches.clear()
        state.prefix_pending_in = -1

    def take_decision(self, state: RequestState, keys: Sequence[bytes]) -> "Lookup | None":
        """Returns the gate's decision for a load of `keys`, if the load has all chunks that the
        gate chose. Each chained group of a prompt has a decision, which estimates the load of all
        chained groups (`Prompt.chunk_bytes`), so one decision is returned.
        """
        chosen: Lookup | None = None
        for name, asked in state.prompts.items():
            decision, asked.decision = asked.decision, None
            if chosen is None and decision is not None and isinstance(name, int):
                loaded = sum(group_of(key) == name for key in keys)
                if loaded == decision.end - decision.first:
                    chosen = decision.lookup
        return chosen

    def _lookup_of(
        self,
        state: RequestState,
        group: Group,
        scope: "Scope",
        key: bytes,
        number: int | None,
        context: Context,
    ) -> PromptLookup:
        """Returns the lookup that answers for `key`: a new lookup if there was none, if the scope
        changed, or if vLLM has recorded further keys of the request.
        """
        sequence = state.sequences[group.number]
        name: int | bytes = group.number
        keys = sequence.leading(context)
        if not group.chained:
            # vLLM looks up a window from its end, so the last chunk of the window names the lookup.
            name, keys = key, sequence.window(context, key)
        elif number is None or number >= len(keys):
            name, keys = key, (key,)
        asked = state.prompts.get(name)
        if asked is not None and asked.prompt.scope is scope and len(asked.keys) == len(keys):
            return asked
        if asked is not None:
            self._abandon(asked)
        prompt = Prompt(scope, keys)
        if group.chained and name == group.number:
            prompt = prompt._replace(
                tokens=len(keys) * group.chunk_tokens,
                chunk_tokens=group.chunk_tokens,
                chunk_bytes=self._chunk_bytes(group),
            )
        asked = state.prompts[name] = PromptLookup(keys, prompt)
        return asked

    def _chunk_bytes(self, group: Group) -> int:
        """Returns the sum of the bytes of a chunk of `group` and the bytes of the chunks that the
        other chained groups have for the same tokens.
        """
        tokens = sum(
            group.chunk_tokens / each.chunk_tokens for each in self._groups() if each.chained
        )
        return int(self._row_bytes * tokens)

    def _answer(
        self,
        state: RequestState,
        asked: PromptLookup,
        search: WindowSearch | None,
        found: Found | None,
        key: bytes,
        number: int,
        group: Group,
        context: Context,
    ) -> LookupAnswer:
        if found is None:  # the cache failed
            state.answers[key] = False
            self._record(state, asked, number, group, context, without_result="failed")
            return LookupAnswer.MISS
        lookup, keys = found.lookup, asked.keys
        asked.pending = lookup.state != "ready"
        if asked.pending:
            asked.next_at = monotonic() + POLL_SECONDS
            self._record(state, asked, number, group, context, without_result="waiting")
            return self._pend(state, asked, search)
        if found.present is not None:
            state.answers.update(zip(keys, found.present, strict=True))
            if not state.answers.get(key):
                asked.end = 0
            if search is not None and not asked.incomplete and not all(found.present):
                asked.incomplete = True
                search.incomplete += 1
                search.until = min(search.until, monotonic() + WINDOWS_SECONDS)
        else:
            first = number if asked.prompt.chunk_tokens else 0
            end = lookup.load if asked.end is None else min(lookup.load, asked.end)
            if asked.prompt.chunk_tokens and lookup.estimate:
                asked.end = end
                asked.decision = Decision(lookup, first, end)
            for place in range(first, len(keys)):
                state.answers[keys[place]] = place < end
            self._record(
                state,
                asked,
                number,
                group,
                context,
                found=max(lookup.local - first, 0),
                offered=max(end - first, 0),
                lookup=lookup,
            )
        answer = LookupAnswer.HIT if state.answers.get(key) else LookupAnswer.MISS
        if answer is LookupAnswer.MISS and found.present is None:
            for lease in lookup.leases:
                self._cache.release(lease)
        else:
            state.leases.extend(lookup.leases)
        return answer

    def _record(
        self,
        state: RequestState,
        asked: PromptLookup,
        number: int,
        group: Group,
        context: Context,
        **result: Any,
    ) -> None:
        """Records the `result` of a lookup of leading chunks. vLLM has `number` leading chunks."""
        if asked.prompt.chunk_tokens:
            self._decisions.record_lookup(
                state, context, group, asked.prompt.scope, asked.keys, start=number, **result
            )

    def _abandon(self, asked: PromptLookup) -> None:
        if asked.call is not None or asked.pending:
            self._cache.abandon(asked.prompt, asked.call)
            asked.call = None
