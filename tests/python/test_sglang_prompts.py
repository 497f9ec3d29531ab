"""The keys that precede the pages of a lookup in their prompt, and the times of prefills, as
observed on stand-ins for SGLang's classes.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ritornello.sglang.prefills import PENDING_MAX, Prefills
from ritornello.sglang.prompts import UNKNOWN, Prompts, prompt_obstacle


class Storage:
    uses_prompts = True

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def on_prefetch_begin(self, operation: str) -> None:
        self.told.append(("begin", operation))

    def on_prefetch_end(self, operation: str) -> None:
        self.told.append(("end", operation))


class Tree:
    """Stand-in for SGLang's radix tree: a single path of nodes 1, 2 and so on. Node `n` has the
    keys `n0` and `n1`.
    """

    def get_prefix_hash_values(self, node: int) -> list[str]:
        return [f"{above}{place}" for above in range(1, node) for place in (0, 1)]

    def get_hash_values(self, node: int) -> list[str]:
        return [f"{node}0", f"{node}1"]


def classes() -> tuple[Any, Any]:
    """Returns stand-ins for `UnifiedRadixCache` and `HiCacheController`."""

    class Cache:
        def __init__(self, storage: Any) -> None:
            self.cache_controller = SimpleNamespace(storage_backend=storage)
            self.tree_core: Any = Tree()
            self.hicache_storage_pass_prefix_keys = False

        def prefetch_from_storage(
            self,
            request: str,
            last_host_node_id: int,
            new_input_tokens: list[int],
            last_hash: str | None = None,
            prefix_keys: list[str] | None = None,
            *,
            extra_key: str = "",
        ) -> Any:
            return request, new_input_tokens, last_hash, prefix_keys, extra_key

        def query_storage_hit_length(
            self,
            last_host_node_id: int,
            new_input_tokens: list[int],
            last_hash: str | None = None,
            prefix_keys: list[str] | None = None,
        ) -> Any:
            return prefix_keys

    class Controller:
        def __init__(self, storage: Any) -> None:
            self.storage_backend = storage

        def prefetch(self, handle: str, tokens: list[int]) -> str:
            return f"operation of {handle}"

        def terminate_prefetch(self, operation: Any) -> str:
            return "ended"

    return Cache, Controller


def test_lookup_passes_all_keys_before_its_pages() -> None:
    cache, controller = classes()
    watching = Prompts()
    assert watching.watch(cache, controller) == ""
    assert watching.watched
    assert watching.watch(cache, controller) == ""
    made = cache(Storage())
    told = made.prefetch_from_storage("r", 2, [7], "21", ["10", "11"], extra_key="lora")
    assert told == ("r", [7], "21", ["10", "11", "20", "21"], "lora")
    assert made.query_storage_hit_length(1, [7], last_hash="11") == ["10", "11"]
    # The lookup has set this attribute, with which SGLang passes the keys before a page to puts.
    assert made.hicache_storage_pass_prefix_keys
    # A lookup from the prompt's first page has no keys before it.
    assert made.prefetch_from_storage("r", 0, [7])[3] == []


def test_lookup_of_other_storage_is_unchanged() -> None:
    cache, controller = classes()
    assert Prompts().watch(cache, controller) == ""
    for storage in (None, object(), SimpleNamespace(uses_prompts=False)):
        made = cache(storage)
        assert made.prefetch_from_storage("r", 2, [7], "21", None)[3] is None
        assert not made.hicache_storage_pass_prefix_keys


def test_unknown_keys_before_lookup_are_marked(caplog: pytest.LogCaptureFixture) -> None:
    cache, controller = classes()
    assert Prompts().watch(cache, controller) == ""
    made = cache(Storage())
    assert made.prefetch_from_storage("r", 2, [7], "31")[3] == [UNKNOWN]
    made.tree_core = object()
    assert made.prefetch_from_storage("r", 2, [7], "21")[3] == [UNKNOWN]
    assert caplog.text.count("does not tell the keys before a page") == 1


def test_storage_learns_of_prefetches() -> None:
    cache, controller = classes()
    assert Prompts().watch(cache, controller) == ""
    storage = Storage()
    made = controller(storage)
    operation = made.prefetch("r", tokens=[7])
    assert made.terminate_prefetch(operation) == "ended"
    assert storage.told == [("begin", "operation of r"), ("end", "operation of r")]
    assert controller(None).terminate_prefetch(controller(object()).prefetch("r", [7])) == "ended"


def test_missing_methods_are_named() -> None:
    cache, controller = classes()
    assert "Cache has no prefetch_from_storage" in prompt_obstacle(type("Cache", (), {}), None)
    assert "Other has no prefetch" in prompt_obstacle(cache, type("Other", (), {}))
    cache.query_storage_hit_length = lambda self, last_hash: 0
    found = prompt_obstacle(cache, controller)
    assert found == "query_storage_hit_length has no last_host_node_id, prefix_keys"
    watching = Prompts()
    assert watching.watch(cache, controller) == found
    assert not watching.watched


class Runner:
    """Stand-in for SGLang's model runner. `consumer`: at least 0 if layers wait for pages from host
    memory. `stages`: number of pipeline stages. `draft`: the runner runs a draft model.
    """

    device, is_draft_worker = "cpu", False

    def __init__(self, consumer: int = -1, stages: int = 1, draft: bool = False) -> None:
        counter = SimpleNamespace(consumer_index=consumer)
        self.token_to_kv_pool = SimpleNamespace(layer_transfer_counter=counter)
        self.pp_group = SimpleNamespace(world_size=stages)
        self.is_draft_worker = draft

    def forward(self, batch: Any, factor: int = 1) -> int:
        return len(batch.extend_seq_lens_cpu or ()) * factor


def step(mode: str, lengths: list[int] | None, before: list[int] | None = None) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=before if before is not None else [0] * len(lengths or ()),
    )


@pytest.fixture
def watched() -> tuple[Any, list[tuple[int, int]]]:
    runner = type("ModelRunner", (Runner,), {"forward": Runner.forward})
    prefills, told = Prefills(), []
    assert prefills.watch(runner) == prefills.watch(runner) == ""

    def record(before: int, tokens: int, seconds: float) -> None:
        assert seconds >= 0
        told.append((before, tokens))

    assert runner().forward(step("EXTEND", [9])) == 1
    prefills.record = record
    return runner, told


def test_prefill_of_one_request_is_measured(watched: Any) -> None:
    runner, told = watched
    assert runner().forward(step("EXTEND", [100], [28]), factor=3) == 3
    assert runner().forward(step("MIXED", [1, 64, 1], [7, 5, 9])) == 3
    assert told == [(28, 100), (5, 64)]


@pytest.mark.parametrize(
    ("runner", "batch"),
    [
        ({}, step("DECODE", None)),
        ({}, step("TARGET_VERIFY", [8])),
        ({}, step("EXTEND", [8, 8])),
        ({}, step("EXTEND", [1])),
        ({"consumer": 2}, step("EXTEND", [8])),
        ({"stages": 2}, step("EXTEND", [8])),
        ({"draft": True}, step("EXTEND", [8])),
    ],
)
def test_unsuitable_steps_are_not_measured(watched: Any, runner: Any, batch: Any) -> None:
    kind, told = watched
    kind(**runner).forward(batch)
    assert told == []


def test_unknown_step_ends_measuring(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    runner, told = watched
    assert runner().forward(SimpleNamespace(extend_seq_lens_cpu=[9])) == 1
    assert runner().forward(step("EXTEND", [9])) == 1
    assert told == []
    assert caplog.text.count("prefills are not measured") == 1


class Device:
    """Stand-in for torch's module of a device, such as `torch.cuda`. Times are in milliseconds
    since the device's start. `queued_ms`: the time at which all queued work will have ended.
    `computed_ms`: the current time; the device has completed the work that ends until this time.
    """

    def __init__(self) -> None:
        self.queued_ms = self.computed_ms = 0.0
        self.events = 0
        # The number, from 1, of the event whose recording fails; 0 if none fails.
        self.failing = 0

    def Event(self, *, enable_timing: bool) -> "Event":  # noqa: N802
        assert enable_timing
        self.events += 1
        return Event(self, fails=self.events == self.failing)


class Event:
    def __init__(self, device: Device, fails: bool) -> None:
        self._device = device
        self._fails = fails

    def record(self) -> None:
        if self._fails:
            raise RuntimeError("out of memory")
        self.at_ms = self._device.queued_ms

    def query(self) -> bool:
        return self.at_ms <= self._device.computed_ms

    def elapsed_time(self, end: "Event") -> float:
        """Returns the milliseconds from this event to `end`; as in torch, the device must have
        completed both events.
        """
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


class DeviceRunner(Runner):
    """A runner on a GPU: `forward` queues work that takes `milliseconds` on the device, and returns
    immediately.
    """

    device = "cuda:1"

    def __init__(self, on: Device) -> None:
        super().__init__()
        self._on = on

    def forward(self, batch: Any, milliseconds: float = 1.0) -> int:
        self._on.queued_ms += milliseconds
        return 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    def module(name: str) -> Device:
        assert name == "cuda:1"
        return device

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_device_module=module))
    return device


@pytest.fixture
def told_by_device(device: Device) -> tuple[DeviceRunner, list[tuple[int, int, float]]]:
    """Returns a watched runner on a GPU, and the list of the recorded prefills: earlier tokens,
    computed tokens, seconds.
    """
    runner = type("ModelRunner", (DeviceRunner,), {"forward": DeviceRunner.forward})
    prefills, told = Prefills(), []
    assert prefills.watch(runner) == ""
    prefills.record = lambda before, tokens, seconds: told.append((before, tokens, seconds))
    return runner(device), told


def test_events_measure_prefills_on_device(device: Device, told_by_device: Any) -> None:
    runner, told = told_by_device
    device.queued_ms = 5000.0  # work of earlier steps
    assert runner.forward(step("EXTEND", [100], [28]), milliseconds=1500.0) == 1
    runner.forward(step("DECODE", None), milliseconds=40.0)
    runner.forward(step("EXTEND", [64], [5]), milliseconds=250.0)
    assert told == [], "no prefill may be recorded before the device has computed it"
    # A prefill that the device has completed is recorded in the next step of any kind.
    device.computed_ms = 6500.0
    assert told == []
    runner.forward(step("DECODE", None))
    assert told == [(28, 100, 1.5)]
    device.computed_ms = device.queued_ms
    runner.forward(step("EXTEND", [8, 8]))
    assert told == [(28, 100, 1.5), (5, 64, 0.25)]
    runner.forward(step("DECODE", None))
    assert len(told) == 2
    assert device.events == 4, "only measured steps may record events, two each"


def test_number_of_pending_prefills_is_bounded(device: Device, told_by_device: Any) -> None:
    runner, told = told_by_device
    for tokens in range(2, PENDING_MAX + 6):
        runner.forward(step("EXTEND", [tokens]))
    device.computed_ms = device.queued_ms
    runner.forward(step("DECODE", None))
    assert [tokens for _, tokens, _ in told] == list(range(6, PENDING_MAX + 6))


@pytest.mark.parametrize("failing", [3, 4], ids=["beginning", "end"])
def test_failed_event_ends_measuring(
    device: Device, told_by_device: Any, caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    runner, told = told_by_device
    device.failing = failing
    for _ in range(3):
        assert runner.forward(step("EXTEND", [9])) == 1
    device.computed_ms = device.queued_ms
    assert runner.forward(step("EXTEND", [9])) == 1
    assert told == []
    assert device.events == failing
    assert caplog.text.count("prefills are not measured (out of memory)") == 1
