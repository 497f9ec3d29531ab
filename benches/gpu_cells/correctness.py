"""Compares moves with PyTorch, byte by byte: the moved bytes, and all other bytes."""

import random
from collections.abc import Callable
from itertools import product

import torch

from benches.gpu_cells.rig import Memory, Rig, Row, Rows, bytes_of

SEEDS = 20
# Lengths of a piece, in bytes. Pieces of 4104, 4100 and 4097 bytes need the kernels that move words
# of 8, 4 and 1 bytes, all other pieces the kernels that move 16 bytes. In `WAYS`, kernel:N is a
# kernel on N blocks of threads, copies are the copy engines.
PIECES = (4096, 8192, 12_288, 24_576, 65_536, 73_728, 4104, 4100, 4097)
WAYS = ("kernel:2", "kernel:4", "kernel:12", "copies")


def separate(rig: Rig, layers: int, piece: int, blocks: int, seed: int) -> Memory:
    """Returns memory with a tensor for each layer."""
    views = [
        rig.random(blocks * piece, seed * 100 + layer).view(blocks, piece)
        for layer in range(layers)
    ]
    return Memory(views, views)


def planes(rig: Rig, layers: int, piece: int, blocks: int, seed: int) -> Memory:
    """Returns memory with a tensor for each layer, which has all keys before all values."""
    tensors = [
        rig.random(2 * blocks * piece, seed * 100 + layer).view(2, blocks, piece)
        for layer in range(layers)
    ]
    return Memory(tensors, [plane for tensor in tensors for plane in tensor])


def block_first(rig: Rig, layers: int, piece: int, blocks: int, seed: int) -> Memory:
    """Returns memory of one tensor, in which a block has all layers and a gap that belongs to no
    page.
    """
    gap = 4096
    stride = layers * piece + gap
    tensor = rig.random(blocks * stride, seed).view(blocks, stride)
    return Memory([tensor], [tensor[:, at * piece : (at + 1) * piece] for at in range(layers)])


LAYOUTS: tuple[Callable[[Rig, int, int, int, int], Memory], ...] = (separate, planes, block_first)


def moves(rig: Rig) -> Rows:
    """Checks moves of random blocks for every layout, piece length, way, direction and seed; on an
    emulated device, for some of the lengths, ways and seeds. Returns a row for each layout, length
    and way. Raises AssertionError if any move was wrong or did not end.
    """
    pieces = PIECES[:2] + PIECES[-1:] if rig.emulated else PIECES
    ways = WAYS[1::2] if rig.emulated else WAYS
    seeds = range(2 if rig.emulated else SEEDS)
    rows: Rows = []
    for layout, piece, way in product(LAYOUTS, pieces, ways):
        exact = [_is_exact(rig, layout(rig, 3, piece, 37, seed), way, seed) for seed in seeds]
        row = {"layout": layout.__name__, "piece": piece, "way": way}
        rows.append({**row, "seeds": len(seeds), "wrong": exact.count(False)})
    if any(row["wrong"] for row in rows):
        raise AssertionError(f"wrong bytes: {[row for row in rows if row['wrong']]}")
    return rows


def by_layout(rows: Rows) -> Rows:
    """Returns a row for each layout: the number of combinations of a piece length and a way, and
    the number of combinations of a length, a way and a seed whose moves were wrong.
    """
    summaries: dict[str, Row] = {}
    for row in rows:
        empty = {"layout": row["layout"], "combinations": 0, "wrong": 0}
        summary = summaries.setdefault(row["layout"], empty)
        summary["combinations"] += 1
        summary["wrong"] += row["wrong"]
    return list(summaries.values())


def _is_exact(rig: Rig, memory: Memory, way: str, seed: int) -> bool:
    """Returns whether a scatter and a gather of a random section of random blocks move all bytes of
    the section correctly, and change no other bytes.
    """
    draw = random.Random(seed)
    pool = rig.pool(memory, way)
    blocks = draw.sample(range(memory.blocks), draw.randint(1, memory.blocks))
    slots = rig.slots(pool.page_bytes, len(blocks))
    content = bytes_of(slots, len(blocks))
    content.copy_(rig.random(content.numel(), seed + 7).view(content.shape).cpu())
    # A section is consecutive spans of a page.
    first = draw.randrange(len(memory.views))
    last = draw.randrange(first, len(memory.views)) + 1
    lengths = [view.shape[1] for view in memory.views]
    part = (sum(lengths[:first]), sum(lengths[:last]))

    expected = [tensor.clone() for tensor in memory.tensors]
    shadow = _views_like(memory, expected)
    index = torch.tensor(blocks, device=rig.torch_device)
    offset = part[0]
    for number in range(first, last):
        columns = content[:, offset : offset + lengths[number]].to(rig.torch_device)
        shadow[number][index] = columns
        offset += lengths[number]
    rig.finish()
    if not pool.pages(blocks).scatter(slots, part=part, after=rig.stream()).wait():
        raise AssertionError("a scatter did not end")
    if not all(map(torch.equal, memory.tensors, expected)):
        return False

    content.fill_(0x5A)
    poisoned = content.clone()
    poisoned[:, part[0] : part[1]] = memory.pages(blocks)[:, part[0] : part[1]].cpu()
    if not pool.pages(blocks).gather(slots, part=part, after=rig.stream()).wait():
        raise AssertionError("a gather did not end")
    return bool(torch.equal(content, poisoned))


def _views_like(memory: Memory, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of `tensors`, the copies of `memory.tensors`, with the offsets, shapes and
    strides of the views of `memory`.
    """
    views = []
    for view in memory.views:
        base = next(
            (old, new)
            for old, new in zip(memory.tensors, tensors, strict=True)
            if old.data_ptr() <= view.data_ptr() < old.data_ptr() + old.nbytes
        )
        offset = view.data_ptr() - base[0].data_ptr()
        views.append(torch.as_strided(base[1].view(-1), view.shape, view.stride(), offset))
    return views
