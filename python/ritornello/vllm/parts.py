"""The parts of a page: what one KV cache group keeps of it, and into which objects that is split.

A model with several kinds of attention keeps several groups of layers, each with its own blocks,
and each needs other pages of a sequence to go on from: full attention `ALL` of them, a sliding
window those it reaches back to, a recurrent state the last one. So the lengths at which a sequence
can be resumed are a set, and not simply everything up to a number.

A part is stored in objects that are named by what they hold and not by who wrote them: the layers
of one pipeline stage, a few KV heads each. Their head ranges follow from the model alone (`units`),
so that engines split over another number of tensor-parallel workers find them: one that holds twice
the heads loads twice the objects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# An object is a run of heads of at least so many bytes, and a page has at most so many of them a
# stage: below, the bookkeeping a page costs shows beside the time to read it.
OBJECT_BYTES = 64 << 10
UNITS_MAX = 8
# A step waits for so many bytes of every object at a time: less is read no faster.
GROUP_BYTES = 128 << 10

Heads = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rule:
    """Which pages of a sequence are needed to go on from its end: those that hold one of its last
    `reach` tokens; None: all of them. (A state that is kept at the end of pages reaches back 1.)
    """

    reach: int | None = None

    def needed(self, pages: int, page_tokens: int) -> range:
        """Of a sequence of `pages` full pages."""
        if self.reach is None:
            return range(pages)
        return range(max(pages * page_tokens - self.reach, 0) // page_tokens, pages)


ALL = Rule()


def trailing(window: int) -> Rule:
    """A window of `window` tokens: the next token sees itself and `window - 1` before it."""
    return Rule(max(window - 1, 0))


@dataclass(frozen=True, slots=True)
class Part:
    """One KV cache group over the whole model. `head_bytes`: one head of one layer in a block.
    `units`: head ranges, each stored for itself; `shared`: they depend on the model alone.
    `stages`: the layers that each pipeline stage holds of this group, maybe none.
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
        """The pages that a sequence of `tokens` needs to go on."""
        return self.rule.needed(tokens // self.page_tokens, self.page_tokens)

    def object_bytes(self, stage: int, unit: int) -> int:
        first, end = self.units[unit]
        return len(self.stages[stage]) * (end - first) * self.head_bytes

    def layer_groups(self, stage: int) -> tuple[int, ...]:
        """Where groups of layers end among those of a stage: the fewest that make `GROUP_BYTES` of
        the smallest object.
        """
        layers = len(self.stages[stage])
        least = self.head_bytes * min(end - first for first, end in self.units)
        size = -(-GROUP_BYTES // least)
        return (*(size * n for n in range(1, layers // size)), layers)


class Slice(NamedTuple):
    """What one object of a page holds: part number, pipeline stage, unit (each an index)."""

    part: int
    stage: int
    unit: int


def slices(parts: Sequence[Part]) -> list[Slice]:
    """All objects that make one page, those of parts that need all pages first: they say how long
    a prefix can be at most.
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
    """Objects that are named by the same keys, of `parts` that need the same pages."""

    rule: Rule
    page_tokens: int
    parts: tuple[int, ...]
    slices: tuple[Slice, ...]


def bundles(parts: Sequence[Part]) -> list[Bundle]:
    """All objects that make one page, in the order of `slices`."""
    found: dict[tuple[Rule, int], list[Slice]] = {}
    for piece in slices(parts):
        part = parts[piece.part]
        found.setdefault((part.rule, part.page_tokens), []).append(piece)
    return [
        Bundle(rule, tokens, tuple(dict.fromkeys(of.part for of in made)), tuple(made))
        for (rule, tokens), made in found.items()
    ]


def heads_of(rank: int, ranks: int, kv_heads: int) -> Heads:
    """The KV heads that worker `rank` of `ranks` holds: its share, or, where there are more
    workers than heads, one head that its neighbours hold as well.
    """
    if ranks > kv_heads:
        first = rank * kv_heads // ranks
        return first, first + 1
    share = kv_heads // ranks
    return rank * share, (rank + 1) * share


def units_of(
    kv_heads: int, ranks: int, head_bytes: int, *, sliceable: bool
) -> tuple[tuple[Heads, ...], bool]:
    """The head ranges that are stored each for itself, and whether they depend on the model alone.
    `head_bytes`: of one head, all layers of the model, in a block. They depend on the number of
    workers too where the layout does not let heads apart, or a worker holds less than a unit.
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
    """The units of `part` that a worker holds."""
    first, end = heads_of(rank, ranks, part.kv_heads)
    return [number for number, (a, b) in enumerate(part.units) if first <= a and b <= end]


def is_writer(part: Part, unit: int, rank: int, ranks: int) -> bool:
    """Whether this worker stores `unit`: of several that hold the same heads the first one does."""
    return rank == next(r for r in range(ranks) if unit in held_units(part, r, ranks))


def longest_resumable(
    parts: Sequence[Part],
    present: Mapping[Slice, Sequence[bool]],
    most: int,
    alignment: int,
) -> int:
    """The largest number of tokens, at most `most` and a multiple of `alignment`, at which a
    sequence can be resumed with the pages that are `present` (by slice, from the first page on);
    0 if there is none. Slices that are not named are taken to be there.
    """
    before = [(parts[piece.part], _runs(there)) for piece, there in present.items()]
    for tokens in range(most // alignment * alignment, 0, -alignment):
        if all(runs[tokens // p.page_tokens] >= len(p.needed(tokens)) for p, runs in before):
            return tokens
    return 0


def _runs(present: Sequence[bool]) -> list[int]:
    """How many pages that are there end with page `i - 1`, for every `i`."""
    runs = [0]
    for there in present:
        runs.append(runs[-1] + 1 if there else 0)
    return runs
