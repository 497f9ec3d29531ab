"""The memory layout that each worker reports to the scheduler's side: before the first step or,
inside MultiConnector, with the result of a step. The parts of a page, or the reason why the engine
is not served, follow from all reports together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Pipeline stage and tensor-parallel rank.
WorkerRank = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One KV cache group on one worker. `layer_bytes`: bytes of one layer in a block. `heads`: KV
    heads in a block. `head_major`: each head is one contiguous range of a layer's bytes in a block.
    `arrangement`: how the worker's attention arranges the bytes in a block, if the configuration
    does not determine it; otherwise "".
    """

    layers: tuple[str, ...]
    layer_bytes: int
    heads: int
    head_major: bool
    arrangement: str = ""


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """KV memory of one worker, by KV cache group. `unsupported_reason`: why the memory cannot be
    used; "" if it can.
    """

    groups: tuple[GroupMemory, ...] = ()
    unsupported_reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group over all workers. `stages`: the group's layers in each pipeline stage.
    `head_bytes`: bytes of one head of one layer in a block. `head_major`: whether
    `GroupMemory.head_major` is true for all workers that hold layers of the group. `arrangement`:
    as in `GroupMemory`, equal for these workers.
    """

    stages: tuple[tuple[str, ...], ...]
    head_bytes: int
    head_major: bool
    arrangement: str = ""


def group_layouts(
    facts: Mapping[WorkerRank, ShardFacts], stages: int, ranks: int, groups: int
) -> Sequence[GroupLayout]:
    """Combines the workers' reports, by group. Raises ValueError if a worker is not supported or
    sent no report, if the reports disagree, or if the bytes of a layer cannot be divided into its
    heads.
    """
    for worker_rank, shard in sorted(facts.items()):
        if shard.unsupported_reason:
            raise ValueError(shard.unsupported_reason)
        if len(shard.groups) != groups:
            raise ValueError(
                f"worker {worker_rank} has {len(shard.groups)} KV cache groups, the scheduler "
                f"{groups}"
            )
    missing = {(s, r) for s in range(stages) for r in range(ranks)} - set(facts)
    if missing or not facts:
        raise ValueError(
            f"{len(missing)} of {stages * ranks} workers sent no description of their KV memory: "
            "use --distributed-executor-backend mp"
        )
    return [_group_layout(facts, stages, ranks, group) for group in range(groups)]


def _group_layout(
    facts: Mapping[WorkerRank, ShardFacts], stages: int, ranks: int, group: int
) -> GroupLayout:
    """Returns the layout of one group. Raises ValueError unless the workers of each stage hold the
    same layers, and the bytes of a layer in a block can be divided into heads, with equal bytes per
    head and equal arrangements on all workers that hold layers of the group.
    """
    layers = []
    sizes, orders, arrangements = set(), set(), set()
    for stage in range(stages):
        layer_sets = {facts[stage, rank].groups[group].layers for rank in range(ranks)}
        if len(layer_sets) > 1:
            raise ValueError(f"the workers of pipeline stage {stage} hold different layers")
        layers.append(layer_sets.pop())
    for shard in facts.values():
        memory = shard.groups[group]
        if memory.layers:
            sizes.add(memory.layer_bytes // max(memory.heads, 1))
            orders.add(memory.head_major)
            arrangements.add(memory.arrangement)
            if memory.layer_bytes % max(memory.heads, 1):
                raise ValueError(
                    f"a layer's {memory.layer_bytes} bytes in a block cannot be divided into "
                    f"{memory.heads} heads"
                )
    if len(sizes) != 1:
        raise ValueError(f"the workers' blocks differ in size ({sorted(sizes)} bytes per head)")
    if len(arrangements) != 1:
        raise ValueError(f"the workers arrange their blocks differently ({sorted(arrangements)})")
    return GroupLayout(tuple(layers), sizes.pop(), orders == {True}, arrangements.pop())
