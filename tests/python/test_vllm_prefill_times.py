"""The durations of prefills, derived from when the steps of vLLM's scheduler begin and end."""

from types import SimpleNamespace
from typing import Any

import pytest

from ritornello.vllm import prefill_times
from ritornello.vllm.prefill_times import PrefillTimes, prefill_of


def step(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    drafts: dict[str, int] | None = None,
) -> Any:
    """Returns a stand-in for vLLM's `SchedulerOutput`. `new`, `cached`: by request, the number of
    tokens that were computed before, and of tokens that the step computes. `drafts`: the number of
    draft tokens by request.
    """
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (_, count) in (new | cached).items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before)
            for name, (before, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[before for before, _ in cached.values()]
        ),
        scheduled_spec_decode_tokens={name: [0] * count for name, count in (drafts or {}).items()},
    )


PREFILL = step({"a": (512, 256)})
DECODE = step(cached={"b": (100, 1)})


def test_prefill_of_one_prompt_has_its_earlier_and_new_tokens() -> None:
    assert prefill_of(PREFILL) == (512, 256)
    assert prefill_of(step(cached={"a": (1024, 512)})) == (1024, 512)


def test_prompts_of_one_step_are_measured_as_one_prefill() -> None:
    # In two prompts of 200 tokens, attention computes half the number of pairs of tokens that it
    # computes in one prompt of 400 tokens. The equivalent prefill of 400 tokens would have fewer
    # than 0 earlier tokens, so it has 0.
    assert prefill_of(step({"a": (0, 200), "b": (0, 200)})) == (0, 400)
    assert prefill_of(step({"a": (300, 200)}, {"b": (700, 200)})) == (400, 400)


@pytest.mark.parametrize(
    "other",
    [
        DECODE,
        step({"a": (0, 100)}),
        step({"a": (0, 200)}, {f"d{place}": (50, 1) for place in range(40)}),
        step(
            cached={f"d{place}": (50, 5) for place in range(40)},
            drafts={f"d{p}": 4 for p in range(40)},
        ),
    ],
)
def test_steps_without_long_prefill_are_not_measured(other: Any) -> None:
    assert prefill_of(other) is None


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(prefill_times, "perf_counter", lambda: self.now)


def test_step_scheduled_alone_is_timed_from_schedule_to_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, told = Clock(monkeypatch), []
    times = PrefillTimes(lambda *measured: told.append(measured))
    for seconds in (9.0, 2.0, 3.0):
        clock.now += 5.0  # the engine is idle
        one = step({"a": (512, 256)})
        times.scheduled(one)
        clock.now += seconds
        times.completed(one)
    assert told == [(512, 256, 2.0), (512, 256, 3.0)], "only the first prefill must be skipped"


def test_step_scheduled_ahead_is_timed_from_previous_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, told = Clock(monkeypatch), []
    times = PrefillTimes(lambda *measured: told.append(measured))
    steps = [step({"a": (256 * place, 256)}) for place in range(4)]
    times.scheduled(steps[0])
    for place, seconds in enumerate((9.0, 2.0, 3.0, 4.0)):
        if place + 1 < len(steps):
            times.scheduled(steps[place + 1])
        clock.now += seconds
        times.completed(steps[place])
    assert told == [(256, 256, 2.0), (512, 256, 3.0), (768, 256, 4.0)]


def test_time_of_decoding_does_not_count_as_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), []
    times = PrefillTimes(lambda *measured: told.append(measured))
    for one in (step({"a": (0, 256)}), step(cached={"a": (256, 1)}), step({"b": (0, 256)})):
        times.scheduled(one)
        clock.now += 1.0
        times.completed(one)
    assert told == [(0, 256, 1.0)]


def test_steps_without_output_are_forgotten() -> None:
    told: list[Any] = []
    times = PrefillTimes(lambda *measured: told.append(measured))
    for _ in range(3 * prefill_times.STEPS_MAX):
        times.scheduled(step())
    assert len(times._scheduled) <= prefill_times.STEPS_MAX
    times.completed(step({"a": (0, 256)}))
    assert told == []
