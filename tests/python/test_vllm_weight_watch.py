"""A worker of vLLM checks its weights and counts their changes, with stand-ins for vLLM."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weight_support import Model, Worker, change_count, sample

from ritornello.vllm.weights import watch
from ritornello.vllm.weights.counters import ChangeCounters
from ritornello.vllm.weights.parameters import Parameters
from ritornello.vllm.weights.watch import DECODE_SECONDS, SAMPLE_SECONDS, WeightWatch


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
def test_announced_change_is_counted_before_and_after(worker: Worker, name: str) -> None:
    getattr(worker, name)()
    assert worker.seen == [1]
    assert change_count() == 2


def test_failed_change_is_counted(worker: Worker, model: Model) -> None:
    def broken() -> None:
        raise RuntimeError("half of the weights are new")

    model.load_weights = broken  # type: ignore[method-assign]
    watching = watch.current()
    assert watching is not None
    watching.attach(worker)
    before = change_count()
    with pytest.raises(RuntimeError, match="half"):
        worker.model_runner.reload_weights()
    assert change_count() > before + 1


def test_loading_model_is_change(worker: Worker) -> None:
    assert worker.model_runner.reload_weights() == "reloaded"
    assert change_count() == 4, "the runner's and the model's method must each count two changes"
    worker.model_runner.get_model().load_weights()
    assert change_count() == 6


def test_sleeping_memory_is_not_read(worker: Worker, model: Model) -> None:
    worker.sleep(level=1)
    model.parameter().poke(7)
    assert watch.check(worker) == (0, 0)
    worker.wake_up(["kv_cache"])
    assert watch.check(worker) == (0, 0)
    worker.wake_up(["weights"])
    assert watch.check(worker) == (0, 1)
    worker.sleep(2)
    assert watch.check(worker) == (0, 2), (
        "sleep at level 2 must count as a change, because it discards the weights"
    )


def test_discarding_kv_cache_is_not_change(worker: Worker, model: Model) -> None:
    worker.discard(("kv_cache",))
    assert watch.check(worker) == (0, 0)
    worker.wake_up(["kv_cache"])
    model.parameter().poke(7)
    assert watch.check(worker) == (0, 1)
    worker.discard(tags=("weights", "kv_cache"))
    assert watch.check(worker) == (0, 2)


def test_step_after_failed_sleep_resumes_checks(worker: Worker, model: Model) -> None:
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
    """A change that a call announces needs no comparison of parameters. This matters with TRL,
    which calls `load_weights` once for every tensor of a model.
    """
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
    assert change_count() == 200
    worker.execute_model(steps(tokens=1))
    worker.execute_model(steps(tokens=1))
    assert calls == ["take_baseline"]


def test_write_between_announced_change_and_step_is_not_counted(
    worker: Worker, model: Model
) -> None:
    worker.reload_weights()
    model.parameter().write(7)
    worker.execute_model(steps(tokens=0))
    worker.execute_model(steps(tokens=1))
    assert watch.check(worker) == (0, 2), (
        "nothing was computed between the announced change and the write, so the write must not "
        "count as a further change"
    )
    model.parameter().poke(8)
    assert watch.check(worker) == (0, 3)


def steps(tokens: int) -> Any:
    """Returns a step that computes `tokens` tokens of one request, or a step without requests if
    `tokens` is 0.
    """
    counts = {"r": tokens} if tokens else {}
    return SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens=counts)


def test_step_checks_before_running(worker: Worker, model: Model) -> None:
    model.parameter().write(7)
    step = SimpleNamespace(total_num_scheduled_tokens=9, num_scheduled_tokens={"r": 9})
    assert worker.execute_model(step) == "ran"
    assert change_count() == 1


def test_replaced_adapter_is_change(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "adapter").write_bytes(b"1")
    asked = SimpleNamespace(lora_name="a", lora_path=str(tmp_path), load_inplace=False)
    load = worker.model_runner.lora_manager._load_adapter
    assert load(asked) == "a"
    assert change_count() == 0
    (tmp_path / "adapter").write_bytes(b"22")
    load(asked)
    assert change_count() == 1


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
    assert change_count() == 0
    manager._load_adapter(asked)
    assert change_count() == 1


def test_unknown_worker_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_watch", None)
    with pytest.raises(RuntimeError, match="the worker has no start_weight_update"):
        watch.install(SimpleNamespace(), "/nowhere", 2)
    with pytest.raises(RuntimeError, match="not watched"):
        watch.check(SimpleNamespace())


def test_worker_whose_adapters_load_unseen_cannot_be_watched(model: Model) -> None:
    worker = Worker(model)
    worker.model_runner.lora_manager = SimpleNamespace()
    with pytest.raises(RuntimeError, match=r"the worker has no lora_manager\._load_adapter"):
        watch.install(worker, "/nowhere", 2)


def test_worker_on_other_machine_compares_own_count(parameters: Parameters, model: Model) -> None:
    elsewhere = WeightWatch(parameters, ChangeCounters.private(3), 1, shared=False)
    ours = ChangeCounters.private(3)
    ours.add(0)
    assert elsewhere.covered_by(ours.read())
    model.parameter().write(7)
    elsewhere.check()
    assert not elsewhere.covered_by(ours.read())
    ours.raise_to(1, elsewhere.count)
    assert elsewhere.covered_by(ours.read())
