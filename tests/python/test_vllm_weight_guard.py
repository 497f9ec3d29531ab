"""The scheduler's side of vLLM's connector: a change of weights stops hits and saves until vLLM's
caches are reset.
"""

import mmap
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_composition import Shared, side_of
from weight_support import Model, Worker, sample

from ritornello.vllm.weights import watch
from ritornello.vllm.weights.counters import ChangeCounters
from ritornello.vllm.weights.engine import EngineHooks
from ritornello.vllm.weights.guard import WeightGuard


@pytest.fixture
def model() -> Model:
    return Model()


class Executor:
    """Stand-in for vLLM's executor with one worker in this process. `fails`: the name of the
    function whose call raises an error, "" if none.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.fails = worker, ""

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        if self.fails == method.__name__:
            raise RuntimeError("made by the test")
        return [method(self.worker, *args)]


def cores(worker: Worker) -> Any:
    """Returns a stand-in for vLLM's EngineCore class."""

    class Core:
        def __init__(self) -> None:
            self.model_executor = Executor(worker)
            self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
            self.in_use = False
            self.scheduler = SimpleNamespace(
                connector="connector",
                schedule=lambda: "scheduled",
                update_from_output=lambda step, output: f"{step}: {output}",
                has_unfinished_requests=lambda: self.in_use,
            )

        def collective_rpc(self, method: Any) -> Any:
            return method(worker)

        def add_lora(self, asked: Any) -> Any:
            return worker.model_runner.lora_manager._load_adapter(asked)

        def reset_prefix_cache(
            self, reset_running_requests: bool = False, reset_connector: bool = False
        ) -> bool:
            return not self.in_use

        def add_request(self, request: Any) -> Any:
            return request

    return Core


def flip(worker: Any) -> str:
    worker.model_runner.get_model().parameter().poke(7)
    return "flipped"


