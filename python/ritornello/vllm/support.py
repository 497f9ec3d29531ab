"""Decides which engines our own copies (`CpuPath`, `DevicePath`) serve. An engine with context
parallelism is refused at start-up. Any other unsupported engine runs with neither hits nor saves,
and one log line names the reason.
"""

from typing import TYPE_CHECKING

from ritornello.connector.identity import EPOCH_WARNING
from ritornello.vllm import drafts, whole_prompts
from ritornello.vllm.identity import Identity, hash_tokens_of
from ritornello.vllm.model import ambiguity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# vLLM's kinds of KV cache groups whose blocks contain only the KV of their tokens.
SERVED = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
# Further kinds that vLLM's offloading moves on GPUs, in 0.32 and 0.33. `UniformTypeKVCacheSpecs` is
# a group of layers that differ in shape.
OFFLOADED = (
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "UniformTypeKVCacheSpecs",
)


def require_no_context_parallel(vllm_config: "VllmConfig") -> None:
    """Raises ValueError if the tokens of a page are split over workers."""
    parallel = vllm_config.parallel_config
    for name in ("prefill", "decode"):
        size = getattr(parallel, f"{name}_context_parallel_size", 1)
        if size > 1:
            raise ValueError(
                f"ritornello does not serve {name} context parallel size {size}: start vLLM with "
                "size 1 (tensor, pipeline and data parallel engines may share a store), or "
                "without the connector"
            )


def unsupported_reason(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    """Returns why this engine gets neither hits nor saves; "" if it is served."""
    return (
        ambiguity(vllm_config)
        or whole_prompts.refusal(vllm_config, kv_cache_config)
        or _stages(vllm_config)
        or _keys(vllm_config, kv_cache_config)
        or _attention(vllm_config, kv_cache_config)
    )


def _stages(vllm_config: "VllmConfig") -> str:
    """Returns why an engine with speculative decoding and several pipeline stages is not served; ""
    for other engines. In such an engine vLLM calls `wait_for_save` in the last stage only, so that
    pages would lack the objects of other stages.
    """
    if vllm_config.speculative_config is None:
        return ""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return (
        "" if stages == 1 else f"speculative decoding with {stages} pipeline stages is not served"
    )


def _keys(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    hash_tokens = hash_tokens_of(vllm_config, kv_cache_config)
    for group in kv_cache_config.kv_cache_groups:
        tokens = group.kv_cache_spec.block_size
        if tokens % hash_tokens:
            return (
                f"a block has {tokens} tokens, which is not a multiple of the {hash_tokens} tokens "
                "that a block hash covers"
            )
    return ""


def _attention(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    for group in kv_cache_config.kv_cache_groups:
        # Compare the exact type, because the memory of subclasses (sinks, rings, compressed states)
        # differs.
        kind = type(group.kv_cache_spec).__name__
        if kind not in SERVED:
            elsewhere = (
                "; on GPUs RitornelloTier of vLLM's offloading serves it"
                if kind in OFFLOADED
                else ""
            )
            served = ", ".join(SERVED)
            return f"the connector's own copies do not serve {kind}, only {served}{elsewhere}"
        if getattr(group.kv_cache_spec, "tokens_per_state", 1) != 1:
            return "KV that stores several tokens in one state is not served"
        if kind == "MLAAttentionSpec" and not vllm_config.cache_config.enable_prefix_caching:
            # vLLM disables prefix caching if its kernels cannot continue after a prefix.
            return (
                "prefix caching is off: latent attention may not be able to continue after a prefix"
            )
    return "" if kv_cache_config.kv_cache_groups else "the model keeps no KV"


def requires_async_loads(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Returns whether all loads must be asynchronous. With overlapping steps, or several workers in
    one step, a failure is known too late to stop saves of pages that were computed from unfilled
    blocks. With several KV cache groups vLLM can only repair asynchronous loads. A draft model runs
    its layers after the step's outcome is reported, and a load that arrives layer by layer must end
    before the report.
    """
    workers = vllm_config.parallel_config.world_size
    groups = len(kv_cache_config.kv_cache_groups)
    overlap = bool(vllm_config.max_concurrent_batches > 1)
    return workers > 1 or groups > 1 or overlap or drafts.keeps_kv(vllm_config)


def startup_warnings(identity: Identity) -> list[str]:
    """Returns warnings about pages that other engines or later runs will not find."""
    warnings = []
    if identity.model.epoch:
        warnings.append(EPOCH_WARNING % "saved")
    if identity.ranks > 1 and not all(group.shared for group in identity.groups):
        warnings.append(
            "the KV heads of this engine's pages cannot be stored separately: pages are not found "
            f"at another tensor parallel size than {identity.ranks}"
        )
    return warnings
