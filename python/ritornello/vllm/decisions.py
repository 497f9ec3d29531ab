"""Records the decisions about the pages of each request, for `ritornello explain`."""

from typing import TYPE_CHECKING

from ritornello.vllm.epoch import Epoch
from ritornello.vllm.matching import Matcher, PrefixMatch
from ritornello.vllm.request_state import RequestState
from ritornello.vllm.store import VllmStore

if TYPE_CHECKING:
    from ritornello._core import DecisionOutcome


class DecisionLog:
    """The decisions of one engine. vLLM repeats its call for a waiting request; a decision that
    equals the last decision about its request is not recorded again. Decisions name the pages by
    the keys and the scope of the first of the objects that are looked up first
    (`Matcher.first_bundle`). A failure is counted, and not raised.
    """

    def __init__(self, store: VllmStore, epoch: Epoch, matcher: Matcher) -> None:
        self._store = store
        self._epoch = epoch
        self._matcher = matcher

    def record_match(
        self, state: RequestState, match: PrefixMatch, looked_up: int, computed: int, tokens: int
    ) -> None:
        """Records the result of a lookup of the first `looked_up` tokens of a request, of which the
        engine has `computed` and loads the next `tokens`.
        """
        try:
            outcome, found, detail = self._outcome(state, match, looked_up, computed, tokens)
            loaded = tokens // self._matcher.first_bundle.page_tokens
            estimate = None if match.decision is None else match.decision.alternatives
            self._record(state, outcome, looked_up, found, loaded, detail, estimate)
        except Exception as error:  # a failed record stops no load
            self._store.record_failure("note_decision", error)

    def record_without_match(
        self, state: RequestState, outcome: "DecisionOutcome", tokens: int, detail: str = ""
    ) -> None:
        """Records that a lookup of the first `tokens` tokens of a request has no result, or why
        they were not looked up.
        """
        try:
            self._record(state, outcome, tokens, 0, 0, detail, None)
        except Exception as error:
            self._store.record_failure("note_decision", error)

    def _outcome(
        self, state: RequestState, match: PrefixMatch, looked_up: int, computed: int, tokens: int
    ) -> "tuple[DecisionOutcome, int, str]":
        """Returns the outcome of a lookup, the number of found pages, and the detail."""
        size = self._matcher.first_bundle.page_tokens
        # `present` is 0 in a model without full attention.
        found = max(match.present, match.tokens // size)
        outcome: DecisionOutcome = "missed"
        detail = ""
        if not state.loads:
            outcome, detail = "not_cacheable", state.no_load_reason
        elif tokens:
            outcome = "loaded"
        elif computed >= self._aligned(looked_up):
            outcome = "not_needed"
        elif match.whole > computed:
            detail = "window"  # pages of a group with a window are missing
        elif match.declined and self._aligned(found * size) > computed:
            outcome = "declined"
        return outcome, found, detail

    def _record(
        self,
        state: RequestState,
        outcome: "DecisionOutcome",
        tokens: int,
        found: int,
        loaded: int,
        detail: str,
        estimate: tuple[float, float] | None,
    ) -> None:
        bundle, request = self._matcher.first_bundle, state.request
        hashed = len(request.block_hashes) * self._epoch.identity.hash_tokens
        pages = range(self._aligned(min(tokens, hashed)) // bundle.page_tokens)
        decision = (outcome, len(pages), found, loaded, detail)
        if state.recorded == decision:
            return
        state.recorded = decision
        self._store.note_decision(
            self._epoch.identity,
            bundle.object_ids[0],
            request.request_id,
            self._matcher.keys(bundle.groups[0], request.block_hashes, pages),
            outcome,
            found=found,
            loaded=loaded,
            detail=detail,
            estimate=estimate,
        )

    def _aligned(self, tokens: int) -> int:
        return tokens - tokens % self._epoch.identity.alignment
