"""The duration of an engine's prefill, measured in the scheduler's process.

A step is timed from the moment when its workers could begin, to the moment when the scheduler takes
its output. Workers run steps in order, so a step begins when it is scheduled or, if an earlier step
is in progress (asynchronous scheduling schedules ahead), when the output of this earlier step
arrives. The time includes everything that a step costs the engine between two outputs. Pipeline
parallel stages run several steps at a time. The time is then the time of the slowest stage, which
limits the rate at which a long prompt is computed.

Only steps that are mostly prefill count: at least `TOKENS_MIN` tokens of prompts, which are at
least `PREFILL_SHARE` of the step's tokens without drafts. A request of which the step computes a
single token counts as decoding, also at the end of its prompt. The first step that is mostly
prefill is not recorded, because it includes the compilation of kernels.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

# The time of a step with fewer tokens of prompts is mostly the fixed cost of a step, which a load
# does not save.
TOKENS_MIN = 128
PREFILL_SHARE = 0.9
# Maximum number of remembered steps whose output has not arrived: a further step replaces all of
# them. An engine has at most one such step for each pipeline stage, and one further step.
STEPS_MAX = 64


class ScheduledRequest(Protocol):
    req_id: str
    num_computed_tokens: int


class ScheduledRequests(Protocol):
    req_ids: Sequence[str]
    num_computed_tokens: Sequence[int]


class Step(Protocol):
    """The used part of vLLM's `SchedulerOutput`."""

    num_scheduled_tokens: Mapping[str, int]
    scheduled_new_reqs: Sequence[ScheduledRequest]
    scheduled_cached_reqs: ScheduledRequests
    scheduled_spec_decode_tokens: Mapping[str, Collection[int]]


class PrefillTimes:
    """Calls `record` with the number of tokens before a prefill, the number of tokens that the
    prefill computed, and its duration in seconds.
    """

    def __init__(self, record: Callable[[int, int, float], object]) -> None:
        self._record = record
        # Scheduled steps, each with its time, by `id`: a step in this dictionary is not freed, so
        # no other step gets its `id`.
        self._scheduled: dict[int, tuple[Any, float]] = {}
        self._last_output = 0.0
        self._is_warm = False

    def scheduled(self, step: Step) -> None:
        """Called when a step was scheduled."""
        if len(self._scheduled) >= STEPS_MAX:
            self._scheduled.clear()
        self._scheduled[id(step)] = (step, perf_counter())

    def completed(self, step: Step) -> None:
        """Called when the output of a step has arrived."""
        now = perf_counter()
        last_output, self._last_output = self._last_output, now
        known = self._scheduled.pop(id(step), None)
        measured = prefill_of(step) if known is not None else None
        if known is None or measured is None:
            return
        if self._is_warm:
            self._record(*measured, now - max(known[1], last_output))
        self._is_warm = True


def prefill_of(step: Step) -> tuple[int, int] | None:
    """Returns the number of tokens before a step's prefill, and the number of prompt tokens that
    the step computes; None if the step is not mostly prefill. Several prompts count as one prompt
    of which the step computes as many tokens as of all prompts together. The number of tokens
    before the one prompt's prefill is chosen so that attention computes the same number of pairs of
    a token and an earlier token as in the step.
    """
    # Return early for a step that only decodes. A request in prefill computes two tokens or more:
    # if prefills have `TOKENS_MIN` tokens, the difference below is at least half of this number.
    drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
    scheduled = step.num_scheduled_tokens
    if sum(scheduled.values()) - drafts - len(scheduled) < TOKENS_MIN // 2:
        return None
    cached = step.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=False))
    computed |= {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
    tokens = others = 0
    pairs = 0.0
    for name, count in scheduled.items():
        count -= len(step.scheduled_spec_decode_tokens.get(name, ()))
        if count <= 1:
            others += 1
            continue
        tokens += count
        pairs += count * computed.get(name, 0) + count * count / 2
    if tokens < TOKENS_MIN or tokens < PREFILL_SHARE * (tokens + others):
        return None
    return max(round(pairs / tokens - tokens / 2), 0), tokens
