"""Records what the tier decides about the chunks (pages of vLLM's host tier) of each request, for
`ritornello explain`.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ritornello.vllm.engine_config import has_no_keys
from ritornello.vllm.tier.requests import RecordedDecision, RequestState
from ritornello.vllm.tier.sequence import Context, Group, chunk_number
from ritornello.vllm.tier.store import ChunkStore

if TYPE_CHECKING:
    from ritornello._core import DecisionOutcome, Lookup, Scope


class DecisionLog:
    """Records one decision for each lookup of the leading chunks of a prompt, in groups with full
    attention. A lookup begins at the first chunk that vLLM lacks. Chunks whose position in the
    prompt is not known have no decisions. Records also a decision for each prompt that is shorter
    than a chunk, about which vLLM asks nothing.

    vLLM repeats the lookups of waiting requests. A decision is not recorded if it equals the last
    decision about its request and group, or if the last decision covers it
    (`RecordedDecision.covers`). A failure is counted, and not raised.

    vLLM's lookup thread may call `record_lookup` at any time. A decision may therefore be recorded
    twice. Calls from this thread read the position of one key, and do not iterate over positions,
    which vLLM may be changing.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        # Requests that vLLM has not scheduled yet.
        self._unscheduled: dict[str, Context] = {}

    def begin_request(self, context: Context) -> None:
        self._unscheduled[context.req_id] = context

    def end_request(self, request: str) -> None:
        self._unscheduled.pop(request, None)

    def record_scheduled(self, requests: Collection[str], scope: "Scope") -> None:
        """Records which of `requests`, which vLLM has scheduled for the first time, have no
        complete chunk. Before the end of the step vLLM records the keys of all complete chunks of
        these requests.
        """
        for request in requests:
            context = self._unscheduled.pop(request, None)
            if context is not None and has_no_keys(context):
                try:
                    self._store.note_decision(
                        request,
                        scope,
                        (),
                        "too_short",
                        found=0,
                        loaded=0,
                        detail="",
                        estimate=None,
                    )
                except Exception as error:
                    self._store.record_failure("note_decision", error)

    def record_lookup(
        self,
        state: RequestState,
        context: Context,
        group: Group,
        scope: "Scope",
        keys: Sequence[bytes],
        *,
        start: int = 0,
        found: int = 0,
        offered: int = 0,
        lookup: "Lookup | None" = None,
        without_result: "DecisionOutcome | None" = None,
    ) -> None:
        """Records that a lookup of `keys` from number `start` on has found `found` chunks, of which
        it offers `offered` to vLLM; a chunk whose load failed, and the chunks after it, count as
        not offered. `lookup`: the answer of a cache, which has the estimates of its gate.
        `without_result`: the outcome of a lookup that has no result.
        """
        if not group.chained:
            return
        try:
            if chunk_number(context, keys[start], group) is None:
                return
            detail = ""
            if state.failed:
                for place in range(start, start + offered):
                    if keys[place] in state.failed:
                        offered, detail = place - start, "load_failed"
                        break
            outcome: DecisionOutcome = "loaded" if offered else "declined" if found else "missed"
            after = start + offered
            decision = RecordedDecision(
                without_result or outcome,
                keys[start],
                found,
                offered,
                detail,
                keys[after] if after < len(keys) else None,
            )
            if self._is_new(state, group, decision):
                estimate = None if lookup is None else lookup.alternatives
                named = keys[start:] if start else keys
                self._record(state, context, group, scope, decision, named, estimate)
        except Exception as error:  # a failed record stops no load
            self._store.record_failure("note_decision", error)

    def record_refusal(
        self,
        state: RequestState,
        context: Context,
        group: Group,
        scope: "Scope",
        key: bytes,
        reason: str,
    ) -> None:
        """Records that `key`, and thereby the chunks after it, must not be loaded."""
        self._record_at(state, context, group, scope, key, "not_cacheable", reason)

    def record_shared_miss(
        self, state: RequestState, context: Context, group: Group, scope: "Scope", key: bytes
    ) -> None:
        """Records that `key` was not found by a lookup on vLLM's lookup thread. vLLM gives the
        answer of one such lookup to all requests that ask for the chunk. Records nothing if the
        lookup was made for this request, because `record_lookup` has recorded its result.
        """
        last = state.recorded.get(group.number)
        if last is None or key not in (last.first, last.next):
            self._record_at(state, context, group, scope, key, "missed")

    def _record_at(
        self,
        state: RequestState,
        context: Context,
        group: Group,
        scope: "Scope",
        key: bytes,
        outcome: "DecisionOutcome",
        detail: str = "",
    ) -> None:
        """Records a decision about `key` and the chunks after it, none of which is loaded."""
        if not group.chained:
            return
        try:
            if chunk_number(context, key, group) is None:
                return
            decision = RecordedDecision(outcome, key, 0, 0, detail, key)
            if self._is_new(state, group, decision):
                keys = state.sequences[group.number].following(context, key)
                self._record(state, context, group, scope, decision, keys, None)
        except Exception as error:
            self._store.record_failure("note_decision", error)

    @staticmethod
    def _is_new(state: RequestState, group: Group, decision: RecordedDecision) -> bool:
        last = state.recorded.get(group.number)
        return last is None or not (decision == last or last.covers(decision))

    def _record(
        self,
        state: RequestState,
        context: Context,
        group: Group,
        scope: "Scope",
        decision: RecordedDecision,
        keys: Sequence[bytes],
        estimate: tuple[float, float] | None,
    ) -> None:
        state.recorded[group.number] = decision
        self._store.note_decision(
            context.req_id,
            scope,
            keys,
            decision.outcome,
            found=decision.found,
            loaded=decision.loaded,
            detail=decision.detail,
            estimate=estimate,
        )
