"""What tells two engines' pages apart: configuration, weights, and engines that are refused."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ritornello.vllm.identity import identity_of, model_name, normalised
from ritornello.vllm.support import refusal, require_one_shard
from ritornello.vllm.weights import fingerprint


def safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    header, data = {}, b""
    for name, content in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


class FullAttentionSpec(SimpleNamespace):
    """Stands for vLLM's: support goes by the exact type's name."""

    def __str__(self) -> str:
        return f"FullAttentionSpec({self.block_size})"


class SlidingWindowSpec(FullAttentionSpec):
    pass


def attention(kind: type[FullAttentionSpec] = FullAttentionSpec, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "block_size": 64,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "torch.bfloat16",
        "page_size_bytes": 32768,
        "sliding_window": None,
        "attention_chunk_size": None,
    }
    return kind(**(fields | changes))


def groups(*specs: Any) -> Any:
    made = [SimpleNamespace(layer_names=["l.0", "l.1"], kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=made, hash_block_size=64, num_blocks=8)


def engine(model: Path, **changes: Any) -> Any:
    """A vllm_config, as far as it is looked at; `changes` by "section__field"."""
    hf = {"model_type": "llama", "hidden_size": 512, "transformers_version": "5"}
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": str(model),
            "revision": None,
            "dtype": "torch.bfloat16",
            "quantization": None,
            "max_model_len": 8192,
            "hf_config": SimpleNamespace(to_dict=lambda: hf),
        },
        "cache_config": {
            "cache_dtype": "auto",
            "block_size": 64,
            "prefix_caching_hash_algo": "sha256",
        },
        "load_config": {"load_format": "auto", "download_dir": None},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
        },
        "device_config": {"device_type": "cpu"},
    }
    top: dict[str, Any] = {"max_concurrent_batches": 1, "speculative_config": None}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            sections[section][key] = value
        else:
            top[section] = value
    return SimpleNamespace(**top, **{name: SimpleNamespace(**f) for name, f in sections.items()})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors(folder / "model.safetensors", {"a": b"\1" * 4000, "b": b"\2" * 4000})
    return folder


def test_a_configuration_is_normalised() -> None:
    one = {"b": {"x": 1, "_name_or_path": "/a"}, "a": [1, 2], "transformers_version": "4"}
    two = {"a": (1, 2), "b": {"x": 1}, "use_cache": True}
    assert normalised(one) == normalised(two) == '{"a":[1,2],"b":{"x":1}}'
    assert model_name({"model_type": "llama"}).startswith("llama:")
    assert model_name({"model_type": "llama", "x": 1}) != model_name({"model_type": "llama"})


def test_a_copy_of_the_weights_has_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (copy / "README.md").write_text("not a weight")
    assert fingerprint(copy) == fingerprint(model)


def test_a_fine_tune_of_the_same_shape_has_another_fingerprint(model: Path) -> None:
    before = fingerprint(model)
    safetensors(model / "model.safetensors", {"a": b"\1" * 4000, "b": b"\3" * 4000})
    assert fingerprint(model) != before


def test_other_formats_are_sampled(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1 << 20))
    before = fingerprint(file)
    assert before is not None
    with file.open("r+b") as opened:
        opened.seek(1 << 19)
        opened.write(b"changed")
    assert fingerprint(file) != before


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, struct.pack("<Q", 2) + b"[]"])
def test_files_that_cannot_be_read_have_no_fingerprint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert fingerprint(tmp_path) is None
    assert fingerprint(tmp_path / "missing") is None


def test_the_same_engine_has_the_same_identity(model: Path) -> None:
    one = identity_of(engine(model), groups(attention()), "amx", "0.32.0")
    assert one == identity_of(engine(model), groups(attention()), "amx", "0.32.0")
    assert one.epoch == b""
    assert one.page_bytes == 2 * 32768
    assert one.layout == "vllm-0.32.0/cpu/amx/64/bfloat16"


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__quantization": "awq"},
        {"model_config__dtype": "torch.float16"},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"load_config__load_format": "bitsandbytes"},
    ],
)
def test_what_changes_bytes_changes_the_identity(model: Path, change: dict[str, Any]) -> None:
    one = identity_of(engine(model), groups(attention()), "amx", "0.32.0")
    assert one != identity_of(engine(model, **change), groups(attention()), "amx", "0.32.0")


def test_isa_version_and_spec_are_part_of_it(model: Path) -> None:
    one = identity_of(engine(model), groups(attention()), "amx", "0.32.0")
    assert one != identity_of(engine(model), groups(attention()), "vec", "0.32.0")
    assert one != identity_of(engine(model), groups(attention()), "amx", "0.33.0")
    assert one != identity_of(engine(model), groups(attention(head_size=128)), "amx", "0.32.0")


def test_weights_that_are_no_files_get_a_random_epoch(model: Path) -> None:
    dummy = engine(model, load_config__load_format="dummy")
    one = identity_of(dummy, groups(attention()), "amx", "0.32.0")
    two = identity_of(dummy, groups(attention()), "amx", "0.32.0")
    assert len(one.epoch) == 16
    assert one.epoch != two.epoch


def test_a_plain_engine_is_served(model: Path) -> None:
    assert refusal(engine(model), groups(attention())) == ""


@pytest.mark.parametrize(
    ("change", "specs", "why"),
    [
        ({"device_config__device_type": "cuda"}, [attention()], "cuda memory"),
        ({"cache_config__calculate_kv_scales": True}, [attention()], "run time"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, [attention()], "random seed"),
        ({"cache_config__block_size": 128}, [attention()], "cover 64 tokens, blocks 128"),
        ({"max_concurrent_batches": 2}, [attention()], "no-async-scheduling"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, [attention()], "eagle"),
        ({}, [attention(), attention()], "2 KV cache groups"),
        ({}, [attention(SlidingWindowSpec)], "not SlidingWindowSpec"),
        ({}, [attention(sliding_window=512)], "window"),
    ],
)
def test_engines_that_are_not_served(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    specs: list[Any],
    why: str,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert why in refusal(engine(model, **change), groups(*specs))


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "decode_context"])
def test_parallel_shards_are_refused_at_start_up(model: Path, kind: str) -> None:
    require_one_shard(engine(model))
    with pytest.raises(ValueError, match="parallel size 2 yet"):
        require_one_shard(engine(model, **{f"parallel_config__{kind}_parallel_size": 2}))
