"""Which engines are served. What cannot be served correctly is refused, with one line that says
why: parallel shards at start-up, everything else by standing aside (zero hits, nothing saved).
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Speculation that drafts from the tokens themselves keeps no KV of its own.
MODEL_FREE_DRAFTS = ("ngram", "suffix")


def require_one_shard(vllm_config: "VllmConfig") -> None:
    """Raises ValueError where a model is split over workers: a page of one shard is not a page
    of the model, and nothing here could tell them apart yet.
    """
    parallel = vllm_config.parallel_config
    sizes = {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "prefill context": getattr(parallel, "prefill_context_parallel_size", 1),
        "decode context": getattr(parallel, "decode_context_parallel_size", 1),
    }
    for name, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"ritornello does not serve {name} parallel size {size} yet: start vLLM with "
                "size 1 (data parallel engines may share a store), or without the connector"
            )


def refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    """Why this engine gets neither hits nor saves; "" where it is served."""
    return (
        _device(vllm_config)
        or _keys(vllm_config, kv_cache_config)
        or _schedule(vllm_config)
        or _attention(kv_cache_config)
    )


def _device(vllm_config: "VllmConfig") -> str:
    device = vllm_config.device_config.device_type
    if device == "cpu":
        return ""
    return f"copies between {device} memory and the store are not there yet"


def _keys(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False) or "per_token" in str(cache.cache_dtype):
        return "KV scales calculated at run time are not part of a block's bytes"
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        return (
            f"{algorithm} block hashes start from a random seed in every process; "
            "use sha256, or set PYTHONHASHSEED"
        )
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    if hash_tokens is not None and hash_tokens != cache.block_size:
        return f"block hashes cover {hash_tokens} tokens, blocks {cache.block_size}"
    return ""


def _schedule(vllm_config: "VllmConfig") -> str:
    if vllm_config.max_concurrent_batches > 1:
        return "steps overlap (async scheduling); start vLLM with --no-async-scheduling"
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in MODEL_FREE_DRAFTS:
        return f"speculative decoding by {speculation.method} keeps KV of a second model"
    return ""


def _attention(kv_cache_config: "KVCacheConfig") -> str:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups; only one is served yet"
    spec = groups[0].kv_cache_spec
    # By exact type: subclasses (MLA, sinks, ...) mean other memory.
    if type(spec).__name__ != "FullAttentionSpec":
        return f"only full attention is served yet, not {type(spec).__name__}"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "attention over a window is not served yet"
    return ""
