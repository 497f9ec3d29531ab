"""Builds a `PagePool` over the memory of an SGLang host pool.

A host pool returns for each page a list of memory ranges, its pieces (`get_page_buffer_meta`).
Their number and order depend on the layout and the kind of the pool. This module requires that
piece `k` of page `i` is at `base[k] + i * stride[k]`, and checks this on the first two pages and
the last page.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ritornello.connector.strided_blocks import Span, page_pool

if TYPE_CHECKING:
    from ritornello._core import PagePool

# Addresses and sizes of the pieces of some pages, in page order.
Pieces = tuple[Sequence[int], Sequence[int]]
# Returns the pieces of one page, by its number.
Meta = Callable[[int], Pieces]


class PagesError(ValueError):
    """A host pool has no pages, its pages are not evenly spaced pieces of memory, or their pieces
    cannot be divided into the requested groups.
    """


def spans(meta: Meta, pages: int) -> list[Span]:
    """Returns one span for each piece, in SGLang's order of the pieces."""
    if pages < 1:
        raise PagesError("the pool has no pages")
    first = _checked(meta(0))
    bases, sizes = first
    if pages == 1:
        return [Span(base, size, size) for base, size in zip(bases, sizes, strict=True)]
    second, last = _checked(meta(1)), _checked(meta(pages - 1))
    if second[1] != sizes or last[1] != sizes:
        raise PagesError("the pages of the pool differ in size")
    found = []
    for base, size, next_base, last_base in zip(bases, sizes, second[0], last[0], strict=True):
        stride = next_base - base
        if stride < size or last_base != base + (pages - 1) * stride:
            raise PagesError("the pages of the pool are not evenly spaced")
        found.append(Span(base, size, stride))
    return found


def pools(meta: Meta, pages: int, parts: int = 1) -> "list[PagePool]":
    """Returns one pool for each of `parts` equal groups of a page's pieces. The pools do not keep
    the engine's memory alive: the caller must hold the host pool while they are used.
    """
    found = spans(meta, pages)
    if len(found) % parts:
        raise PagesError(f"the {len(found)} pieces of a page cannot be divided into {parts} groups")
    each = len(found) // parts
    return [page_pool(found[at : at + each], pages) for at in range(0, len(found), each)]


def page_ids(indices: Any, keys: int, page_tokens: int) -> list[int] | None:
    """Returns the page numbers of `indices`, the positions of tokens in a host pool; None without
    positions, if they are not as many as `keys` pages have, or if the first position of a page is
    not the start of a page. Does not check the other positions.
    """
    if indices is None or len(indices) != keys * page_tokens:
        return None
    starts = indices[::page_tokens].tolist()
    if any(start % page_tokens for start in starts):
        return None
    return [start // page_tokens for start in starts]


def _checked(pieces: Pieces) -> tuple[list[int], list[int]]:
    bases, sizes = list(pieces[0]), list(pieces[1])
    if not bases or len(bases) != len(sizes) or min(sizes) < 1 or min(bases) < 1:
        raise PagesError("the pool names no pieces, or pieces without an address or a size")
    return bases, sizes
