"""Memory ranges of an engine's blocks, and the `PagePool` over them."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ritornello._core import PagePool


@dataclass(frozen=True, slots=True)
class Span:
    """The memory of one part of every block: of block `i`, `block_bytes` bytes at address
    `base + i * stride`.
    """

    base: int
    block_bytes: int
    stride: int


def page_pool(found: Iterable[Span], blocks: int) -> "PagePool":
    """Returns a pool over the spans. The pool does not keep the engine's memory alive: the caller
    must hold the tensors while the pool is in use.
    """
    from ritornello._core import PagePool

    spans = list(found)
    buffers = [
        (ctypes.c_ubyte * ((blocks - 1) * s.stride + s.block_bytes)).from_address(s.base)
        for s in spans
    ]
    return PagePool(buffers, [s.block_bytes for s in spans], strides=[s.stride for s in spans])
