"""The parts of a page: what one KV cache group stores of it, and the objects it is split into.

A model with several kinds of attention has several groups of layers, each with its own blocks. To
continue a sequence, full attention needs `ALL` pages, a sliding window those within its reach, a
recurrent state the last one. The lengths at which a sequence can be resumed are therefore a set,
not an interval.

A part is stored as objects that are named by their contents, not by their writer: the layers of one
pipeline stage, and a range of KV heads. The head ranges follow from the model alone (`units`), so
that engines with another number of tensor-parallel workers find the objects: a worker with twice
the heads loads twice the objects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Minimum size of an object, and maximum number of objects of a page in a stage. Smaller objects
# would cost more bookkeeping than reading.
OBJECT_BYTES = 64 << 10
UNITS_MAX = 8
# Bytes of each object that a step waits for at a time; smaller reads are no faster.
GROUP_BYTES = 128 << 10

Heads = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rule:
    """The pages that are needed to continue a sequence at its end: those that contain one of its
    last `reach` tokens; None: all pages. (A state that is stored at the end of pages has reach 1.)
    """

    reach: int | None = None

    def needed(self, pages: int, page_tokens: int) -> range:
        """Returns the needed pages of a sequence of `pages` full pages."""
        if self.reach is None:
            return range(pages)
        return range(max(pages * page_tokens - self.reach, 0) // page_tokens, pages)


ALL = Rule()


def trailing(window: int) -> Rule:
    """Returns the rule of a sliding window: the next token sees itself and `window - 1` before
    it.
    """
    return Rule(max(window - 1, 0))


@dataclass(frozen=True, slots=True)
class Part:
    """One KV cache group over the whole model. `head_bytes`: one head of one layer in a block.
    `units`: head ranges, each stored separately. `shared`: the units depend on the model alone.
    `stages`: the group's layers in each pipeline stage, possibly none.
    """

    rule: Rule
    page_tokens: int
    kv_heads: int
    head_dim: int
    head_bytes: int
    dtype: str
    layout: str
    spec: str
    units: tuple[Heads, ...]
    shared: bool
    stages: tuple[tuple[str, ...], ...]

    def needed(self, tokens: int) -> range:
        """Returns the pages that a sequence of `tokens` needs to continue."""
        return self.rule.needed(tokens // self.page_tokens, self.page_tokens)

    def object_bytes(self, stage: int, unit: int) -> int:
        first, end = self.units[unit]
        return len(self.stages[stage]) * (end - first) * self.head_bytes

    def layer_groups(self, stage: int) -> tuple[int, ...]:
        """Returns where groups of layers end in a stage: the smallest groups that have
        `GROUP_BYTES` of the smallest object.
        """
        layers = len(self.stages[stage])
        least = self.head_bytes * min(end - first for first, end in self.units)
        size = -(-GROUP_BYTES // least)
        return (*(size * n for n in range(1, layers // size)), layers)


class Slice(NamedTuple):
    """Contents of one object of a page: indices of part, pipeline stage and unit."""

    part: int
    stage: int
    unit: int


def slices(parts: Sequence[Part]) -> list[Slice]:
    """Returns all objects of a page. Parts that need all pages come first: they bound the
    prefix.
    """
    found = [
        Slice(number, stage, unit)
        for number, part in enumerate(parts)
        for stage, layers in enumerate(part.stages)
        if layers
        for unit in range(len(part.units))
    ]
    return sorted(found, key=lambda piece: parts[piece.part].rule.reach is not None)


class Bundle(NamedTuple):
    """Objects with the same keys, of `parts` that need the same pages."""

    rule: Rule
    page_tokens: int
    parts: tuple[int, ...]
    slices: tuple[Slice, ...]


def bundles(parts: Sequence[Part]) -> list[Bundle]:
    """Returns all objects of a page as bundles, in the order of `slices`."""
    found: dict[tuple[Rule, int], list[Slice]] = {}
    for piece in slices(parts):
        part = parts[piece.part]
        found.setdefault((part.rule, part.page_tokens), []).append(piece)
    return [
        Bundle(rule, tokens, tuple(dict.fromkeys(piece.part for piece in pieces)), tuple(pieces))
        for (rule, tokens), pieces in found.items()
    ]


def heads_of(rank: int, ranks: int, kv_heads: int) -> Heads:
    """Returns the KV heads of worker `rank` of `ranks`: its share or, with more workers than heads,
    one head that neighbouring workers also hold.
    """
    if ranks > kv_heads:
        first = rank * kv_heads // ranks
        return first, first + 1
    share = kv_heads // ranks
    return rank * share, (rank + 1) * share


def units_of(
    kv_heads: int, ranks: int, head_bytes: int, *, sliceable: bool
) -> tuple[tuple[Heads, ...], bool]:
    """Returns the head ranges that are stored separately, and whether they depend on the model
    alone. `head_bytes`: one head in a block, all layers of the model. The ranges also depend on the
    number of workers if heads are not `sliceable`, or a worker holds less than one unit.
    """
    share = max(kv_heads // ranks, 1)
    large = [
        size
        for size in range(1, kv_heads + 1)
        if kv_heads % size == 0
        and size * head_bytes >= OBJECT_BYTES
        and kv_heads // size <= UNITS_MAX
    ]
    size = min(large, default=kv_heads)
    shared = (sliceable or kv_heads == 1) and share % size == 0
    if not shared:
        size = share
    return tuple((first, first + size) for first in range(0, kv_heads, size)), shared


def held_units(part: Part, rank: int, ranks: int) -> list[int]:
    """Returns the units of `part` that a worker holds."""
    first, end = heads_of(rank, ranks, part.kv_heads)
    return [number for number, (a, b) in enumerate(part.units) if first <= a and b <= end]


def is_writer(part: Part, unit: int, rank: int, ranks: int) -> bool:
    """Returns whether this worker stores `unit`: the first of the workers that hold it does."""
    return rank == next(r for r in range(ranks) if unit in held_units(part, r, ranks))


def longest_resumable(
    parts: Sequence[Part],
    present: Mapping[Slice, Sequence[bool]],
    most: int,
    alignment: int,
) -> int:
    """Returns the largest number of tokens, at most `most` and a multiple of `alignment`, at which
    the pages that are `present` suffice to resume; 0 if there is none. `present`: by slice, from
    the first page on. Slices without an entry count as present.
    """
    before = [(parts[piece.part], _runs(pages)) for piece, pages in present.items()]
    for tokens in range(most // alignment * alignment, 0, -alignment):
        if all(runs[tokens // p.page_tokens] >= len(p.needed(tokens)) for p, runs in before):
            return tokens
    return 0


def _runs(present: Sequence[bool]) -> list[int]:
    """Returns, for every `i`, the length of the run of present pages that ends with page `i -
    1`.
    """
    runs = [0]
    for is_present in present:
        runs.append(runs[-1] + 1 if is_present else 0)
    return runs
