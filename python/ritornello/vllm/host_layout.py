"""Refuses engines in which a row of vLLM's host memory may lack the bytes of some workers.

vLLM's host memory is a file in /dev/shm that all workers map. A row of it holds one chunk: the KV
of some consecutive blocks, with a part for each worker. Each worker derives the length of a row,
and the offset of its part in a row, from its own layers, and vLLM does not check that the workers
agree. If two pipeline stages have different numbers of bytes in a block, their parts overlap, and
their numbers of rows differ. Workers on other machines map a file of their machine, which the
scheduler's process does not see: in the rows that a tier reads, their parts are never filled.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ritornello.vllm import drafts

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# vLLM's executor that runs all workers of an engine with a single node on this machine.
ONE_MACHINE = "mp"
# vLLM's class, in a worker, of a KV cache group whose layers differ in the bytes of a block.
MIXED_LAYERS = "UniformTypeKVCacheSpecs"


def machines_refusal(parallel: "ParallelConfig") -> str:
    """Returns why the scheduler's process may not see the rows of all workers; "" if it does."""
    if parallel.world_size == 1:
        return ""
    if parallel.nnodes_within_dp > 1:
        return "workers on other machines have host memory that this machine does not see"
    backend = parallel.distributed_executor_backend
    if backend != ONE_MACHINE:
        return (
            f"workers of the executor {backend} may be on other machines, whose host memory this "
            f"machine does not see: use --distributed-executor-backend {ONE_MACHINE}"
        )
    return ""


def stages_refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    """Returns why pipeline stages may differ in the bytes of a block; "" if they do not.
    `kv_cache_config`: the configuration of this process, which has the layers of one stage.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1 or parallel.pipeline_parallel_size == 1:
        return ""
    from vllm.distributed.utils import get_pp_indices

    stages = parallel.pipeline_parallel_size
    total = vllm_config.model_config.get_total_num_hidden_layers()
    bounds = [get_pp_indices(total, stage, stages) for stage in range(stages)]
    layers = [past - first for first, past in bounds]
    cache = vllm_config.cache_config
    if stages_are_equal(
        layers,
        kv_cache_config.kv_cache_groups,
        has_draft_kv=drafts.keeps_kv(vllm_config),
        has_skipped_layers=bool(getattr(cache, "kv_cache_dtype_skip_layers", None)),
    ):
        return ""
    return (
        f"{stages} pipeline stages, with {', '.join(map(str, layers))} layers, may differ in the "
        "bytes of a block, and vLLM's offloading would let their parts of a chunk overlap in host "
        "memory: use pipeline parallel size 1, or stages with equal numbers of layers that all "
        "keep KV of one kind, without a draft model and --kv-cache-dtype-skip-layers"
    )


def stages_are_equal(
    layers: Sequence[int], groups: Sequence[Any], *, has_draft_kv: bool, has_skipped_layers: bool
) -> bool:
    """Returns whether all stages are known to have equal bytes in a block. `layers`: number of
    layers of each stage. `groups`: the KV cache groups of one stage. Stages may differ if there is
    a draft model, whose layers are in the last stage only; if some layers are skipped by the cache
    dtype, because all of them may be in another stage; or if there are several groups, because
    stages with equal numbers of layers may have different numbers of layers of a group.
    """
    if has_draft_kv or has_skipped_layers or len(set(layers)) != 1 or len(groups) != 1:
        return False
    (group,) = groups
    kind = type(group.kv_cache_spec).__name__
    return kind != MIXED_LAYERS and len(group.layer_names) == layers[0]
