"""Where the bytes of block `i` lie in an engine's memory, and the `PagePool` of such blocks."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ritornello._core import PagePool


@dataclass(frozen=True, slots=True)
class Span:
    """Block `i` is `block_bytes` bytes at `base + i * stride`."""

    base: int
    block_bytes: int
    stride: int


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
