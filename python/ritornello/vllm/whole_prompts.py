"""Engines that must compute every prompt whole: KV of a prefix, from wherever it is loaded, makes
their answers wrong or ends them. Read in vLLM 0.32 and 0.33.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

ROUTED_EXPERTS = "vllm.distributed.aux_output_connector.connector"


def refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    """Returns why no prefix of a prompt may be loaded into this engine; "" if it may."""
    if any(getattr(spec, "non_causal", False) for spec in _specs(kv_cache_config)):
        return "the model's attention is not causal: KV of a prefix depends on the tokens after it"
    model = vllm_config.model_config
    pooling = getattr(model, "runner_type", "") == "pooling"
    if pooling and not getattr(model, "is_prefix_caching_supported", True):
        # In 0.32 and 0.33 MEAN and CLS pooling raise an error in the step of a request whose prefix
        # was loaded.
        return "vLLM supports no prefix caching for this pooling model"
    aux_outputs = getattr(vllm_config, "aux_output_config", None)
    if getattr(aux_outputs, "enabled", False) and not _limits_hits():
        return (
            "vLLM before 0.33 cannot return the routed experts of loaded tokens: use vLLM 0.33, or "
            "leave out --enable-return-routed-experts"
        )
    return ""


def _specs(kv_cache_config: "KVCacheConfig") -> Iterator[Any]:
    for group in kv_cache_config.kv_cache_groups:
        yield group.kv_cache_spec
        # `UniformTypeKVCacheSpecs` has a specification for each layer.
        yield from getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()


def _limits_hits() -> bool:
    """Returns whether vLLM loads only tokens whose routed experts it still has."""
    connector: Any = getattr(import_module(ROUTED_EXPERTS), "AuxOutputSchedulerConnector", None)
    return hasattr(connector, "cap_external_hit")
