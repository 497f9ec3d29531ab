"""The KV memory of a worker on a device: the names of the arrangements of its blocks, the order of
saves and the engine's work, and a device that fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from ritornello.vllm import device_choice
from ritornello.vllm.kv_memory import DeviceMemory, HostMemory


@dataclass
class Cache:
    """A torch tensor's shape and strides, in elements."""

    shape: Sequence[int]
    strides: Sequence[int]
    device: Any = "cuda"

    def stride(self) -> Sequence[int]:
        return self.strides

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return 4096


# Blocks of 8 heads and 16 tokens: `TOKENS_FIRST` is vLLM's default arrangement on a GPU,
# `HEADS_FIRST` the arrangement that vLLM uses for its offloading. `ONE_HEAD`: blocks of a single
# head.
TOKENS_FIRST = Cache((64, 8, 16, 256), (32768, 256, 2048, 1))
HEADS_FIRST = Cache((64, 8, 16, 256), (32768, 4096, 256, 1))
ONE_HEAD = Cache((64, 1, 16, 256), (4096, 7, 256, 1))


def arrangement(cache: Cache, backend: str = "FLASH_ATTN", apart: int = 0) -> str:
    return DeviceMemory(1, lambda _: backend).arrangement({"l.0": cache}, ["l.0"], apart)


def test_orders_of_dimensions_have_different_names() -> None:
    assert arrangement(TOKENS_FIRST) == "FLASH_ATTN/2.1.3"
    assert arrangement(HEADS_FIRST) == "FLASH_ATTN/1.2.3"
    # The name omits the dimension of heads if its length is 1, or if each head is one contiguous
    # range of a block, because such heads are stored separately.
    assert arrangement(ONE_HEAD, apart=1) == arrangement(HEADS_FIRST, apart=8) == "FLASH_ATTN/2.3"


def test_attention_backends_have_different_names() -> None:
    assert arrangement(HEADS_FIRST) != arrangement(HEADS_FIRST, "TRITON_ATTN")


def test_layers_of_different_arrangements_are_named_together() -> None:
    backends = {"l.0": "A", "l.1": "B"}
    memory = DeviceMemory(1, backends.__getitem__)
    caches = {"l.1": HEADS_FIRST, "l.0": TOKENS_FIRST}
    assert memory.arrangement(caches, ["l.1", "l.0"], 0) == "A/2.1.3+B/1.2.3"


def test_arrangement_in_host_memory_has_no_name() -> None:
    assert HostMemory().arrangement({"l.0": HEADS_FIRST}, ["l.0"], 8) == ""


@pytest.mark.parametrize("is_ordered", [True, False])
def test_protect_makes_stream_of_the_engine_wait_for_put(
    monkeypatch: pytest.MonkeyPatch, is_ordered: bool
) -> None:
    memory = DeviceMemory(1, lambda _: "FLASH_ATTN")
    monkeypatch.setattr(memory, "stream", lambda: 7)
    ordered: list[int | None] = []

    class Ticket:
        def order(self, stream: int | None) -> bool:
            ordered.append(stream)
            return is_ordered

    ticket: Any = Ticket()
    assert memory.protect(ticket) is is_ordered
    assert ordered == [7]


def test_broken_device_makes_memory_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory(1, lambda _: "FLASH_ATTN")
    assert memory.problem() == ""
    device = SimpleNamespace(broken=False)
    monkeypatch.setattr(memory, "_device", device)
    assert memory.problem() == ""
    device.broken = True
    assert "restart the engine" in memory.problem()


@pytest.mark.parametrize("value", ["yes", "1", "cuda"])
def test_unknown_device_choice_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(device_choice.VARIABLE, value)
    with pytest.raises(ValueError, match=f"{device_choice.VARIABLE} is '{value}': set it to own"):
        device_choice.chosen()