@pytest.fixture
def core(model: Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(watch, "_watch", None)
    monkeypatch.setattr(watch, "sample_tensors", sample)
    return cores(Worker(model))()


@pytest.fixture
def hooks() -> EngineHooks:
    return EngineHooks()


def test_unwatched_weights_count_as_changed(hooks: EngineHooks, core: Any) -> None:
    guard = hooks.guard(type(core))
    assert guard.changed()
    assert core.add_request("asked") == "asked"
    assert not guard.changed()
    assert guard.covered == bytes(16)


def test_weights_are_checked_after_call(hooks: EngineHooks, core: Any) -> None:
    guard = hooks.guard(type(core))
    assert core.collective_rpc(flip) == "flipped"
    assert guard.changed(), "the weights must be checked after the first call as well"


def test_call_without_change_of_weights_is_no_change(hooks: EngineHooks, core: Any) -> None:
    guard = hooks.guard(type(core))
    core.collective_rpc(lambda worker: None)
    assert not guard.changed()


def test_weights_are_checked_after_failed_call(hooks: EngineHooks, core: Any) -> None:
    def broken(worker: Any) -> None:
        flip(worker)
        raise RuntimeError("half of the weights are new")

    guard = hooks.guard(type(core))
    with pytest.raises(RuntimeError, match="half"):
        core.collective_rpc(broken)
    assert guard.changed()


def test_reset_ends_the_changes_that_workers_reported(hooks: EngineHooks, core: Any) -> None:
    guard, told = hooks.guard(type(core)), []

    def begin_epoch() -> None:
        told.append(guard.changed())
        guard.cover(guard.read())

    guard.begin_epoch, guard.owner = begin_epoch, core.scheduler.connector
    core.add_request("asked")
    flip(core.model_executor.worker)
    core.in_use = True
    assert not core.reset_prefix_cache()
    assert told == []
    assert guard.changed()
    core.in_use = False
    assert core.reset_prefix_cache()
    assert core.reset_prefix_cache(reset_connector=True)
    assert told == [True, False]
    assert not guard.changed()


def test_other_connectors_must_be_reset(hooks: EngineHooks, core: Any) -> None:
    guard = hooks.guard(type(core))
    guard.begin_epoch, guard.owner = lambda: guard.cover(guard.read()), "one of several connectors"
    core.add_request("asked")
    core.in_use = True
    core.scheduler.schedule()
    core.in_use = False
    core.collective_rpc(flip)
    assert core.reset_prefix_cache()
    assert guard.changed()
    assert core.reset_prefix_cache(reset_connector=True)
    assert not guard.changed()


class KVConnectorBase_V1:  # noqa: N801
    """Stand-in for vLLM's class, whose `reset_cache` does nothing."""

    sub_connectors: tuple[Any, ...] = ()

    def reset_cache(self) -> bool | None:
        return None


class Resetting(KVConnectorBase_V1):
    def reset_cache(self) -> bool | None:
        return True


@pytest.mark.parametrize("sibling", [KVConnectorBase_V1, Resetting])
def test_change_remains_if_a_connector_cannot_be_reset(
    hooks: EngineHooks, core: Any, sibling: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guard = hooks.guard(type(core))
    guard.begin_epoch, guard.owner = lambda: guard.cover(guard.read()), "one of several connectors"
    core.scheduler.connector = Resetting()
    core.scheduler.connector.sub_connectors = (Resetting(), sibling())
    core.add_request("asked")
    core.in_use = True
    core.scheduler.schedule()
    core.in_use = False
    core.collective_rpc(flip)
    assert core.reset_prefix_cache(reset_connector=True)
    keeps = sibling is KVConnectorBase_V1
    assert guard.changed() == keeps
    assert ("KVConnectorBase_V1 cannot be reset" in caplog.text) == keeps


def test_changes_of_empty_engine_need_no_reset(hooks: EngineHooks, core: Any) -> None:
    guard = hooks.guard(type(core))
    epochs = []

    def begin_epoch() -> None:
        epochs.append(guard.changed())
        guard.cover(guard.read())

    guard.begin_epoch = begin_epoch
    core.collective_rpc(flip)
    assert (epochs, guard.changed()) == ([True], False)
    # A step without requests computes nothing, so the next change needs no reset.
    assert core.scheduler.schedule() == "scheduled"
    core.collective_rpc(lambda worker: worker.reload_weights())
    assert (epochs, guard.changed()) == ([True] * 2, False)
    core.in_use = True
    core.scheduler.schedule()
    core.in_use = False
    core.collective_rpc(lambda worker: worker.reload_weights())
    assert (epochs, guard.changed()) == ([True] * 2, True)


def test_unwatchable_workers_stop_hits_and_saves(hooks: EngineHooks, core: Any) -> None:
    core.model_executor.fails = "install"
    guard = hooks.guard(type(core))
    assert core.add_request("asked") == "asked"
    assert core.reset_prefix_cache()
    assert guard.changed()


def test_failed_check_counts_as_change(hooks: EngineHooks, core: Any) -> None:
    guard = hooks.guard(type(core))
    core.add_request("asked")
    core.model_executor.fails = "check"
    core.collective_rpc(lambda worker: None)
    assert guard.changed()


def test_counts_of_other_machines_are_merged(hooks: EngineHooks, core: Any) -> None:
    guard = hooks.guard(type(core))
    guard.merge_counts({0: 1})
    core.add_request("asked")
    guard.merge_counts({})
    assert not guard.changed()
    guard.merge_counts({0: 1})
    assert guard.changed()


class CountingMeanwhile(ChangeCounters):
    """Counters that add a change right after the next `read` if `counts` is set, as a worker's
    thread may.
    """

    counts = False

    def read(self) -> bytes:
        found = super().read()
        if self.counts:
            self.counts = False
            self.add(0)
        return found


def test_change_during_reset_remains_after_it() -> None:
    guard, counters = WeightGuard(), CountingMeanwhile(mmap.mmap(-1, 16), 2)
    guard.set_counters(counters)
    side = side_of(Shared())
    side._epoch.guard = guard
    counters.counts = True
    side.on_caches_reset()
    assert guard.changed()
    assert not side._epoch.identity.model.epoch
    side.on_caches_reset()
    assert not guard.changed()
    assert side._epoch.identity.model.epoch


class Observer:
    def __init__(self, fails: bool = False) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.fails = fails

    def scheduled(self, step: Any) -> None:
        self.seen.append(("scheduled", step))
        if self.fails:
            raise RuntimeError("made by the test")

    def completed(self, step: Any) -> None:
        self.seen.append(("completed", step))


def test_observers_see_every_step(hooks: EngineHooks, core: Any) -> None:
    guard, observer, failing = hooks.guard(type(core)), Observer(), Observer(fails=True)
    for one in (observer, failing):
        hooks.observe_steps(one)
    core.add_request("request")
    assert core.scheduler.schedule() == "scheduled"
    assert core.scheduler.update_from_output("scheduled", "output") == "scheduled: output"
    assert observer.seen == failing.seen == [("scheduled", "scheduled"), ("completed", "scheduled")]
    assert guard is not None
