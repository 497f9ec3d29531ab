"""A worker of vLLM neither loads nor saves pages after its weights have changed within an epoch."""

import pytest
from worker_support import KEYS, FakeStore, loading, outcome, ready, saving

from ritornello.vllm.meter import StepMeter
from ritornello.vllm.weights import watch
from ritornello.vllm.worker import WorkerSide


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def meter() -> StepMeter:
    return StepMeter()


@pytest.fixture
def side(store: FakeStore, meter: StepMeter) -> WorkerSide:
    return ready(store, meter)


class Watching:
    """Stand-in for this process's `WeightWatch`, which counts changes of weights."""

    shared, slot, count = True, 0, 1

    def __init__(self) -> None:
        self.counted = b"covered"

    def check(self) -> None:
        pass

    def covered_by(self, covered: bytes) -> bool:
        return covered == self.counted


@pytest.fixture
def watching(side: WorkerSide, monkeypatch: pytest.MonkeyPatch) -> Watching:
    made = Watching()
    monkeypatch.setattr(watch, "current", lambda: made)
    side._covered = b"covered"
    return made


def test_changed_weights_refuse_loads_and_saves(
    side: WorkerSide, store: FakeStore, meter: StepMeter, watching: Watching
) -> None:
    watching.counted = b"changed"
    side.begin_step(loading("a"))
    side.load(loading("a"))
    side.save(loading("a"))
    assert side.results.take_failed_blocks() == {10, 11, 12}
    assert store.puts == []
    counts = meter.take()
    assert counts is not None
    assert counts["missed_pages:weights_changed"] == 3
    assert counts["skipped_pages:weights_changed"] == 1


def test_loads_in_flight_fail_if_weights_change(
    side: WorkerSide, store: FakeStore, watching: Watching
) -> None:
    store.outcomes = [outcome(True, True, True)]
    side.load(loading("a", asynchronous=True))
    watching.counted = b"changed"
    assert side.take_completed_loads() == ({"a"}, {"a"})


def test_pages_are_not_saved_if_weights_change_in_their_step(
    side: WorkerSide, store: FakeStore, watching: Watching
) -> None:
    side.begin_step(saving("a", *KEYS))
    side.load(saving("a", *KEYS))
    watching.counted = b"changed"
    side.save(saving("a", *KEYS))
    assert store.puts == []
    assert side.results.take_report() is None, (
        "the worker must not report the pages as unsaved, or they are offered again"
    )


def test_unwatched_worker_saves_nothing(
    side: WorkerSide, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "current", lambda: None)
    side._covered = b"covered"
    side.save(saving("a", *KEYS))
    assert store.puts == []


def test_worker_on_another_machine_reports_changes(side: WorkerSide, watching: Watching) -> None:
    watching.counted, watching.shared = b"changed", False
    side.save(saving("a", *KEYS))
    report = side.results.take_report()
    assert report is not None
    assert report.changes == {0: 1}
