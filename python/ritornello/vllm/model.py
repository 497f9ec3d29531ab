"""The model that vLLM runs, as the connector and the tier identify it."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from ritornello.connector import identity, weight_fingerprint
from ritornello.connector.identity import ModelIdentity, canonical_config, dtype_name
from ritornello.vllm import drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def model_identity(
    vllm_config: "VllmConfig", dtypes: Collection[str], options: Mapping[str, str]
) -> ModelIdentity:
    """Returns the identity of the model. `dtypes`: cache dtypes whose KV has no scales.
    `options`: further options of the engine on which the bytes of pages depend.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_dict()
    all_options = {
        "cache_dtype": str(cache.cache_dtype),
        "compute_dtype": dtype_name(model.dtype),
        "load_format": str(vllm_config.load_config.load_format),
        "quantization": str(model.quantization or "none"),
        **drafts.options(vllm_config),
        **options,
    }
    # Only if set, so that scopes of other engines stay the same. An online `--quantization` sets
    # `quantization_config` too.
    if skipped := getattr(cache, "kv_cache_dtype_skip_layers", None):
        all_options["cache_dtype_skip_layers"] = ",".join(sorted(skipped))
    if quantized := getattr(model, "quantization_config", None):
        all_options["quantization_config"] = canonical_config(_fields(quantized))
    # vLLM's block hashes cover an image and the settings of its request, not those of the engine.
    multimodal = getattr(model, "multimodal_config", None)
    if processor := getattr(multimodal, "mm_processor_kwargs", None):
        all_options["mm_processor_kwargs"] = canonical_config(processor)
    if rate := getattr(multimodal, "video_pruning_rate", None):
        method = getattr(multimodal, "video_pruning_method", "")
        all_options["video_pruning"] = f"{method}/{rate}"
    if identity.depends_on_maximum_length(canonical_config(config)):
        all_options["max_model_len"] = str(model.max_model_len)
    return ModelIdentity.of(
        identity.model_name(config),
        fingerprint_of(vllm_config),
        all_options,
        kv_scale=identity.kv_scale_of(str(cache.cache_dtype), dtypes),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
    )


def _fields(config: Any) -> Mapping[str, Any]:
    """Returns the fields of a configuration, which is a dictionary or vLLM's dataclass."""
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    return dict(config)


def fingerprint_of(vllm_config: "VllmConfig") -> bytes | None:
    """Returns the fingerprint of the weights that this engine loaded from files; None for dummy
    weights and weights streamed from elsewhere.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "dummy":
        return None
    return weight_fingerprint.fingerprint_of(model.model, model.revision, load.download_dir)


def ambiguity(vllm_config: "VllmConfig") -> str:
    """Returns why the keys of this engine do not determine its pages; "" if they do."""
    cache = vllm_config.cache_config
    at_run_time = getattr(cache, "calculate_kv_scales", False)
    if getattr(vllm_config.model_config, "rswa_window", None):
        return "with reference sliding windows (R-SWA), KV depends on where the prompt ended"
    return identity.ambiguity(
        scales_at_run_time=at_run_time or "per_token" in str(cache.cache_dtype),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
    ) or drafts.refusal(vllm_config)
