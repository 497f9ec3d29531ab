"""The model that vLLM runs, as the connector and the tier identify it."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from ritornello.connector import identity
from ritornello.connector.identity import (
    ModelIdentity,
    canonical_config,
    dtype_name,
    file_digest,
)
from ritornello.vllm import drafts
from ritornello.vllm.loaded_files import fingerprint_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# vLLM scales queries of Llama 4 by default if the maximum length exceeds this number of tokens.
LLAMA4_UNSCALED_TOKENS = 32768


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
    multimodal: Any = getattr(model, "multimodal_config", None)
    if processor := getattr(multimodal, "mm_processor_kwargs", None):
        all_options["mm_processor_kwargs"] = canonical_config(processor)
    if rate := getattr(multimodal, "video_pruning_rate", None):
        method = getattr(multimodal, "video_pruning_method", "")
        all_options["video_pruning"] = f"{method}/{rate}"
    if dtype := getattr(multimodal, "mm_encoder_attn_dtype", None):
        all_options["mm_encoder_attn_dtype"] = str(dtype)
        all_options["mm_encoder_scales"] = file_digest(multimodal.mm_encoder_fp8_scale_path)
    # Block hashes name the adapter, and vLLM applies only its part for these modules. Adapters of
    # image encoders (`enable_tower_connector_lora`) need no option: the name of an image has them.
    targets = getattr(getattr(vllm_config, "lora_config", None), "target_modules", None)
    if targets is not None:
        all_options["lora_target_modules"] = ",".join(sorted(targets))
    if "llama4" in canonical_config(config).lower():
        all_options["attn_temperature_tuning"] = _temperature_tuning(model)
    if identity.depends_on_maximum_length(canonical_config(config)):
        all_options["max_model_len"] = str(model.max_model_len)
    return ModelIdentity.of(
        identity.model_name(config),
        fingerprint_of(model, vllm_config.load_config),
        all_options,
        kv_scale=identity.kv_scale_of(str(cache.cache_dtype), dtypes),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
    )


def _fields(config: Any) -> Mapping[str, Any]:
    """Returns the fields of a configuration, which is a dictionary or vLLM's dataclass."""
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    return dict(config)


def _temperature_tuning(model: "ModelConfig") -> str:
    """Returns whether layers of Llama 4 without positions scale their queries, by the rule of
    vLLM's `Llama4ForCausalLM`: "True", "False", or "auto" if only the model's configuration, which
    the scope names, decides.
    """
    generation = {**model.try_get_generation_config(), **model.override_generation_config}
    if "attn_temperature_tuning" in generation:
        return str(bool(generation["attn_temperature_tuning"]))
    if model.max_model_len > LLAMA4_UNSCALED_TOKENS:
        return "True"
    # With `--max-model-len -1` vLLM builds the model with the maximum length of its configuration,
    # and reduces the length to what the memory holds afterwards.
    return "auto" if model.original_max_model_len == -1 else "False"


def ambiguity(vllm_config: "VllmConfig") -> str:
    """Returns why the keys of this engine do not determine its pages; "" if they do."""
    cache = vllm_config.cache_config
    at_run_time = getattr(cache, "calculate_kv_scales", False)
    if getattr(vllm_config.model_config, "rswa_window", None):
        return "with reference sliding windows (R-SWA), KV depends on where the prompt ended"
    return (
        _images_refusal(vllm_config)
        or identity.ambiguity(
            scales_at_run_time=at_run_time or "per_token" in str(cache.cache_dtype),
            hash_algorithm=str(cache.prefix_caching_hash_algo),
        )
        or drafts.refusal(vllm_config)
    )


def _images_refusal(vllm_config: "VllmConfig") -> str:
    """Returns why pages of equal images may differ, or pages of different images have equal keys;
    "" if neither can happen.
    """
    model = vllm_config.model_config
    multimodal: Any = getattr(model, "multimodal_config", None)
    counted = (
        getattr(multimodal, "mm_processor_cache_gb", None) == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )
    if counted and getattr(model, "supports_multimodal_inputs", True):
        return (
            "with --no-enable-prefix-caching and --mm-processor-cache-gb 0, vLLM names images by a "
            "counter that every process starts again: remove one of these options"
        )
    if getattr(multimodal, "mm_encoder_attn_dtype", None):
        path = multimodal.mm_encoder_fp8_scale_path
        if not path:
            return (
                "with --mm-encoder-attn-dtype and without --mm-encoder-fp8-scale-path, the scales "
                "of an image follow earlier requests: set the path, or remove the dtype"
            )
        try:
            file_digest(path)
        except OSError as error:
            return f"cannot read the file of --mm-encoder-fp8-scale-path ({error})"
    return ""
