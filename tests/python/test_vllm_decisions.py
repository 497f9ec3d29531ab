"""Decisions that vLLM's connector records about the pages of requests, with a stand-in for the
store.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_support import BLOCKS, Blocks, keep, request, run, side_of
from vllm_shapes import FIRST, TOKENS, FakeStore, cache_group, identity

from ritornello.vllm.cache_groups import ObjectId, trailing
from ritornello.vllm.metadata import WorkerReport
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.weights.counters import ChangeCounters
from ritornello.vllm.weights.guard import WeightGuard


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def side(store: FakeStore) -> SchedulerSide:
    return side_of(store, Blocks(), identity())


def noted(store: FakeStore) -> list[tuple[str, str, int, int, int, str]]:
    """Returns request, outcome, number of keys, pages found and loaded, and detail."""
    return [
        (name, outcome, keys, more["found"], more["loaded"], more["detail"])
        for name, outcome, keys, more in store.noted
    ]


def test_repeated_lookup_is_recorded_once(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(6 * TOKENS)
    keep(store, asked, 4)
    for _ in range(3):
        assert side.matched_tokens(asked, TOKENS) == (3 * TOKENS, False)
    assert noted(store) == [("r", "loaded", 5, 4, 3, "")]
    run(side, asked, local=TOKENS)
    assert len(store.noted) == 1


def test_prompt_without_stored_pages_is_missed(side: SchedulerSide, store: FakeStore) -> None:
    side.matched_tokens(request(4 * TOKENS + 1), TOKENS)
    assert noted(store) == [("r", "missed", 4, 0, 0, "")]


def test_pages_that_the_engine_has_are_not_needed(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(4 * TOKENS + 1)
    keep(store, asked, 4)
    assert side.matched_tokens(asked, 4 * TOKENS) == (0, False)
    other = request(4 * TOKENS + 1, "other")
    keep(store, other, 2)
    assert side.matched_tokens(other, 2 * TOKENS) == (0, False)
    # The engine has all pages, and the store has none.
    assert side.matched_tokens(request(4 * TOKENS + 1, "third"), 4 * TOKENS) == (0, False)
    assert noted(store) == [
        ("r", "not_needed", 4, 4, 0, ""),
        ("other", "missed", 4, 2, 0, ""),
        ("third", "not_needed", 4, 0, 0, ""),
    ]


def test_choice_of_the_gate_is_recorded_with_its_times(
    side: SchedulerSide, store: FakeStore
) -> None:
    store.decision = SimpleNamespace(estimate=(0.1, 0.2, 0.9), alternatives=(0.3, 0.9))
    asked = request(4 * TOKENS + 1)
    keep(store, asked, 4)
    store.worth_loading = 0
    assert side.matched_tokens(asked, 0) == (0, False)
    other = request(4 * TOKENS + 1, "other")
    keep(store, other, 4)
    store.worth_loading = 3
    assert side.matched_tokens(other, 0) == (3 * TOKENS, False)
    assert noted(store) == [("r", "declined", 4, 4, 0, ""), ("other", "loaded", 4, 4, 3, "")]
    assert {more["estimate"] for *_, more in store.noted} == {(0.3, 0.9)}


def test_prompt_shorter_than_a_page_is_recorded(side: SchedulerSide, store: FakeStore) -> None:
    assert side.matched_tokens(request(TOKENS), 0) == (0, False)
    assert noted(store) == [("r", "too_short", 0, 0, 0, "")]


def test_wait_for_a_remote_precedes_its_result(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(4 * TOKENS + 1)
    keep(store, asked, 2)
    store.pending = True
    for _ in range(2):
        assert side.matched_tokens(asked, 0) == (None, False)
    store.pending = False
    assert side.matched_tokens(asked, 0) == (2 * TOKENS, False)
    assert noted(store) == [("r", "waiting", 4, 0, 0, ""), ("r", "loaded", 4, 2, 2, "")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_transfer_params": {"ritornello.no_load": True}}, "opted_out"),
        ({"skip_reading_prefix_cache": True}, "skips_prefix_cache"),
    ],
)
def test_reason_of_request_to_load_nothing_is_recorded(
    side: SchedulerSide, store: FakeStore, changes: dict[str, Any], reason: str
) -> None:
    asked = request(4 * TOKENS + 1, **changes)
    keep(store, asked, 2)
    assert side.matched_tokens(asked, 0) == (0, False)
    assert noted(store) == [("r", "not_cacheable", 4, 2, 0, reason)]


def test_unaligned_prefix_and_unsupported_worker_are_recorded(
    side: SchedulerSide, store: FakeStore
) -> None:
    asked = request(4 * TOKENS + 1)
    assert side.matched_tokens(asked, TOKENS // 2) == (0, False)
    side.complete_step(WorkerReport(unsupported_reason="made by the test"), set(), set())
    assert side.matched_tokens(asked, 0) == (0, False)
    details = [(outcome, keys, detail) for _, outcome, keys, _, _, detail in noted(store)]
    expected = [
        ("not_cacheable", 4, "unaligned_prefix"),
        ("not_cacheable", 4, "worker_unsupported"),
    ]
    assert details == expected


def test_request_is_not_cacheable_after_its_load_failed(
    side: SchedulerSide, store: FakeStore
) -> None:
    asked = request(4 * TOKENS + 1)
    keep(store, asked, 3)
    run(side, asked)
    side.complete_step(WorkerReport(failed={"r"}), {100}, set())
    # vLLM looks a request up again if none of its tokens was loaded.
    asked.num_computed_tokens = 0
    assert side.matched_tokens(asked, 0) == (0, False)
    assert noted(store)[-1] == ("r", "not_cacheable", 4, 3, 0, "load_failed")


def test_changed_weights_are_recorded_as_reason(store: FakeStore) -> None:
    guard, counters = WeightGuard(), ChangeCounters.private(2)
    guard.set_counters(counters)
    side = side_of(store, Blocks(), identity(), guard=guard)
    asked = request(4 * TOKENS + 1)
    keep(store, asked, 3)
    counters.add(0)
    assert side.matched_tokens(asked, 0) == (0, False)
    assert noted(store) == [("r", "not_cacheable", 4, 0, 0, "weights_changed")]


@pytest.mark.parametrize("pending", [False, True])
def test_failure_to_record_changes_no_answer(
    side: SchedulerSide, store: FakeStore, pending: bool
) -> None:
    store.refuses_decisions, store.pending = True, pending
    asked = request(4 * TOKENS + 1)
    keep(store, asked, 3)
    assert side.matched_tokens(asked, 0) == (None if pending else 3 * TOKENS, False)
    assert store.failed == ["note_decision: made by the test"]


def test_failed_lookup_is_recorded(side: SchedulerSide, store: FakeStore) -> None:
    store.broken = True
    assert side.matched_tokens(request(4 * TOKENS + 1), 0) == (0, False)
    assert noted(store) == [("r", "failed", 4, 0, 0, "")]


def test_missing_window_is_named(store: FakeStore) -> None:
    groups = (cache_group(), cache_group(trailing(2 * TOKENS), stages=(("l.2",),)))
    side = side_of(store, Blocks(), identity(*groups))
    asked = request(4 * TOKENS + 1)
    store.keep(asked.block_hashes[:3], ObjectId(0, 0, 0))
    assert side.matched_tokens(asked, 0) == (0, False)
    assert noted(store) == [("r", "missed", 4, 3, 0, "window")]


def test_window_is_named_if_the_gate_chose_pages(store: FakeStore) -> None:
    groups = (cache_group(), cache_group(trailing(2 * TOKENS), stages=(("l.2",),)))
    side = side_of(store, Blocks(), identity(*groups))
    asked = request(4 * TOKENS + 1)
    store.keep(asked.block_hashes, FIRST)
    store.worth_loading = 3
    assert side.matched_tokens(asked, 0) == (0, False)
    assert noted(store) == [("r", "missed", 4, 4, 0, "window")]


def test_pages_behind_the_last_aligned_token_are_no_missing_window(store: FakeStore) -> None:
    wide = cache_group(trailing(2 * TOKENS), stages=(("l.2",),), tokens=2 * TOKENS)
    side = side_of(store, Blocks(), identity(cache_group(), wide))
    asked = request(4 * TOKENS + 1)
    store.keep(asked.block_hashes[:3], FIRST)
    assert side.matched_tokens(asked, 2 * TOKENS) == (0, False)
    assert noted(store) == [("r", "missed", 4, 3, 0, "")]


def test_request_of_the_same_id_is_recorded_again(side: SchedulerSide, store: FakeStore) -> None:
    for _ in range(2):
        asked = request(4 * TOKENS + 1)
        side.matched_tokens(asked, 0)
        side.request_admitted(asked, BLOCKS, 0)
        side.request_finished("r")
    assert [outcome for _, outcome, *_ in store.noted] == ["missed", "missed"]
