"""The KV memory of one worker, and the objects of a page that lie in it."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ritornello.spans import page_pool
from ritornello.vllm.handshake import GroupMemory, ShardFacts, WorkerRank
from ritornello.vllm.identity import Identity
from ritornello.vllm.layout import CacheTensor, LayoutError, group_memory, spans
from ritornello.vllm.parts import Slice, heads_of, held_units, is_writer

if TYPE_CHECKING:
    from ritornello._core import PagePool


@dataclass(frozen=True, slots=True)
class Object:
    """One object of every page. `pool`: its blocks in this worker's memory. `is_writer`: this
    worker stores it. `sections`: where its groups of layers end, in bytes.
    """

    piece: Slice
    pool: "PagePool"
    is_writer: bool
    sections: tuple[int, ...] = ()


class Shard:
    """The KV memory of the worker at `worker_rank`. `groups`: layers and KV heads of each group
    here. Keeps the tensors alive: pools point into them.
    """

    def __init__(
        self,
        worker_rank: WorkerRank,
        blocks: int,
        groups: list[tuple[list[str], int]],
        caches: Mapping[str, CacheTensor],
    ) -> None:
        self.worker_rank = worker_rank
        self.blocks = blocks
        self.caches = dict(caches)
        self.memory = tuple(group_memory(caches, layers, heads, blocks) for layers, heads in groups)

    def facts(self) -> ShardFacts:
        return ShardFacts(self.memory)

    def objects(self, identity: Identity) -> list[list[Object]]:
        """Returns this worker's objects, by part. LayoutError if the memory differs from the
        identity.
        """
        if len(identity.parts) != len(self.memory):
            raise LayoutError(
                f"{len(self.memory)} KV cache groups here, {len(identity.parts)} by the model"
            )
        return [self._part(identity, number) for number in range(len(self.memory))]

    def groups(self, identity: Identity, number: int) -> dict[str, int]:
        """Returns the layer group of each layer of a part on this worker."""
        ends = identity.parts[number].layer_groups(self.worker_rank[0])
        return {name: bisect_right(ends, at) for at, name in enumerate(self.memory[number].layers)}

    def _part(self, identity: Identity, number: int) -> list[Object]:
        part, memory, (stage, rank) = identity.parts[number], self.memory[number], self.worker_rank
        if part.stages[stage] != memory.layers:
            raise LayoutError(f"{len(memory.layers)} layers here are not those of stage {stage}")
        if not memory.layers:
            return []
        first, _ = heads_of(rank, identity.ranks, part.kv_heads)
        found = []
        groups = part.layer_groups(stage)
        for unit in held_units(part, rank, identity.ranks):
            a, b = part.units[unit]
            pool = self._pool(memory, a - first, b - first)
            bytes_by_model = part.object_bytes(stage, unit)
            if pool.page_bytes != bytes_by_model:
                raise LayoutError(
                    f"a page has {pool.page_bytes} bytes in memory, {bytes_by_model} by the model"
                )
            layer_bytes = bytes_by_model // len(memory.layers)
            found.append(
                Object(
                    Slice(number, stage, unit),
                    pool,
                    is_writer(part, unit, rank, identity.ranks),
                    tuple(end * layer_bytes for end in groups),
                )
            )
        if not found:
            raise LayoutError(f"no objects of part {number} lie on worker {self.worker_rank}")
        return found

    def _pool(self, memory: GroupMemory, first: int, end: int) -> "PagePool":
        heads = None if (first, end) == (0, memory.heads) else (first, end, memory.heads)
        return page_pool(spans(self.caches, memory.layers, self.blocks, heads), self.blocks)
