"""The memory ranges of a block follow from the strides of vLLM's KV tensors, whatever the order in
which a block stores its dimensions.
"""

from collections.abc import Sequence
from math import prod

import pytest

from ritornello.connector.strided_blocks import Span
from ritornello.vllm.handshake import GroupMemory
from ritornello.vllm.layout import LayoutError, group_memory, spans


class Tensor:
    """Stand-in for a bfloat16 tensor at an address."""

    def __init__(
        self, address: int, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> None:
        self.address, self.shape, self.device = address, shape, "cpu"
        self.strides = strides or [prod(shape[i + 1 :]) for i in range(len(shape))]

    def stride(self) -> Sequence[int]:
        return self.strides

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self.address


SHAPE = (8, 2, 32, 128)
ROW = 2 * 32 * 128 * 2


def test_layers_are_sorted_by_number() -> None:
    caches = {f"layers.{i}.attn": Tensor(i << 20, SHAPE) for i in (10, 2, 1)}
    names = tuple(f"layers.{i}.attn" for i in (1, 2, 10))
    assert group_memory(caches, caches, 2, 8) == GroupMemory(names, ROW, 2, True)
    assert spans(caches, names, 8) == [Span(i << 20, ROW, ROW) for i in (1, 2, 10)]


def test_permuted_block_is_one_span() -> None:
    strides = (2 * 32 * 128, 128, 2 * 128, 1)
    assert spans({"l.0": Tensor(4096, SHAPE, strides)}, ["l.0"], 8) == [Span(4096, ROW, ROW)]


def test_layers_adjacent_in_each_block_are_one_span() -> None:
    stride = 3 * 2 * 32 * 128
    strides = (stride, 32 * 128, 128, 1)
    caches = {f"l.{i}": Tensor(4096 + i * ROW, SHAPE, strides) for i in range(3)}
    assert spans(caches, caches, 8) == [Span(4096, 3 * ROW, 3 * ROW)]


def test_layers_in_consecutive_tensors_are_separate_spans() -> None:
    caches = {f"l.{i}": Tensor(4096 + i * 8 * ROW, SHAPE) for i in range(2)}
    assert len(spans(caches, caches, 8)) == 2


def test_cache_shared_by_layers_counts_once() -> None:
    shared = Tensor(4096, SHAPE)
    assert group_memory({"l.0": shared, "l.1": shared}, ["l.0", "l.1"], 2, 8).layers == ("l.0",)


def test_block_may_be_several_rows_of_a_tensor() -> None:
    assert spans({"l.0": Tensor(0, SHAPE)}, ["l.0"], 4) == [Span(0, 2 * ROW, 2 * ROW)]


@pytest.mark.parametrize(
    ("tensor", "blocks", "why"),
    [
        (Tensor(0, (2, 8, 32, 128)), 8, "is no multiple of 8 blocks"),
        (Tensor(0, SHAPE, (2 * 32 * 256, 32 * 256, 256, 1)), 8, "not contiguous"),
        (Tensor(0, SHAPE, (32 * 128, 32 * 128, 128, 1)), 8, "overlap"),
        (Tensor(0, SHAPE, (3 * 32 * 128, 32 * 128, 128, 1)), 4, "rows with gaps"),
    ],
)
def test_invalid_layouts_are_refused(tensor: Tensor, blocks: int, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        spans({"l.0": tensor}, ["l.0"], blocks)


def test_memory_of_unexpected_device_is_refused() -> None:
    tensor = Tensor(0, SHAPE)
    tensor.device = "cuda"
    with pytest.raises(LayoutError, match="cuda memory"):
        group_memory({"l.0": tensor}, ["l.0"], 2, 8)
    assert group_memory({"l.0": tensor}, ["l.0"], 2, 8, "cuda").layers == ("l.0",)
    with pytest.raises(LayoutError, match="cpu memory"):
        group_memory({"l.0": Tensor(0, SHAPE)}, ["l.0"], 2, 8, "cuda")


def test_layer_without_cache_is_refused() -> None:
    with pytest.raises(LayoutError, match="no KV cache was registered"):
        group_memory({}, ["l.0"], 2, 8)


def test_unequal_blocks_are_refused() -> None:
    caches = {"l.0": Tensor(0, SHAPE), "l.1": Tensor(1 << 20, (8, 2, 32, 64))}
    with pytest.raises(LayoutError, match="differ in size"):
        group_memory(caches, caches, 2, 8)


def test_spans_select_single_head() -> None:
    caches = {f"l.{i}": Tensor(i << 20, SHAPE) for i in range(2)}
    found = spans(caches, caches, 8, (1, 2, 2))
    assert found == [Span((i << 20) + ROW // 2, ROW // 2, ROW) for i in range(2)]


@pytest.mark.parametrize(
    ("tensor", "heads", "blocks", "apart"),
    [
        (Tensor(0, SHAPE), 2, 8, True),
        (Tensor(0, (8, 1, 32, 128)), 1, 8, True),
        # The heads of each token are adjacent, so a head of a block is not one contiguous range.
        (Tensor(0, SHAPE, (2 * 32 * 128, 128, 2 * 128, 1)), 2, 8, False),
        # A block is two rows of the tensor, so a head of a block is not one contiguous range.
        (Tensor(0, SHAPE), 2, 4, False),
        # The second dimension has length 4, so it is not the dimension of the two heads.
        (Tensor(0, (8, 4, 32, 64)), 2, 8, False),
    ],
)
def test_head_major_layout_is_detected(
    tensor: Tensor, heads: int, blocks: int, apart: bool
) -> None:
    assert group_memory({"l.0": tensor}, ["l.0"], heads, blocks).head_major is apart
