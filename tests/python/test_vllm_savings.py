"""The tokens that vLLM's connector counts as loaded instead of computed: with a stand-in for the
store, and in a store and in tiers.
"""

from pathlib import Path
from typing import Any

import pytest
from scheduler_support import BLOCKS, Blocks, keep, request, run, side_of
from support import wait_until
from vllm_shapes import TOKENS, FakeStore, identity

import ritornello as rt
from ritornello.vllm.cache_store import CacheStore
from ritornello.vllm.metadata import WorkerReport
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import VllmStore


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def side(store: FakeStore) -> SchedulerSide:
    return side_of(store, Blocks(), identity())


@pytest.fixture
def apart(store: FakeStore) -> SchedulerSide:
    """All loads are asynchronous."""
    return side_of(store, Blocks(), identity(), asynchronous=True)


def test_loaded_tokens_count_when_their_load_is_reported(
    side: SchedulerSide, store: FakeStore
) -> None:
    asked = request(300)
    keep(store, asked, 3)
    run(side, asked, local=TOKENS)
    assert store.avoided == []
    side.complete_step(WorkerReport(load_seconds={"r": 0.25, "unknown": 1.0}), set(), set())
    side.complete_step(WorkerReport(load_seconds={"r": 0.5}), set(), set())
    assert store.avoided == [(TOKENS, 2 * TOKENS, 0.25)]


def test_request_that_ends_with_its_first_step_counts(
    side: SchedulerSide, store: FakeStore
) -> None:
    asked = request(300)
    keep(store, asked, 3)
    run(side, asked)
    side.request_finished("r")
    side.complete_step(WorkerReport(load_seconds={"r": 0.25}), set(), set())
    assert store.avoided == [(0, 3 * TOKENS, 0.25)]


def test_failed_load_counts_its_time_only(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    run(side, asked)
    report = WorkerReport(load_seconds={"r": 0.25}, failed={"r"})
    side.complete_step(report, {101}, set())
    assert store.avoided == [(0, 0, 0.25)]


def test_unreported_load_is_forgotten(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    run(side, asked)
    side.complete_step(None, set(), set())
    side.complete_step(WorkerReport(load_seconds={"r": 0.25}), set(), set())
    assert store.avoided == []


def test_request_without_load_counts_nothing(side: SchedulerSide, store: FakeStore) -> None:
    run(side, request(300))
    side.complete_step(WorkerReport(load_seconds={"r": 0.25}), set(), set())
    assert store.avoided == []


@pytest.mark.parametrize("failed", [False, True])
def test_asynchronous_load_counts_when_all_workers_ended(
    apart: SchedulerSide, store: FakeStore, failed: bool
) -> None:
    asked = request(300)
    keep(store, asked, 3)
    external, asynchronous = apart.matched_tokens(asked, 0)
    assert asynchronous
    apart.request_admitted(asked, BLOCKS, external or 0)
    first = WorkerReport(load_seconds={"r": 0.5}, failed={"r"} if failed else set())
    apart.complete_step(first, set(), set())
    apart.complete_step(None, set(), set())
    assert store.avoided == []
    apart.complete_step(WorkerReport(load_seconds={"r": 0.25}), set(), {"r"})
    assert store.avoided == [(0, 0 if failed else 3 * TOKENS, 0.5)]


def test_aborted_asynchronous_load_counts_nothing(apart: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    external, _ = apart.matched_tokens(asked, 0)
    apart.request_admitted(asked, BLOCKS, external or 0)
    apart.request_finished("r")
    apart.complete_step(WorkerReport(load_seconds={"r": 0.5}), set(), {"r"})
    assert store.avoided == []


@pytest.mark.parametrize("tiers", [False, True])
def test_saved_time_is_estimated_from_reported_prefills(tmp_path: Path, tiers: bool) -> None:
    disk = tmp_path / "disk"
    words: dict[str, Any] = {"path": str(disk), "capacity": "640MiB"}
    if tiers:
        words = {"tiers": [f"host 16MiB {tmp_path}/host", f"disk {disk} 64MiB"]}
    meter = StepMeter()
    store = (CacheStore if tiers else VllmStore)(Settings.parse(words), meter)
    store.note_prefill_avoided(0, 10, 9.0)
    for _ in range(2):
        store.record_timings(WorkerReport(prefill=(0, 100, 1.0)), {})
    store.note_prefill_avoided(0, 50, 0.125)
    with rt.Store.open(disk) as same:
        wait_until(lambda: same.stats()["counters"]["prefill_load_micros"], "the report")
        counters = same.stats()["counters"]
    store.close()
    told = [counters[name] for name in ("prefill_avoided_tokens", "prefill_untimed_tokens")]
    assert told == [60, 10]
    assert counters["prefill_avoided_micros"] == pytest.approx(500_000, rel=0.01)
    assert counters["prefill_load_micros"] == 125_000
    assert "errors" not in (meter.take() or {})
