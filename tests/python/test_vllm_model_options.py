"""vLLM's options that change the KV of equal keys: they separate scopes, or the engine is refused;
and weights that the files of the model do not identify.
"""

from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_drafts import cpu_reason, draft, speculation, tier_reason
from test_vllm_identity import attention, engine, groups, identify, model, scope_ids
from test_vllm_tier_namespace import ROW, offloading, vllm

from ritornello.vllm import support
from ritornello.vllm.loaded_files import FILE_FORMATS
from ritornello.vllm.tier import namespace

__all__ = ["draft", "model"]


def reason(model: Path, **changes: Any) -> str:
    """Returns why this engine is refused, which the connector and the tier must agree on."""
    found = support.unsupported_reason(engine(model, **changes), groups(attention()))
    assert namespace.unsupported_reason(vllm(model, **changes), offloading(), ROW) == found
    assert "\n" not in found
    return found


def multimodal(cache_gb: float = 4, **changes: Any) -> Any:
    """Returns a stand-in for vLLM's `MultiModalConfig`."""
    fields = {"mm_encoder_attn_dtype": None, "mm_encoder_fp8_scale_path": None} | changes
    return SimpleNamespace(mm_processor_cache_gb=cache_gb, **fields)


def hf_config(**fields: Any) -> Any:
    """Returns a stand-in for a configuration of Hugging Face."""
    return SimpleNamespace(to_dict=lambda: fields, **fields)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("cache_gb", [None, 0, 0.0, 4])
def test_images_named_by_counter_are_refused(
    model: Path, prefix_caching: bool, cache_gb: float | None
) -> None:
    config = None if cache_gb is None else multimodal(cache_gb)
    found = reason(
        model,
        model_config__multimodal_config=config,
        cache_config__enable_prefix_caching=prefix_caching,
    )
    if cache_gb == 0 and not prefix_caching:
        assert "--no-enable-prefix-caching and --mm-processor-cache-gb 0" in found
        assert "remove one of these options" in found
    else:
        assert found == ""


def test_models_without_images_are_served(model: Path) -> None:
    found = reason(
        model,
        model_config__multimodal_config=multimodal(0),
        model_config__supports_multimodal_inputs=False,
        cache_config__enable_prefix_caching=False,
    )
    assert found == ""


def llama4(length: int, original: int | None = None, **generation: Any) -> dict[str, Any]:
    """Returns the changes of a stand-in for a Llama 4 engine with this maximum length. `original`:
    the value of the option, the length itself by default. `generation`: contents of the generation
    configuration (`file`), and `--override-generation-config` (`override`).
    """
    fields = {
        "hf_config": SimpleNamespace(
            to_dict=lambda: {"text_config": {"model_type": "llama4_text"}}
        ),
        "max_model_len": length,
        "original_max_model_len": length if original is None else original,
        "try_get_generation_config": lambda: generation.get("file", {}),
        "override_generation_config": generation.get("override", {}),
    }
    return {f"model_config__{name}": value for name, value in fields.items()}


def tuning(model: Path, *args: Any, **generation: Any) -> str:
    return dict(identify(model, **llama4(*args, **generation)).model.options)[
        "attn_temperature_tuning"
    ]


def test_scope_of_llama4_contains_scaling_of_queries(model: Path) -> None:
    assert [tuning(model, length) for length in (8192, 32768, 32769)] == ["False", "False", "True"]
    one, same, other = (identify(model, **llama4(n)) for n in (8192, 32768, 65536))
    assert scope_ids(one) == scope_ids(same)
    assert scope_ids(one).isdisjoint(scope_ids(other))
    assert "attn_temperature_tuning" not in dict(identify(model).model.options)


def test_generation_config_decides_scaling_of_queries(model: Path) -> None:
    on, off = {"attn_temperature_tuning": 4}, {"attn_temperature_tuning": False}
    assert tuning(model, 8192, file=on) == "True"
    assert tuning(model, 65536, file=off) == "False"
    assert tuning(model, 65536, file=on, override=off) == "False"
    assert tuning(model, 8192, override=on) == "True"


def test_fitted_length_does_not_decide_scaling_of_queries(model: Path) -> None:
    """The length is fitted to the memory after the model was built for a longer one."""
    assert tuning(model, 8192, -1) == "auto"
    assert tuning(model, 65536, -1) == "True"
    assert tuning(model, 8192, -1, file={"attn_temperature_tuning": True}) == "True"


