"""Finds the prefixes that SGLang can restore if each page has parts in several of its host pools.
The main pool, `kv`, needs all pages of a prefix. For every other pool (side pool) SGLang names a
policy: with `all_pages` the pool needs all pages too, with `trailing_pages` the last few, and with
`block_groups` no page.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    from ritornello._core import Scope

ALL = "all_pages"
TRAILING = "trailing_pages"
GROUPS = "block_groups"


@dataclass(frozen=True, slots=True)
class RestorablePrefixes:
    """`pools`: by pool, the length in pages of the longest prefix for which the pool has the pages
    that it needs; pools without such a prefix are omitted. `restorable`: the lengths, ascending, of
    the prefixes for which every pool has the pages that it needs.
    """

    pools: dict[str, int] = field(default_factory=dict)
    restorable: list[int] = field(default_factory=list)

    @property
    def pages(self) -> int:
        return self.restorable[-1] if self.restorable else 0


@dataclass(frozen=True, slots=True)
class Presence:
    """Which pages are stored for a side pool: page `i` if `pages[i]` is true. `window`: number of
    pages at the end of a prefix that the policy `trailing_pages` requires.
    """

    pool: str
    policy: str
    window: int
    pages: Sequence[bool]


@dataclass(frozen=True, slots=True)
class SidePool:
    """A side pool in a lookup. `scopes`: one for each part of a page; none if the storage does not
    have the pool. `window`: as in `Presence`.
    """

    pool: str
    policy: str
    window: int
    scopes: "Sequence[Scope]" = ()

    @classmethod
    def of(cls, transfer: "PoolTransfer", scopes: "Sequence[Scope]") -> "SidePool":
        """Returns the pool of SGLang's transfer, which has a key for each page of the window."""
        policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
        return cls(transfer.name, policy, len(transfer.keys or ()), scopes)

    @property
    def is_served(self) -> bool:
        """Whether any prefix can be restored: the policy is known, and the storage has the pool if
        the policy needs pages.
        """
        return self.policy == GROUPS or (self.policy in (ALL, TRAILING) and bool(self.scopes))

    def first_page(self, length: int) -> int:
        """Returns the first page of the window that a prefix of `length` pages needs."""
        return max(length - max(self.window, 1), 0)

    def in_all_scopes(self, found: Sequence[Sequence[bool]]) -> list[bool]:
        """Returns which pages are complete. `found[i][j]`: whether scope `i` has page `j`."""
        return [all(page) for page in zip(*found, strict=True)]

    def presence(self, pages: Sequence[bool]) -> Presence:
        return Presence(self.pool, self.policy, self.window, pages)


def restorable_prefixes(kv: str, kv_pages: int, sides: Iterable[Presence]) -> RestorablePrefixes:
    """Returns the prefixes for which all pools have the pages that they need. `kv_pages`: number of
    leading pages that the main pool, named `kv`, has. A side pool with an unknown policy permits no
    prefix; with the policy `block_groups` it permits every prefix and is omitted from the result.
    """
    pools = {kv: kv_pages} if kv_pages else {}
    restorable = list(range(1, kv_pages + 1))
    for side in sides:
        if side.policy == GROUPS:
            continue
        allowed = _allowed(side, kv_pages)
        if allowed:
            pools[side.pool] = max(allowed)
        restorable = [pages for pages in restorable if pages in allowed]
    return RestorablePrefixes(pools, restorable)


def _allowed(side: Presence, kv_pages: int) -> set[int]:
    if side.policy == ALL:
        window = kv_pages
    elif side.policy == TRAILING:
        window = max(side.window, 1)
    else:
        return set()
    allowed = set()
    unbroken = 0
    for pages, present in enumerate(side.pages[:kv_pages], 1):
        unbroken = unbroken + 1 if present else 0
        if unbroken >= min(window, pages):
            allowed.add(pages)
    return allowed
