"""Changes of weights: how they are detected, counted and covered by resets, with stand-ins for
vLLM.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_composition import Shared, side_of

from ritornello.vllm.weights import watch
from ritornello.vllm.weights.adapters import Adapters
from ritornello.vllm.weights.counters import ChangeCounters, count_in
from ritornello.vllm.weights.engine import EngineHooks
from ritornello.vllm.weights.guard import WeightGuard
from ritornello.vllm.weights.parameters import Parameters
from ritornello.vllm.weights.watch import DECODE_SECONDS, SAMPLE_SECONDS, WeightWatch


class Parameter:
    """Stand-in for a tensor. `write` leaves the trace of PyTorch's operations, `poke` leaves no
    trace.
    """

    def __init__(self, byte: int = 0, *, inference: bool = False) -> None:
        self.byte, self.inference, self.version, self.address = byte, inference, 0, 1000

    @property
    def _version(self) -> int:
        if self.inference:
            raise RuntimeError("Inference tensors do not track version counter.")
        return self.version

    def is_inference(self) -> bool:
        return self.inference

    def data_ptr(self) -> int:
        return self.address

    def write(self, byte: int) -> None:
        self.version += 1
        self.byte = byte

    def poke(self, byte: int) -> None:
        self.byte = byte


class Model:
    """A model with modules "a" and "experts.b"."""

    def __init__(self) -> None:
        self.parts = {
            name: SimpleNamespace(_parameters={"weight": Parameter(), "bias": None})
            for name in ("a", "experts.b")
        }

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        yield from self.parts.items()

    def parameter(self, part: str = "a") -> Any:
        return self.parts[part]._parameters["weight"]

    def load_weights(self) -> None:
        pass


def sample(found: list[Any]) -> bytes:
    return bytes(parameter.byte for parameter in found)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def parameters(model: Model) -> Parameters:
    return Parameters(model.named_modules, sample)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counters() -> ChangeCounters:
    return ChangeCounters.private(3)


@pytest.fixture
def watching(parameters: Parameters, counters: ChangeCounters, clock: Clock) -> WeightWatch:
    return WeightWatch(parameters, counters, 0, clock=clock)


# Parameters.


def test_in_place_operation_is_detected(parameters: Parameters, model: Model) -> None:
    assert not parameters.state_changed()
    model.parameter().write(7)
    assert parameters.state_changed()
    parameters.take_baseline()
    assert not parameters.state_changed()


def test_moved_parameter_is_detected(parameters: Parameters, model: Model) -> None:
    model.parameter().address += 64
    assert parameters.state_changed()


def test_replaced_parameter_is_detected(parameters: Parameters, model: Model) -> None:
    model.parts["a"]._parameters["weight"] = Parameter()
    assert parameters.state_changed()


def test_removed_parameter_is_detected(parameters: Parameters, model: Model) -> None:
    del model.parts["a"]._parameters["weight"]
    assert parameters.state_changed()


def test_sample_detects_untracked_writes(parameters: Parameters, model: Model) -> None:
    model.parameter().poke(7)
    assert not parameters.state_changed()
    assert parameters.sample_changed()


def test_inference_tensors_have_no_version(model: Model) -> None:
    model.parts["a"]._parameters["weight"] = Parameter(inference=True)
    parameters = Parameters(model.named_modules, sample)
    assert not parameters.state_changed()
    model.parameter().write(7)
    assert not parameters.state_changed()
    assert parameters.sample_changed()


def test_balanced_experts_are_skipped(model: Model) -> None:
    parameters = Parameters(model.named_modules, sample, lambda name: "experts" in name)
    assert len(parameters) == 1
    model.parameter("experts.b").write(7)
    assert not parameters.state_changed()
    assert not parameters.sample_changed()


def test_unreadable_bytes_are_not_change(model: Model) -> None:
    readable = True

    def reading(found: list[Any]) -> bytes:
        if not readable:
            raise RuntimeError("not this kind of tensor")
        return sample(found)

    parameters = Parameters(model.named_modules, reading)
    readable = False
    assert not parameters.sample_changed()
    readable = True
    assert not parameters.sample_changed()
    model.parameter().poke(7)
    assert parameters.sample_changed()


class Wrapper(Parameter):
    """Stand-in for a tensor subclass that has no memory and wraps `inner`."""

    def __init__(self, inner: Parameter) -> None:
        super().__init__()
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    def data_ptr(self) -> int:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")


def test_parameter_without_address_hides_no_other(model: Model) -> None:
    def raising() -> int:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    model.parameter("experts.b").data_ptr = raising
    parameters = Parameters(model.named_modules, sample)
    assert not parameters.state_changed()
    model.parameter("a").write(7)
    assert parameters.state_changed()


def test_wrapped_tensors_are_compared(model: Model) -> None:
    inner = Parameter()
    model.parts["a"]._parameters["weight"] = Wrapper(Wrapper(inner))
    read: list[Any] = []

    def reading(found: list[Any]) -> bytes:
        read.extend(found)
        return sample(found)

    parameters = Parameters(model.named_modules, reading)
    assert read == [inner, model.parameter("experts.b")]
    assert len(parameters) == 2
    inner.poke(7)
    assert not parameters.state_changed()
    assert parameters.sample_changed()
    inner.write(8)
    assert parameters.state_changed()
    parameters.take_baseline()
    model.parameter("a").inner = Wrapper(Parameter())
    model.parameter("a").inner.inner.address += 64
    assert parameters.state_changed()


# Adapters.


def test_adapter_with_other_files_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"first")
    at = file.stat()
    adapters = Adapters()
    assert not adapters.replaced("a", str(tmp_path), in_place=False)
    assert not adapters.replaced("a", str(tmp_path), in_place=True), "the files are the same"
    file.write_bytes(b"other")
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert adapters.replaced("a", str(tmp_path), in_place=False), "its old time does not hide it"
    assert not adapters.replaced("a", str(tmp_path), in_place=True)
    assert not adapters.replaced("b", str(tmp_path), in_place=True), "another name, other hashes"


def test_adapter_without_files_counts_in_place() -> None:
    adapters = Adapters()
    assert not adapters.replaced("a", "somebody/adapter", in_place=False)
    assert not adapters.replaced("a", "somebody/adapter", in_place=False)
    assert adapters.replaced("a", "somebody/adapter", in_place=True)


# Counters.


def test_counts_outlive_their_file() -> None:
    ours, path = ChangeCounters.create(3)
    theirs = ChangeCounters.attach(path, 3)
    path.unlink()
    assert theirs is not None
    before = ours.read()
    theirs.add(1)
    assert ours.read() != before
    assert [count_in(ours.read(), slot) for slot in range(3)] == [0, 1, 0]
    ours.raise_to(1, 5)
    ours.raise_to(1, 4)
    assert theirs.count(1) == 5
    assert ChangeCounters.attach(path, 3) is None


# The worker's side.


def test_change_is_counted_once(watching: WeightWatch, model: Model) -> None:
    model.parameter().write(7)
    watching.check()
    watching.check()
    watching.sample()
    assert watching.count == 1
    model.parameter().poke(8)
    watching.check()
    assert watching.count == 1
    watching.sample()
    watching.sample()
    assert watching.count == 2


def test_decode_steps_check_less_often(watching: WeightWatch, model: Model, clock: Clock) -> None:
    model.parameter().write(1)
    watching.begin_step(4, 4)
    assert watching.count == 0
    watching.begin_step(100, 4)
    assert watching.count == 1
    model.parameter().write(2)
    clock.now += DECODE_SECONDS
    watching.begin_step(4, 4)
    assert watching.count == 2
    model.parameter().poke(3)
    clock.now += SAMPLE_SECONDS / 2
    watching.begin_step(100, 4)
    assert watching.count == 2
    clock.now += SAMPLE_SECONDS / 2
    watching.begin_step(4, 4)
    assert watching.count == 3


class Runner:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.lora_manager = SimpleNamespace(_load_adapter=lambda request: request.lora_name)

    def get_model(self) -> Model:
        return self.model

    def load_model(self) -> None:
        pass

    def reload_weights(self) -> str:
        self.model.load_weights()
        return "reloaded"


class Worker:
    """Stand-in for vLLM's worker. `seen`: the count during an update."""

    def __init__(self, model: Model) -> None:
        self.model_runner: Any = Runner(model)
        self.rank = 0
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=False))
        self.seen: list[int] = []

    def _update(self) -> None:
        self.seen.append(_count())

    start_weight_update = update_weights = finish_weight_update = reload_weights = _update

    def sleep(self, level: int = 1) -> None:
        pass

    def discard(self, tags: tuple[str, ...]) -> None:
        pass

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass

    def execute_model(self, step: Any) -> str:
        return "ran"