class LoadFormat(Enum):
    """Stand-in for the enum of other versions of vLLM."""

    SAFETENSORS = "safetensors"
    TENSORIZER = "tensorizer"


@pytest.mark.parametrize("load_format", [*sorted(FILE_FORMATS), LoadFormat.SAFETENSORS])
def test_weights_from_files_are_identified_by_files(
    model: Path, draft: Path, load_format: object
) -> None:
    one, two = (identify(model, load_config__load_format=load_format) for _ in range(2))
    assert one == two
    assert not one.model.epoch
    load = SimpleNamespace(load_format=load_format, download_dir=None)
    assert cpu_reason(model, speculation(draft, load=load)) == ""


@pytest.mark.parametrize(
    "load_format",
    ["npcache", "ipc_cache", "tensorizer", "modelexpress", "of_a_plugin", LoadFormat.TENSORIZER],
)
def test_weights_from_elsewhere_are_not_identified_by_files(
    model: Path, draft: Path, load_format: object
) -> None:
    one, two = (identify(model, load_config__load_format=load_format) for _ in range(2))
    assert one.model.epoch != two.model.epoch
    assert not one.model.weights
    load = SimpleNamespace(load_format=load_format, download_dir=None)
    for found in (cpu_reason, tier_reason):
        assert "was not loaded from files" in found(model, speculation(draft, load=load))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__model_weights": "/elsewhere"},
        {"load_config__model_loader_extra_config": {"pattern": "/elsewhere/{rank}-{part}"}},
        {"model_config__hf_config": hf_config(text_model_id="/elsewhere")},
        {"model_config__hf_config": hf_config(audio_model_id="/elsewhere")},
        {"model_config__hf_config": hf_config(architectures=["MoonshotKimiaForCausalLM"])},
        {
            "model_config__hf_config": hf_config(
                architectures=["MiMoV2OmniForCausalLM"], audio_config={}
            )
        },
    ],
)
def test_weights_of_another_folder_get_random_epoch(model: Path, changes: dict[str, Any]) -> None:
    assert identify(model, **changes).model.epoch


def test_weights_of_the_models_folder_get_no_epoch(model: Path) -> None:
    config = {"concurrency": 4}
    found = identify(
        model, model_config__model_weights="", load_config__model_loader_extra_config=config
    )
    assert not found.model.epoch


def lora(targets: list[str] | None) -> Any:
    """Returns a stand-in for vLLM's `LoRAConfig`."""
    return SimpleNamespace(target_modules=targets)


def test_scope_contains_modules_of_adapters(model: Path) -> None:
    assert identify(model, lora_config=lora(None)) == identify(model, lora_config=None)
    assert identify(model, lora_config=None) == identify(model)
    one, same, other, none = (
        identify(model, lora_config=lora(targets))
        for targets in (["q_proj", "k_proj"], ["k_proj", "q_proj"], ["k_proj"], [])
    )
    assert one == same
    ids = [scope_ids(each) for each in (one, other, none, identify(model))]
    assert len(set().union(*ids)) == sum(map(len, ids))


def fp8(path: Path | None) -> Any:
    return multimodal(
        mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=None if path is None else str(path)
    )


def test_scope_contains_scales_of_image_encoder(model: Path, tmp_path: Path) -> None:
    scales, copy = tmp_path / "scales.json", tmp_path / "copy.json"
    for path in (scales, copy):
        path.write_text("{}")
    plain = identify(model, model_config__multimodal_config=multimodal())
    assert plain == identify(model)
    first = identify(model, model_config__multimodal_config=fp8(scales))
    assert reason(model, model_config__multimodal_config=fp8(scales)) == ""
    assert first == identify(model, model_config__multimodal_config=fp8(copy))
    scales.write_text('{"a": {"q": 1, "k": 1, "v": 1}}')
    second = identify(model, model_config__multimodal_config=fp8(scales))
    ids = [scope_ids(each) for each in (plain, first, second)]
    assert len(set().union(*ids)) == sum(map(len, ids))


def test_unknown_scales_of_image_encoder_are_refused(model: Path, tmp_path: Path) -> None:
    found = reason(model, model_config__multimodal_config=fp8(None))
    assert "without --mm-encoder-fp8-scale-path" in found
    missing = reason(model, model_config__multimodal_config=fp8(tmp_path / "missing"))
    assert "cannot read the file of --mm-encoder-fp8-scale-path" in missing
