"""Engines with speculative decoding: which drafts the connector and our tier serve, and which
properties of a draft model distinguish its KV.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_identity import (
    attention,
    engine,
    groups,
    identify,
    model,
    safetensors,
    scope_ids,
)
from test_vllm_tier_namespace import MACHINE, ROW, offloading, vllm
from test_vllm_tier_namespace import of as tier_namespace

from ritornello.vllm import support
from ritornello.vllm.tier import namespace

__all__ = ["model"]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    safetensors(folder / "model.safetensors", {"fc": b"\5" * 4000})
    return folder


def speculation(draft: Path | str, method: str = "eagle", **changes: Any) -> Any:
    """Returns a stand-in for vLLM's configuration of speculative decoding. `changes`: other values
    of the fields of the draft model's configuration, or `acceptance` (the method of rejection
    sampling) or `load` (the draft model's load configuration).
    """
    acceptance = changes.pop("acceptance", "standard")
    load = changes.pop("load", None)
    fields = {
        "model": str(draft),
        "revision": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
    }
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=3,
        draft_model_config=SimpleNamespace(**(fields | changes)),
        draft_load_config=load,
        rejection_sample_method=acceptance,
    )


def cpu_reason(model: Path, speculative: Any, **changes: Any) -> str:
    config = engine(model, speculative_config=speculative, **changes)
    return support.unsupported_reason(config, groups(attention()))


def tier_reason(model: Path, speculative: Any) -> str:
    return namespace.unsupported_reason(
        vllm(model, speculative_config=speculative), offloading(), ROW
    )


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "dflash", "dspark"])
def test_draft_with_weight_files_is_served(model: Path, draft: Path, method: str) -> None:
    assert cpu_reason(model, speculation(draft, method)) == ""
    assert tier_reason(model, speculation(draft, method)) == ""


def test_drafts_without_kv_change_no_scope(model: Path) -> None:
    for method in ("ngram", "suffix", "ngram_gpu", "medusa"):
        alone = SimpleNamespace(method=method)
        assert cpu_reason(model, alone) == tier_reason(model, alone) == ""
        assert scope_ids(identify(model, speculative_config=alone)) == scope_ids(identify(model))
        assert not support.requires_async_loads(
            engine(model, speculative_config=alone), groups(attention())
        )


def test_scope_contains_weights_of_draft(model: Path, draft: Path) -> None:
    def ids() -> tuple[set[bytes], bytes]:
        config = {"speculative_config": speculation(draft)}
        tier = namespace.namespace_of(
            vllm(model, **config), groups(attention()), offloading(), ROW, MACHINE
        )
        return scope_ids(identify(model, **config)), tier.scope(tier.groups[0]).id

    pages, chunk = ids()
    assert ids() == (pages, chunk)
    assert pages.isdisjoint(scope_ids(identify(model)))
    plain = tier_namespace(model)
    assert chunk != plain.scope(plain.groups[0]).id
    safetensors(draft / "model.safetensors", {"fc": b"\6" * 4000})
    other_pages, other_chunk = ids()
    assert pages.isdisjoint(other_pages)
    assert chunk != other_chunk


@pytest.mark.parametrize(
    "change",
    [
        {"method": "draft_model"},
        {"dtype": "torch.float16"},
        {"quantization": "awq"},
    ],
)
def test_scope_contains_method_dtype_and_quantization_of_draft(
    model: Path, draft: Path, change: dict[str, Any]
) -> None:
    one = identify(model, speculative_config=speculation(draft))
    other = identify(model, speculative_config=speculation(draft, **change))
    assert scope_ids(one).isdisjoint(scope_ids(other))


def test_number_of_draft_tokens_changes_no_scope(model: Path, draft: Path) -> None:
    few, many = speculation(draft), speculation(draft)
    many.num_speculative_tokens = 7
    one, other = (identify(model, speculative_config=config) for config in (few, many))
    assert scope_ids(one) == scope_ids(other)


def test_draft_in_target_files_has_target_fingerprint(model: Path) -> None:
    """With MTP the draft's layers are in the files of the target model."""

    def ids() -> set[bytes]:
        return scope_ids(identify(model, speculative_config=speculation(model, "mtp")))

    before = ids()
    assert before == ids()
    safetensors(model / "model.safetensors", {"a": b"\1" * 4000, "b": b"\3" * 4000})
    assert before.isdisjoint(ids())


def test_draft_of_target_with_dummy_weights_has_random_epoch(model: Path) -> None:
    dummy = {"load_config__load_format": "dummy", "speculative_config": speculation(model, "mtp")}
    assert support.unsupported_reason(engine(model, **dummy), groups(attention())) == ""
    one, other = identify(model, **dummy), identify(model, **dummy)
    assert one.model.epoch != other.model.epoch


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"draft": "/missing"}, "draft model /missing was not loaded from files"),
        ({"load": SimpleNamespace(load_format="dummy")}, "no fingerprint"),
        ({"acceptance": "fly"}, '"fly" lets drafts change answers'),
        ({"acceptance": "synthetic"}, '"synthetic" lets drafts change answers'),
        ({"method": "extract_hidden_states"}, "speculative decoding by extract_hidden_states"),
        ({"method": "custom_class"}, "speculative decoding by custom_class"),
    ],
)
def test_refused_draft_is_named_in_one_line(
    model: Path, draft: Path, change: dict[str, Any], why: str
) -> None:
    speculative = speculation(**({"draft": draft} | change))
    for reason in (cpu_reason(model, speculative), tier_reason(model, speculative)):
        assert why in reason
        assert "\n" not in reason


def test_draft_requires_async_loads(model: Path, draft: Path) -> None:
    """The layers of a draft run after vLLM has reported the outcome of the step's loads. A load
    that arrives layer by layer would have to end before this report.
    """
    config = engine(model, speculative_config=speculation(draft))
    assert support.requires_async_loads(config, groups(attention()))


def test_speculation_in_pipeline_stages_is_refused_on_cpus(model: Path, draft: Path) -> None:
    for speculative in (speculation(draft), SimpleNamespace(method="ngram")):
        reason = cpu_reason(model, speculative, parallel_config__pipeline_parallel_size=2)
        assert "2 pipeline stages" in reason
        assert cpu_reason(model, speculative) == ""