def _count() -> int:
    current = watch.current()
    assert current is not None
    return current.count


@pytest.fixture
def worker(model: Model, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(watch, "_watch", None)
    monkeypatch.setattr(watch, "sample_tensors", sample)
    made = Worker(model)
    counters, path = ChangeCounters.create(2)
    assert watch.install(SimpleNamespace(worker=made), str(path), 2) == (0, 0)
    path.unlink()
    assert counters.count(0) == 0
    return made


@pytest.mark.parametrize("name", watch.WORKER_METHODS)
def test_announced_change_is_counted_twice(worker: Worker, name: str) -> None:
    getattr(worker, name)()
    assert worker.seen == [1]
    assert _count() == 2


def test_failed_change_is_counted(worker: Worker, model: Model) -> None:
    def broken() -> None:
        raise RuntimeError("half of the weights are new")

    model.load_weights = broken  # type: ignore[method-assign]
    watching = watch.current()
    assert watching is not None
    watching.attach(worker)
    before = _count()
    with pytest.raises(RuntimeError, match="half"):
        worker.model_runner.reload_weights()
    assert _count() > before + 1


def test_loading_model_is_change(worker: Worker) -> None:
    assert worker.model_runner.reload_weights() == "reloaded"
    assert _count() == 4, "the runner's method and the model's"
    worker.model_runner.get_model().load_weights()
    assert _count() == 6


def test_sleeping_memory_is_not_read(worker: Worker, model: Model) -> None:
    worker.sleep(level=1)
    model.parameter().poke(7)
    assert watch.check(worker) == (0, 0)
    worker.wake_up(["kv_cache"])
    assert watch.check(worker) == (0, 0)
    worker.wake_up(["weights"])
    assert watch.check(worker) == (0, 1)
    worker.sleep(2)
    assert watch.check(worker) == (0, 2), "level 2 gives the weights up"


def test_discarding_kv_cache_is_not_change(worker: Worker, model: Model) -> None:
    worker.discard(("kv_cache",))
    assert watch.check(worker) == (0, 0)
    worker.wake_up(["kv_cache"])
    model.parameter().poke(7)
    assert watch.check(worker) == (0, 1)
    worker.discard(tags=("weights", "kv_cache"))
    assert watch.check(worker) == (0, 2)


def test_step_ends_failed_sleep(worker: Worker, model: Model) -> None:
    def broken(level: int = 1) -> None:
        raise RuntimeError("made by the test")

    worker.sleep = broken  # type: ignore[method-assign]
    watching = watch.current()
    assert watching is not None
    watching.attach(worker)
    with pytest.raises(RuntimeError, match="made by the test"):
        worker.sleep()
    model.parameter().poke(7)
    worker.execute_model(steps(tokens=0))
    assert watch.check(worker) == (0, 0)
    worker.execute_model(steps(tokens=9))
    assert watch.check(worker) == (0, 1)


def test_announced_changes_read_no_parameters(
    worker: Worker, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL calls `load_weights` once for every tensor of a model."""
    calls: list[str] = []
    for name in ("take_baseline", "state_changed", "sample_changed"):
        read = getattr(Parameters, name)

        def reading(*args: Any, read: Any = read, name: str = name, **named: Any) -> Any:
            calls.append(name)
            return read(*args, **named)

        monkeypatch.setattr(Parameters, name, reading)
    for _ in range(100):
        model.load_weights()
        watch.check(worker)
    assert calls == []
    assert _count() == 200
    worker.execute_model(steps(tokens=1))
    worker.execute_model(steps(tokens=1))
    assert calls == ["take_baseline"]


def test_write_after_announced_change_is_counted(worker: Worker, model: Model) -> None:
    worker.reload_weights()
    model.parameter().write(7)
    worker.execute_model(steps(tokens=0))
    worker.execute_model(steps(tokens=1))
    assert watch.check(worker) == (0, 2), "nothing was computed before the write"
    model.parameter().poke(8)
    assert watch.check(worker) == (0, 3)


def steps(tokens: int) -> Any:
    """Returns a step of one request or without requests."""
    counts = {"r": tokens} if tokens else {}
    return SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens=counts)


def test_step_checks_before_running(worker: Worker, model: Model) -> None:
    model.parameter().write(7)
    step = SimpleNamespace(total_num_scheduled_tokens=9, num_scheduled_tokens={"r": 9})
    assert worker.execute_model(step) == "ran"
    assert _count() == 1


def test_replaced_adapter_is_change(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "adapter").write_bytes(b"1")
    asked = SimpleNamespace(lora_name="a", lora_path=str(tmp_path), load_inplace=False)
    load = worker.model_runner.lora_manager._load_adapter
    assert load(asked) == "a"
    assert _count() == 0
    (tmp_path / "adapter").write_bytes(b"22")
    load(asked)
    assert _count() == 1


def test_adapter_written_during_load_is_change(worker: Worker, tmp_path: Path) -> None:
    file = tmp_path / "adapter"
    file.write_bytes(b"1")
    written = [b"1", b"22"]

    def load_adapter(asked: Any) -> None:
        content = written.pop(0)
        if file.read_bytes() != content:
            file.write_bytes(content)

    manager = worker.model_runner.lora_manager
    manager._load_adapter = load_adapter
    watching = watch.current()
    assert watching is not None
    watching.attach(worker)
    asked = SimpleNamespace(lora_name="a", lora_path=str(tmp_path), load_inplace=True)
    manager._load_adapter(asked)
    assert _count() == 0
    manager._load_adapter(asked)
    assert _count() == 1


def test_unknown_worker_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_watch", None)
    with pytest.raises(RuntimeError, match="the worker has no start_weight_update"):
        watch.install(SimpleNamespace(), "/nowhere", 2)
    with pytest.raises(RuntimeError, match="not watched"):
        watch.check(SimpleNamespace())


def test_remote_worker_compares_own_count(parameters: Parameters, model: Model) -> None:
    elsewhere = WeightWatch(parameters, ChangeCounters.private(3), 1, shared=False)
    ours = ChangeCounters.private(3)
    ours.add(0)
    assert elsewhere.covered_by(ours.read())
    model.parameter().write(7)
    elsewhere.check()
    assert not elsewhere.covered_by(ours.read())
    ours.raise_to(1, elsewhere.count)
    assert elsewhere.covered_by(ours.read())


# The scheduler's side.


class Executor:
    """One worker in this process; `fails` names the call that fails."""

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


def test_call_is_followed_by_check(hooks: EngineHooks, core: Any) -> None:
    guard = hooks.guard(type(core))
    assert core.collective_rpc(flip) == "flipped"
    assert guard.changed(), "also the first call of all"


def test_harmless_call_is_not_change(hooks: EngineHooks, core: Any) -> None:
    guard = hooks.guard(type(core))
    core.collective_rpc(lambda worker: None)
    assert not guard.changed()


def test_failed_call_is_followed_by_check(hooks: EngineHooks, core: Any) -> None:
    def broken(worker: Any) -> None:
        flip(worker)
        raise RuntimeError("half of the weights are new")

    guard = hooks.guard(type(core))
    with pytest.raises(RuntimeError, match="half"):
        core.collective_rpc(broken)
    assert guard.changed()


def test_reset_covers_changes_of_workers(hooks: EngineHooks, core: Any) -> None:
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
def test_unresettable_connectors_are_not_covered(
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
    # A step without requests computes nothing.
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


def test_unanswered_check_counts_as_change(hooks: EngineHooks, core: Any) -> None:
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
    """Counters to which a worker's thread adds a change right after the next `read`."""

    counts = False

    def read(self) -> bytes:
        found = super().read()
        if self.counts:
            self.counts = False
            self.add(0)
        return found


def test_change_during_reset_is_not_covered() -> None:
    guard, counters = WeightGuard(), CountingMeanwhile(mmap.mmap(-1, 16), 2)
    guard.set_counters(counters)
    side = side_of(Shared())
    side._guard = guard
    counters.counts = True
    side.on_caches_reset()
    assert guard.changed()
    assert not side._identity.epoch
    side.on_caches_reset()
    assert not guard.changed()
    assert side._identity.epoch
