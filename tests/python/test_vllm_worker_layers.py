"""Loads that arrive layer by layer while a step computes, with tickets whose outcomes the tests
choose.
"""

from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm_shapes import FIRST
from worker_support import FakeStore, loading, outcome, ready

from ritornello.vllm.metadata import StepMetadata
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.shard import PageObject
from ritornello.vllm.worker import WorkerSide


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def meter() -> StepMeter:
    return StepMeter()


LAYERS = {"l.0": 0, "l.1": 0, "l.2": 1, "l.3": 2}


@pytest.fixture
def layered(store: FakeStore, meter: StepMeter) -> WorkerSide:
    """Returns a worker whose pages have three layer groups, after a step in which the engine has
    announced all layers.
    """
    pool: Any = SimpleNamespace(page_bytes=4096, pages=list)
    side = ready(store, meter, PageObject(FIRST, pool, True, (2048, 3072, 4096)))
    side.step_loads.layer_groups.set(LAYERS)
    run(side, *LAYERS)
    return side


def run(side: WorkerSide, *layers: str) -> None:
    for name in layers:
        side.step_loads.await_layer(name)


def test_layers_wait_for_their_group(
    layered: WorkerSide, store: FakeStore, meter: StepMeter
) -> None:
    store.outcomes = [outcome(True, True, True), outcome(True, True, True), outcome(True)]
    layered.load(StepMetadata(None, loading("a", "b").loads))
    assert store.sections == [(2048, 3072, 4096)] * 2
    assert store.events == []
    run(layered, "l.0", "l.1")
    assert store.events == ["group 0"] * 2
    run(layered, "l.2", "l.3")
    assert store.events[2:] == ["group 1"] * 2 + ["group 2"] * 2
    layered.save(loading("a"))
    assert store.events[6:] == ["wait"] * 2
    assert len(store.puts) == 1
    assert layered.results.take_failed_blocks() == set()
    counts = meter.take()
    assert counts is not None
    assert (counts["layer_loads"], counts["loaded_pages"]) == (2, 6)
    assert 0 < counts["layer_wait_seconds"] <= counts["load_seconds"]
    # A step without loads does not wait.
    run(layered, *LAYERS)
    assert len(store.events) == 8


def test_unknown_layer_waits_for_all_groups(layered: WorkerSide, store: FakeStore) -> None:
    store.outcomes = [outcome(True, True, True)]
    layered.load(StepMetadata(None, loading("a").loads))
    run(layered, "another", *LAYERS)
    assert store.events == [f"group {len(LAYERS)}"]


def test_failed_layer_group_fails_page_once(
    layered: WorkerSide, store: FakeStore, meter: StepMeter
) -> None:
    store.outcomes = [outcome(True, False, True, reason="checksum")]
    layered.load(loading("a"))
    run(layered, *LAYERS)
    assert layered.results.take_failed_blocks() == set()
    layered.save(loading("a"))
    assert store.puts == []
    assert layered.results.take_failed_blocks() == {11}
    report = layered.results.take_report()
    assert report is not None
    assert (report.failed, report.unsaved) == ({"a"}, [("a", 0, 5), ("a", 0, 7)])
    counts = meter.take()
    assert counts is not None
    assert counts["missed_pages:checksum"] == 1
    layered.load(StepMetadata())
    layered.save(StepMetadata())
    assert layered.results.take_failed_blocks() == set()


def test_failed_load_is_reported_in_step_with_drafts(layered: WorkerSide, store: FakeStore) -> None:
    """With draft tokens vLLM calls `take_completed_loads` before `save`."""
    store.outcomes = [outcome(True, False, True, reason="checksum")]
    layered.load(loading("a"))
    run(layered, *LAYERS)
    assert layered.take_completed_loads() == (set(), set())
    assert layered.results.take_failed_blocks() == {11}
    layered.save(loading("a"))
    assert store.puts == []


def test_late_layer_group_is_missed(layered: WorkerSide, store: FakeStore) -> None:
    store.outcomes = ["late"]
    layered.load(StepMetadata(None, loading("a").loads))
    run(layered, "l.0")
    cast(Any, layered.step_loads._pending[0]._reads[0][1]).outcome = outcome(True, True, True)
    run(layered, "l.2", "l.3")
    layered.save(StepMetadata())
    assert layered.results.take_failed_blocks() == {10, 11, 12}


def test_unannounced_layer_disables_layer_loads(
    layered: WorkerSide, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.outcomes = [outcome(True, True, True)] * 2
    layered.load(StepMetadata(None, loading("a").loads))
    run(layered, "l.0", "l.1", "l.3")
    layered.save(loading("a"))
    assert store.events[-1] == "wait"
    assert layered.results.take_failed_blocks() == {10, 11, 12}
    assert store.puts == []
    assert "l.2 ran unannounced" in caplog.text
    layered.load(StepMetadata(None, loading("b").loads))
    assert store.sections[-1] == ()
    assert store.events[-1] == "wait"
    assert layered.results.take_failed_blocks() == set()


def test_loads_end_before_first_layer_until_layers_are_known(
    store: FakeStore, meter: StepMeter
) -> None:
    pool: Any = SimpleNamespace(page_bytes=4096, pages=list)
    side = ready(store, meter, PageObject(FIRST, pool, True, (2048, 3072, 4096)))
    side.step_loads.layer_groups.set(LAYERS)
    for announced in (["l.0"], ["l.1", "l.2", "l.3"]):
        store.outcomes = [outcome(True, True, True)]
        side.load(StepMetadata(None, loading("a").loads))
        assert (store.sections[-1], store.events[-1]) == ((), "wait")
        run(side, *announced)
        side.save(StepMetadata())
    store.outcomes = [outcome(True, True, True)]
    side.load(StepMetadata(None, loading("a").loads))
    assert store.sections[-1] == (2048, 3072, 4096)


def test_layer_load_of_step_without_save_fails_in_next_step(
    layered: WorkerSide, store: FakeStore
) -> None:
    store.outcomes = [outcome(True, False, True, reason="io")]
    layered.load(StepMetadata(None, loading("a").loads))
    layered.load(StepMetadata())
    assert layered.results.take_failed_blocks() == {10, 11, 12}


def test_async_loads_have_no_layer_groups(
    layered: WorkerSide, store: FakeStore, meter: StepMeter
) -> None:
    store.outcomes = [outcome(True, True, True)]
    layered.load(StepMetadata(None, loading("a", asynchronous=True).loads))
    run(layered, *LAYERS)
    assert (store.sections, store.events) == ([()], [])
    assert layered.take_completed_loads() == ({"a"}, set())
    counts = meter.take()
    assert counts is not None
    assert counts["apart_loads"] == 1


def test_load_by_layer_reports_time_the_step_waited(layered: WorkerSide, store: FakeStore) -> None:
    store.wants_timings = True
    store.outcomes = [outcome(True, True, True)]
    begun = monotonic()
    layered.begin_step()
    layered.load(StepMetadata(None, loading("a").loads))
    run(layered, *LAYERS)
    layered.save(StepMetadata())
    report = layered.results.take_report()
    assert report is not None
    assert 0 < report.load_seconds["a"] <= monotonic() - begun
