"""Finds the memory of block `i` in vLLM's KV cache tensors, as spans.

A layer's block is opaque: its logical shape does not tell the arrangement inside (on CPUs, keys are
packed by instruction set). The first dimension of a cache must count blocks, or the rows of all
blocks, and each block must be one contiguous span. The meaning of the further dimensions is
ignored, with one exception: if the second dimension counts the KV heads and is the outermost one in
the block, each head is one span of the block. vLLM's CPU attention stores the keys of a head and
then its values in `cache[block, head]`, for every instruction set.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

from ritornello.connector.strided_blocks import Span
from ritornello.vllm.handshake import GroupMemory


class CacheTensor(Protocol):
    """The used part of a torch tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def device(self) -> Any: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


class LayoutError(ValueError):
    """The KV cache tensors have a layout that is not supported, or that differs from the layout in
    the engine's `Identity`.
    """


def group_memory(
    caches: Mapping[str, CacheTensor],
    layers: Iterable[str],
    heads: int,
    blocks: int,
    device_type: str = "cpu",
) -> GroupMemory:
    """Returns this worker's memory of a KV cache group: its layers that do not share another
    layer's cache, sorted by number. `heads`: KV heads of the group on this worker, as vLLM declares
    them. `device_type`: torch's name of the device that must have the tensors. LayoutError if the
    tensors have another device or an unsupported layout.
    """
    sizes, orders, names = set(), set(), []
    seen: set[int] = set()
    for name in sorted(layers, key=_natural):
        if name not in caches:
            raise LayoutError(f"layer {name}: no KV cache was registered")
        _check_device(name, caches[name], device_type)
        span = _span(name, caches[name], blocks)
        if span.base in seen:
            continue
        seen.add(span.base)
        names.append(name)
        sizes.add(span.block_bytes)
        orders.add(_head_bytes(caches[name], heads, blocks) * heads == span.block_bytes)
    if len(sizes) > 1:
        raise LayoutError(
            f"the blocks of the {len(names)} layers from {names[0]} to {names[-1]} differ in size"
        )
    return GroupMemory(tuple(names), max(sizes, default=0), heads, orders == {True})


def spans(
    caches: Mapping[str, CacheTensor],
    layers: Iterable[str],
    blocks: int,
    heads: tuple[int, int, int] | None = None,
) -> list[Span]:
    """Returns one span for each layer, in the given order. Spans of consecutive layers that are
    adjacent in memory are merged: if all layers of a block are adjacent, the block is one span.
    `heads`: (first, end, all) selects the heads `first` to `end` - 1 of the `all` heads in a block.
    """
    found: list[Span] = []
    for name in layers:
        span = _span(name, caches[name], blocks)
        if heads is not None:
            first, end, count = heads
            head = span.block_bytes // count
            span = Span(span.base + first * head, (end - first) * head, span.stride)
        last = found[-1] if found else None
        if last and last.stride == span.stride and last.base + last.block_bytes == span.base:
            merged = last.block_bytes + span.block_bytes
            if merged <= last.stride:
                found[-1] = Span(last.base, merged, last.stride)
                continue
        found.append(span)
    return found


def _check_device(name: str, cache: CacheTensor, device_type: str) -> None:
    device = str(getattr(cache.device, "type", cache.device))
    if device != device_type:
        raise LayoutError(f"{name}: its KV cache is in {device} memory, expected: {device_type}")


def _span(name: str, cache: CacheTensor, blocks: int) -> Span:
    shape, strides, size = tuple(cache.shape), tuple(cache.stride()), cache.element_size()
    if not shape or blocks < 1 or shape[0] % blocks:
        raise LayoutError(
            f"{name}: the first dimension of {shape} is no multiple of {blocks} blocks"
        )
    row = size * _dense_elements(name, shape[1:], strides[1:])
    stride = size * strides[0]
    per_block = shape[0] // blocks
    if per_block > 1 and stride != row:
        raise LayoutError(f"{name}: a block is {per_block} rows with gaps between them")
    if stride < row:
        raise LayoutError(
            f"{name}: blocks overlap: a row of {row} bytes begins every {stride} bytes"
        )
    return Span(cache.data_ptr(), row * per_block, stride * per_block)


def _head_bytes(cache: CacheTensor, heads: int, blocks: int) -> int:
    """Returns the bytes of one head if each head is one contiguous range of a block, else 0."""
    shape, strides = tuple(cache.shape), tuple(cache.stride())
    if heads == 1:
        return cache.element_size() * prod(shape[1:]) * (shape[0] // blocks)
    if shape[0] != blocks or len(shape) < 2 or shape[1] != heads:
        return 0
    inside = prod(shape[2:])
    return cache.element_size() * inside if strides[1] == inside else 0


def _dense_elements(name: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements of one row; LayoutError if the row has gaps."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            raise LayoutError(f"{name}: a block of shape {tuple(shape)} is not contiguous")
        expected *= length
    return expected


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key: "layers.10" after "layers.9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
