"""The KV memory of one worker, and the objects of a page in this memory."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ritornello.vllm.cache_groups import ObjectId, heads_of, held_head_ranges, is_writer
from ritornello.vllm.handshake import GroupMemory, WorkerRank
from ritornello.vllm.identity import Identity
from ritornello.vllm.kv_memory import HostMemory, KvMemory
from ritornello.vllm.layout import CacheTensor, LayoutError, group_memory, spans


@dataclass(frozen=True, slots=True)
class PageObject:
    """One object of every page. `pool`: the part of each block that holds the object, in this
    worker's memory, as a `PagePool` or a `DevicePool`. `is_writer`: this worker stores the object.
    `sections`: the offset in the object, in bytes, at which each layer group ends.
    """

    object_id: ObjectId
    pool: Any
    is_writer: bool
    sections: tuple[int, ...] = ()


class HeldObjects(NamedTuple):
    """The objects of a page that one worker holds, by KV cache group, under `identity`."""

    identity: Identity
    groups: Sequence[Sequence[PageObject]]


class Shard:
    """The KV memory of the worker at `worker_rank`. `groups`: the layers and the number of KV heads
    that the worker has of each KV cache group. `memory` is empty until the tensors are registered.
    Keeps the tensors alive: pools point into them.
    """

    def __init__(
        self,
        worker_rank: WorkerRank,
        blocks: int,
        groups: list[tuple[list[str], int]],
        kv_memory: KvMemory | None = None,
    ) -> None:
        self.kv_memory = kv_memory or HostMemory()
        self.worker_rank = worker_rank
        self.blocks = blocks
        self.groups = groups
        self.caches: dict[str, CacheTensor] = {}
        self.memory: tuple[GroupMemory, ...] = ()

    def register(self, caches: Mapping[str, CacheTensor]) -> None:
        """Takes the engine's tensors. LayoutError if their layout is not supported."""
        found = [
            group_memory(caches, layers, heads, self.blocks, self.kv_memory.device_type)
            for layers, heads in self.groups
        ]
        memory = tuple(
            replace(group, arrangement=self._arrangement(caches, group)) for group in found
        )
        self.kv_memory.open()
        self.caches, self.memory = dict(caches), memory

    def _arrangement(self, caches: Mapping[str, CacheTensor], group: GroupMemory) -> str:
        apart = group.heads if group.head_major else 0
        return self.kv_memory.arrangement(caches, group.layers, apart)

    def release(self) -> None:
        self.caches, self.memory = {}, ()

    def objects(self, identity: Identity) -> HeldObjects:
        """Returns this worker's objects. LayoutError if the memory differs from the identity."""
        if len(identity.groups) != len(self.memory):
            raise LayoutError(
                f"this worker has {len(self.memory)} KV cache groups, the model "
                f"{len(identity.groups)}"
            )
        groups = [self._group_objects(identity, number) for number in range(len(self.memory))]
        return HeldObjects(identity, groups)

    def layer_groups(self, identity: Identity, number: int) -> dict[str, int]:
        """Returns, by the name of each layer of KV cache group `number` on this worker, the index
        of its layer group: of the consecutive layers whose KV is one section of a page.
        """
        ends = identity.groups[number].layer_groups(self.worker_rank[0])
        return {name: bisect_right(ends, at) for at, name in enumerate(self.memory[number].layers)}

    def _group_objects(self, identity: Identity, number: int) -> list[PageObject]:
        group, memory, (stage, rank) = (
            identity.groups[number],
            self.memory[number],
            self.worker_rank,
        )
        if group.stages[stage] != memory.layers:
            raise LayoutError(
                f"the {len(memory.layers)} layers of KV cache group {number} on this worker differ "
                f"from the layers of pipeline stage {stage}"
            )
        if not memory.layers:
            return []
        first, _ = heads_of(rank, identity.ranks, group.kv_heads)
        found = []
        section_ends = group.layer_groups(stage)
        for head_range in held_head_ranges(group, rank, identity.ranks):
            a, b = group.head_ranges[head_range]
            pool = self._pool(memory, a - first, b - first)
            bytes_by_model = group.object_bytes(stage, head_range)
            if pool.page_bytes != bytes_by_model:
                raise LayoutError(
                    f"a page has {pool.page_bytes} bytes in memory, {bytes_by_model} by the model"
                )
            layer_bytes = bytes_by_model // len(memory.layers)
            found.append(
                PageObject(
                    ObjectId(number, stage, head_range),
                    pool,
                    is_writer(group, head_range, rank, identity.ranks),
                    tuple(end * layer_bytes for end in section_ends),
                )
            )
        if not found:
            raise LayoutError(
                f"no objects of KV cache group {number} are on worker {self.worker_rank}"
            )
        return found

    def _pool(self, memory: GroupMemory, first: int, end: int) -> Any:
        heads = None if (first, end) == (0, memory.heads) else (first, end, memory.heads)
        found = spans(self.caches, memory.layers, self.blocks, heads)
        return self.kv_memory.pool(found, self.blocks, self.caches)
