"""KV cache groups: which pages each group stores, and the objects that a page is split into.

A model with several kinds of attention has several groups of layers, each with its own blocks. To
continue a sequence, full attention needs `ALL` pages, a sliding window the pages within its reach,
a recurrent state the last page. The lengths at which a sequence can be resumed are therefore a set,
not an interval.

A group's page is stored as objects that are named by their contents, not by their writer: the
layers of one pipeline stage, and a range of KV heads. Where possible the head ranges follow from
the model alone (`head_ranges_of`). In this case engines with a different number of tensor-parallel
workers find the same objects: a worker with twice the heads loads twice the objects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Head ranges that depend on the model alone are at most `HEAD_RANGES_MAX` ranges, each of at least
# `OBJECT_BYTES` in a block (over all layers of the model). If all heads together have fewer bytes,
# they are one range. For smaller objects the work for each object would take longer than reading
# the object.
OBJECT_BYTES = 64 << 10
HEAD_RANGES_MAX = 8
# Loads deliver layers in groups of consecutive layers. An object has at least this number of bytes
# in each group, because smaller reads are no faster. If an object is smaller as a whole, all its
# layers are one group.
GROUP_BYTES = 128 << 10

Heads = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reach:
    """The earlier tokens that a KV cache group reads to compute the next token. Full attention
    reads all pages: `tokens` is None. A sliding window reads the last `tokens` tokens, and needs
    the pages that contain them. A recurrent state (which `CpuPath` does not serve) sums up all
    tokens before it, and needs the last page only: `tokens` is 1.
    """

    tokens: int | None = None

    def pages_needed(self, pages: int, page_tokens: int) -> range:
        """Returns the needed pages of a sequence of `pages` full pages."""
        if self.tokens is None:
            return range(pages)
        return range(max(pages * page_tokens - self.tokens, 0) // page_tokens, pages)


ALL = Reach()


def trailing(window: int) -> Reach:
    """Returns the reach of a sliding window: the next token sees itself and the `window - 1` tokens
    before it.
    """
    return Reach(max(window - 1, 0))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group over the whole model. `head_bytes`: bytes of one head of one layer in a
    block. `layout`: how the bytes of a block are arranged. `spec`: vLLM's description of the group,
    without fields that depend on the number of workers. `head_ranges`: ranges of KV heads, each
    stored separately. `shared`: the head ranges depend on the model alone. `stages`: the group's
    layers in each pipeline stage; a stage may be empty.
    """

    reach: Reach
    page_tokens: int
    kv_heads: int
    head_dim: int
    head_bytes: int
    dtype: str
    layout: str
    spec: str
    head_ranges: tuple[Heads, ...]
    shared: bool
    stages: tuple[tuple[str, ...], ...]

    def needed(self, tokens: int) -> range:
        """Returns the pages that a sequence of `tokens` needs to continue."""
        return self.reach.pages_needed(tokens // self.page_tokens, self.page_tokens)

    def object_bytes(self, stage: int, head_range: int) -> int:
        first, end = self.head_ranges[head_range]
        return len(self.stages[stage]) * (end - first) * self.head_bytes

    def layer_groups(self, stage: int) -> tuple[int, ...]:
        """Returns the end of each layer group of a stage, as a number of layers. A layer group is
        consecutive layers that a load delivers together: as few layers as give every object at
        least `GROUP_BYTES`; the last group also has the remaining layers. If all layers of the
        stage together give an object fewer bytes, they are one group.
        """
        layers = len(self.stages[stage])
        least = self.head_bytes * min(end - first for first, end in self.head_ranges)
        size = -(-GROUP_BYTES // least)
        return (*(size * n for n in range(1, layers // size)), layers)


class ObjectId(NamedTuple):
    """Contents of one object of a page: indices of group, pipeline stage and head range."""

    group: int
    stage: int
    head_range: int


def object_ids(groups: Sequence[CacheGroup]) -> list[ObjectId]:
    """Returns all objects of a page, first the objects of groups that need all pages. A lookup
    begins with these, because the result cannot be longer than the prefix for which all of them
    are stored.
    """
    found = [
        ObjectId(number, stage, head_range)
        for number, group in enumerate(groups)
        for stage, layers in enumerate(group.stages)
        if layers
        for head_range in range(len(group.head_ranges))
    ]
    return sorted(found, key=lambda object_id: groups[object_id.group].reach.tokens is not None)


class Bundle(NamedTuple):
    """The objects of all KV cache groups with the same `reach` and `page_tokens`. They are looked
    up with the same keys. `groups`: the indices of these groups.
    """

    reach: Reach
    page_tokens: int
    groups: tuple[int, ...]
    object_ids: tuple[ObjectId, ...]


def bundles(groups: Sequence[CacheGroup]) -> list[Bundle]:
    """Returns all objects of a page as bundles, in the order of `object_ids`."""
    found: dict[tuple[Reach, int], list[ObjectId]] = {}
    for object_id in object_ids(groups):
        group = groups[object_id.group]
        found.setdefault((group.reach, group.page_tokens), []).append(object_id)
    return [
        Bundle(
            reach,
            tokens,
            tuple(dict.fromkeys(object_id.group for object_id in object_ids)),
            tuple(object_ids),
        )
        for (reach, tokens), object_ids in found.items()
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


def head_ranges_of(
    kv_heads: int, ranks: int, head_bytes: int, *, sliceable: bool
) -> tuple[tuple[Heads, ...], bool]:
    """Returns the head ranges that are stored separately, and whether they depend on the model
    alone. `head_bytes`: bytes of one head in a block, over all layers of the model. `sliceable`:
    each head is one contiguous part of a block. If a block with several heads is not sliceable, or
    the heads of a worker are not a whole number of the ranges chosen for the model, each range is
    the heads of one worker.
    """
    share = max(kv_heads // ranks, 1)
    large = [
        size
        for size in range(1, kv_heads + 1)
        if kv_heads % size == 0
        and size * head_bytes >= OBJECT_BYTES
        and kv_heads // size <= HEAD_RANGES_MAX
    ]
    size = min(large, default=kv_heads)
    shared = (sliceable or kv_heads == 1) and share % size == 0
    if not shared:
        size = share
    return tuple((first, first + size) for first in range(0, kv_heads, size)), shared


def held_head_ranges(group: CacheGroup, rank: int, ranks: int) -> list[int]:
    """Returns the indices of the head ranges of `group` that a worker holds."""
    first, end = heads_of(rank, ranks, group.kv_heads)
    return [number for number, (a, b) in enumerate(group.head_ranges) if first <= a and b <= end]


def is_writer(group: CacheGroup, head_range: int, rank: int, ranks: int) -> bool:
    """Returns whether this worker stores `head_range`: the first worker that holds a head range
    stores it.
    """
    return rank == next(r for r in range(ranks) if head_range in held_head_ranges(group, r, ranks))


def longest_resumable(
    groups: Sequence[CacheGroup],
    present: Mapping[ObjectId, Sequence[bool]],
    most: int,
    alignment: int,
) -> int:
    """Returns the largest number of tokens, at most `most` and a multiple of `alignment`, at which
    the pages that are `present` suffice to resume; 0 if no length suffices. `present`: for each
    object, whether it has each page, starting at the first page. Objects without an entry count as
    present.
    """
    before = [(groups[object_id.group], _runs(pages)) for object_id, pages in present.items()]
    for tokens in range(most // alignment * alignment, 0, -alignment):
        if all(runs[tokens // p.page_tokens] >= len(p.needed(tokens)) for p, runs in before):
            return tokens
    return 0


def _runs(present: Sequence[bool]) -> list[int]:
    """Returns, for every `i`, the number of consecutive present pages that end at page `i - 1`."""
    runs = [0]
    for is_present in present:
        runs.append(runs[-1] + 1 if is_present else 0)
    return runs
