"""The layout that vLLM's kernels give to the bytes of a block. The layout may differ between
versions of vLLM, and CPU kernels pack keys by instruction set.
"""

from typing import TYPE_CHECKING, Any

import vllm

from ritornello.connector.identity import dtype_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def version() -> str:
    return str(vllm.__version__).partition("+")[0]


def block_layout(vllm_config: "VllmConfig", spec: Any) -> str:
    """Returns the layout, as scopes name it, of the blocks of the KV cache group with this `spec`
    on CPUs.
    """
    isa = _instruction_set(vllm_config, spec.block_size, spec.head_size)
    return f"vllm-{version()}/cpu/{isa}/{spec.block_size}/{dtype_name(spec.dtype)}"


def device_block_layout(vllm_config: "VllmConfig", spec: Any) -> str:
    """Returns the layout, as scopes name it, of the blocks of the KV cache group with this `spec`
    on GPUs.
    """
    chosen = packing(vllm_config)
    return f"vllm-{version()}/{chosen}/{spec.block_size}/{dtype_name(spec.dtype)}"


def packing(vllm_config: "VllmConfig") -> str:
    """Returns the device, and the properties by which vLLM chooses kernels. If the configuration
    names no attention backend, workers choose one: this choice follows from the returned properties
    and from the configuration.
    """
    device = str(vllm_config.device_config.device_type)
    backend = str(getattr(vllm_config.attention_config, "backend", None))
    runner = f"v2={getattr(vllm_config, 'use_v2_model_runner', None)}"
    if device == "cpu":
        block, head = vllm_config.cache_config.block_size, vllm_config.model_config.get_head_size()
        chosen = _instruction_set(vllm_config, block, head)
    else:
        from vllm.platforms import current_platform

        chosen = current_platform.get_device_capability()
    return f"{device} {chosen} {backend} {runner}"


def _instruction_set(vllm_config: "VllmConfig", block_tokens: int, head_size: int) -> Any:
    """Returns the instruction set for which vLLM's CPU attention packs blocks of this shape."""
    # A private name of vLLM, read in the sources of 0.32.0 and 0.33.0, where it is the same.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    return _get_attn_isa(dtype, block_tokens, head_size, cache_dtype)
