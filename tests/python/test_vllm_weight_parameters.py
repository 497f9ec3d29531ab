"""Changes of a model's parameters and of LoRA adapters are detected and counted, with stand-ins for
vLLM.
"""

import errno
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weight_support import Model, Parameter, sample

from ritornello.vllm.weights import counters
from ritornello.vllm.weights.adapters import Adapters
from ritornello.vllm.weights.counters import SLOT, ChangeCounters, count_in
from ritornello.vllm.weights.parameters import Parameters


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def parameters(model: Model) -> Parameters:
    return Parameters(model.named_modules, sample)


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


def test_excluded_parameters_are_not_compared(model: Model) -> None:
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


def test_adapter_with_other_files_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"first")
    at = file.stat()
    adapters = Adapters()
    assert not adapters.replaced("a", str(tmp_path), in_place=False)
    assert not adapters.replaced("a", str(tmp_path), in_place=True), (
        "an adapter whose files are unchanged must not count as replaced"
    )
    file.write_bytes(b"other")
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert adapters.replaced("a", str(tmp_path), in_place=False), (
        "a changed file with its old mtime must be detected"
    )
    assert not adapters.replaced("a", str(tmp_path), in_place=True)
    assert not adapters.replaced("b", str(tmp_path), in_place=True), (
        "the first load of an adapter must not count as a replacement"
    )


def test_adapter_without_files_is_replaced_by_load_in_place() -> None:
    adapters = Adapters()
    assert not adapters.replaced("a", "somebody/adapter", in_place=False)
    assert not adapters.replaced("a", "somebody/adapter", in_place=False)
    assert adapters.replaced("a", "somebody/adapter", in_place=True)


def test_adapter_in_home_folder_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"first")
    adapters = Adapters()
    assert not adapters.replaced("a", "~/adapter", in_place=False)
    assert not adapters.replaced("a", "~/adapter", in_place=True)
    file.write_bytes(b"second")
    assert adapters.replaced("a", "~/adapter", in_place=False)


def test_adapter_of_hub_is_replaced_by_other_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots: list[Path] = []

    def snapshot_download(name: str, *, local_files_only: bool) -> str:
        assert (name, local_files_only) == ("somebody/adapter", True)
        if not snapshots:
            raise FileNotFoundError("the hub's cache has no snapshot")
        return str(snapshots[-1])

    def download(revision: str) -> None:
        snapshots.append(tmp_path / revision)
        snapshots[-1].mkdir()
        (snapshots[-1] / "adapter_model.safetensors").write_text(revision)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    adapters = Adapters()
    assert not adapters.replaced("a", "somebody/adapter", in_place=False)
    download("one")
    assert not adapters.replaced("a", "somebody/adapter", in_place=False), (
        "the first download of an adapter must not count as a replacement"
    )
    assert not adapters.replaced("a", "somebody/adapter", in_place=True)
    download("two")
    assert adapters.replaced("a", "somebody/adapter", in_place=False)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert adapters.replaced("a", "somebody/adapter", in_place=True), (
        "a snapshot of another hub must not hide a load in place"
    )


def test_change_counters_outlive_their_file() -> None:
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


def test_full_shared_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, size: int) -> None:
        assert (offset, size) == (0, 3 * SLOT)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(counters, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        ChangeCounters.create(3)
    assert not list(tmp_path.iterdir())


def test_raise_to_a_reached_count_does_not_write() -> None:
    ours, path = ChangeCounters.create(1)
    ours.add(0)
    with path.open("rb") as file:
        read_only = ChangeCounters(mmap.mmap(file.fileno(), SLOT, access=mmap.ACCESS_READ), 1)
    path.unlink()
    read_only.raise_to(0, 0)
    read_only.raise_to(0, 1)
    assert ours.count(0) == 1
    with pytest.raises(TypeError):
        read_only.raise_to(0, 2)
