"""From vLLM's registered KV caches to a `PagePool`: where the bytes of block `i` lie.

A layer's block is opaque: its logical shape says nothing reliable about what is where inside it
(on CPUs keys are packed per instruction set). All that is asked of a cache is that its first
dimension counts blocks and that each block is one contiguous span. Strides are trusted, shapes
are not.
"""

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ritornello._core import PagePool


class CacheTensor(Protocol):
    """What is used of a torch tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def device(self) -> Any: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


class LayoutError(ValueError):
    """These caches cannot be seen as blocks of opaque bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Block `i` is `block_bytes` bytes at `base + i * stride`."""

    base: int
    block_bytes: int
    stride: int


def spans(caches: Mapping[str, CacheTensor], blocks: int) -> list[Span]:
    """One span a layer, in the order of the layers' numbers; neighbours that touch become one
    (an engine that keeps all layers of a block together then moves it as one piece). Layers that
    share another layer's cache add nothing.
    """
    found: list[Span] = []
    seen: set[int] = set()
    for name in sorted(caches, key=_natural):
        span = _span(name, caches[name], blocks)
        if span.base in seen:
            continue
        seen.add(span.base)
        last = found[-1] if found else None
        if last and last.stride == span.stride and last.base + last.block_bytes == span.base:
            merged = last.block_bytes + span.block_bytes
            if merged <= last.stride:
                found[-1] = Span(last.base, merged, last.stride)
                continue
        found.append(span)
    if not found:
        raise LayoutError("no KV caches were registered")
    return found


def page_pool(found: Iterable[Span], blocks: int) -> "PagePool":
    """The pool of these spans. It refers to the engine's memory and does not keep it alive: the
    caller holds the tensors for as long as the pool is used.
    """
    from ritornello._core import PagePool

    spans = list(found)
    buffers = [
        (ctypes.c_ubyte * ((blocks - 1) * s.stride + s.block_bytes)).from_address(s.base)
        for s in spans
    ]
    return PagePool(buffers, [s.block_bytes for s in spans], strides=[s.stride for s in spans])


def _span(name: str, cache: CacheTensor, blocks: int) -> Span:
    device = str(getattr(cache.device, "type", cache.device))
    if device != "cpu":
        raise LayoutError(f"{name}: its KV cache is in {device} memory")
    shape, strides, size = tuple(cache.shape), tuple(cache.stride()), cache.element_size()
    if not shape or blocks < 1 or shape[0] % blocks:
        raise LayoutError(f"{name}: the first of {shape} does not count {blocks} blocks")
    row = size * _dense_elements(name, shape[1:], strides[1:])
    stride = size * strides[0]
    per_block = shape[0] // blocks
    if per_block > 1 and stride != row:
        raise LayoutError(f"{name}: a block is {per_block} rows that do not touch")
    if stride < row:
        raise LayoutError(f"{name}: blocks overlap ({row} bytes every {stride})")
    return Span(cache.data_ptr(), row * per_block, stride * per_block)


def _dense_elements(name: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements of one row, which must fill its memory in some order."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            raise LayoutError(f"{name}: a block of shape {tuple(shape)} is not contiguous")
        expected *= length
    return expected


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts "layers.10" after "layers.9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
