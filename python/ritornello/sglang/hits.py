"""Prefix lengths that can be restored if a page consists of parts in several pools."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ALL = "all_pages"
TRAILING = "trailing_pages"
GROUPS = "block_groups"


@dataclass(frozen=True, slots=True)
class RestorablePrefixes:
    """`pools`: the longest prefix that each pool alone allows, without pools that allow no prefix.
    `restorable`: the prefix lengths in pages, ascending, that all pools allow.
    """

    pools: dict[str, int] = field(default_factory=dict)
    restorable: list[int] = field(default_factory=list)

    @property
    def pages(self) -> int:
        return self.restorable[-1] if self.restorable else 0


@dataclass(frozen=True, slots=True)
class Presence:
    """The leading pages that are stored for a side pool. `window`: pages required at the end of a
    prefix, under the policy `trailing_pages`.
    """

    pool: str
    policy: str
    window: int
    pages: Sequence[bool]


def restorable_prefixes(kv: str, kv_pages: int, sides: Iterable[Presence]) -> RestorablePrefixes:
    """Combines the pools. `kv_pages`: leading pages of the pool `kv`. An unknown policy allows
    nothing. Key groups of blocks (`block_groups`) never limit a prefix, and are omitted from the
    result.
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
