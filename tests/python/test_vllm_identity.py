"""The properties of vLLM engines (configuration, weights) that separate one engine's pages from
another's, and engines that the connector refuses.
"""

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ritornello.connector.identity import canonical_config, model_name
from ritornello.connector.weight_fingerprint import fingerprint
from ritornello.vllm import whole_prompts
from ritornello.vllm.cache_groups import ALL, ObjectId, object_ids, trailing
from ritornello.vllm.handshake import GroupMemory, ShardFacts, WorkerRank, group_layouts
from ritornello.vllm.identity import Identity, identity_of
from ritornello.vllm.support import (
    require_no_context_parallel,
    requires_async_loads,
    startup_warnings,
    unsupported_reason,
)


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
    """Stand-in for vLLM's class, whose name tells the connector the kind of KV cache."""

    def __str__(self) -> str:
        return f"FullAttentionSpec({self.block_size})"


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
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
    """Returns the part of a `VllmConfig` that the connector uses. `changes`: other values of
    fields, by "section__field".
    """
    hf = {"model_type": "llama", "hidden_size": 512, "transformers_version": "5"}
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": str(model),
            "revision": None,
            "dtype": "torch.bfloat16",
            "quantization": None,
            "max_model_len": 8192,
            "get_total_num_kv_heads": lambda: 2,
            "hf_config": SimpleNamespace(to_dict=lambda: hf),
        },
        "cache_config": {
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "block_size": 64,
            "prefix_caching_hash_algo": "sha256",
        },
        "load_config": {"load_format": "auto", "download_dir": None},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "world_size": 1,
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


def test_configuration_is_canonical() -> None:
    one = {"b": {"x": 1, "_name_or_path": "/a"}, "a": [1, 2], "transformers_version": "4"}
    two = {"a": (1, 2), "b": {"x": 1}, "use_cache": True}
    assert canonical_config(one) == canonical_config(two) == '{"a":[1,2],"b":{"x":1}}'
    assert model_name({"model_type": "llama"}).startswith("llama:")
    assert model_name({"model_type": "llama", "x": 1}) != model_name({"model_type": "llama"})


def test_copied_weights_have_same_fingerprint(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (copy / "README.md").write_text("not a weight")
    assert fingerprint(copy) == fingerprint(model)


def test_fine_tune_has_other_fingerprint(model: Path) -> None:
    before = fingerprint(model)
    safetensors(model / "model.safetensors", {"a": b"\1" * 4000, "b": b"\3" * 4000})
    assert fingerprint(model) != before


def test_fingerprint_of_other_formats_samples_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1 << 20))
    before = fingerprint(file)
    assert before is not None
    with file.open("r+b") as opened:
        opened.seek(1 << 19)
        opened.write(b"changed")
    assert fingerprint(file) != before


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, struct.pack("<Q", 2) + b"[]"])
def test_unreadable_files_have_no_fingerprint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert fingerprint(tmp_path) is None
    assert fingerprint(tmp_path / "missing") is None


def told(
    ranks: int = 1, stages: int = 1, heads: int = 2, *, head_major: bool = True, groups: int = 1
) -> dict[WorkerRank, ShardFacts]:
    """Returns what the workers report about their KV memory. Each stage of the model has two
    layers. `heads`: KV heads of a worker.
    """
    return {
        (stage, rank): ShardFacts(
            tuple(
                GroupMemory(
                    (f"l.{2 * stage}", f"l.{2 * stage + 1}"), heads * 32768, heads, head_major
                )
                for _ in range(groups)
            )
        )
        for stage in range(stages)
        for rank in range(ranks)
    }


def identify(
    model: Path,
    *specs: Any,
    facts: dict[WorkerRank, ShardFacts] | None = None,
    layout: str = "vllm-0.32.0/cpu/amx",
    **change: Any,
) -> Identity:
    config, caches = engine(model, **change), groups(*(specs or (attention(),)))
    parallel = config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    count = len(caches.kv_cache_groups)
    found = group_layouts(facts or told(ranks, stages, groups=count), stages, ranks, count)
    return identity_of(config, caches, found, lambda spec: layout)


def scope_ids(identity: Identity) -> set[bytes]:
    return {identity.scope(of).id for of in object_ids(identity.groups)}


def test_same_engine_has_same_identity(model: Path) -> None:
    one = identify(model)
    assert one == identify(model)
    assert one.model.epoch == b""
    (group,) = one.groups
    assert group.layout == "vllm-0.32.0/cpu/amx/heads"
    assert group.head_ranges == ((0, 1), (1, 2))
    assert group.object_bytes(0, 0) == 2 * 32768
    assert one.scope(ObjectId(0, 0, 1)).describe()["kv_heads"] == (1, 2)


def test_stored_pages_keep_their_scopes(model: Path) -> None:
    """If the id of this scope changes, pages that earlier versions stored are not found."""
    window = attention(SlidingWindowSpec, sliding_window=128)
    one = identify(model, attention(), window, cache_config__cache_dtype="fp8")
    assert one.scope(ObjectId(1, 0, 0)).id.hex() == "4c76f7fd47b4313796ed1aa6659cc1cb"


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__quantization": "awq"},
        {"model_config__dtype": "torch.float16"},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"load_config__load_format": "safetensors"},
    ],
)
def test_changes_of_bytes_change_identity(model: Path, change: dict[str, Any]) -> None:
    assert scope_ids(identify(model)).isdisjoint(scope_ids(identify(model, **change)))


def test_memory_layout_and_spec_are_in_identity(model: Path) -> None:
    one = scope_ids(identify(model))
    assert one.isdisjoint(scope_ids(identify(model, layout="vllm-0.32.0/cpu/vec")))
    assert one.isdisjoint(scope_ids(identify(model, attention(head_size=128))))


def test_weights_without_files_get_random_epoch(model: Path) -> None:
    one, two = (identify(model, load_config__load_format="dummy") for _ in range(2))
    assert len(one.model.epoch) == 16
    assert one.model.epoch != two.model.epoch
    assert "weights were not loaded from files" in startup_warnings(one)[0]


def split(model: Path, ranks: int, *, head_major: bool = True, **spec: Any) -> Identity:
    heads = spec.setdefault("num_kv_heads", 1)
    return identify(
        model,
        attention(**spec),
        facts=told(ranks, heads=heads, head_major=head_major),
        parallel_config__tensor_parallel_size=ranks,
    )


def test_other_worker_count_finds_same_objects(model: Path) -> None:
    one = identify(model)
    for ranks in (2, 4):
        assert scope_ids(split(model, ranks)) == scope_ids(one)
        assert startup_warnings(split(model, ranks)) == []


def test_inseparable_heads_depend_on_worker_count(model: Path) -> None:
    whole = identify(model, facts=told(head_major=False))
    halves = split(model, 2, head_major=False)
    assert whole.groups[0].head_ranges == ((0, 2),)
    assert scope_ids(whole).isdisjoint(scope_ids(halves))
    assert "not found at another tensor parallel size than 2" in startup_warnings(halves)[0]


def test_stages_are_named_by_layers(model: Path) -> None:
    one = identify(model, facts=told(stages=2), parallel_config__pipeline_parallel_size=2)
    assert one.groups[0].stages == (("l.0", "l.1"), ("l.2", "l.3"))
    assert one.scope(ObjectId(0, 1, 0)).describe()["layers"] == (2, 4)
    assert len(scope_ids(one)) == 4


def test_latent_attention_is_one_object(model: Path) -> None:
    spec = attention(MLAAttentionSpec, num_kv_heads=1, max_tp_shards=1)
    ids = [
        scope_ids(
            identify(
                model,
                spec,
                facts=told(ranks, heads=1),
                parallel_config__tensor_parallel_size=ranks,
            )
        )
        for ranks in (1, 2, 8)
    ]
    assert ids[0] == ids[1] == ids[2]
    assert len(ids[0]) == 1


def test_group_with_window_has_unchained_scope(model: Path) -> None:
    window = attention(SlidingWindowSpec, sliding_window=128, extra_retained_tokens=1)
    one = identify(model, attention(), window)
    assert [group.reach for group in one.groups] == [ALL, trailing(129)]
    described = one.scope(ObjectId(1, 0, 0)).describe()
    assert (described["part"], described["chained"]) == (1, False)


def test_unclear_head_split_is_refused(model: Path) -> None:
    assert split(model, 2, num_kv_heads=4).groups[0].kv_heads == 8
    with pytest.raises(ValueError, match="cannot be derived"):
        split(model, 3)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, "2 of 2 workers sent no description"),
        ({(0, 0): ShardFacts(unsupported_reason="its KV cache is in cuda memory")}, "cuda memory"),
        ({(0, 0): told()[0, 0], (0, 1): ShardFacts()}, r"\(0, 1\) has 0 KV cache groups"),
        ({(0, 0): told()[0, 0]}, "1 of 2 workers sent no description"),
        (
            {
                (0, 0): told()[0, 0],
                (0, 1): ShardFacts((GroupMemory(("l.9", "l.1"), 65536, 2, True),)),
            },
            "different layers",
        ),
        (
            {
                (0, 0): told()[0, 0],
                (0, 1): ShardFacts((GroupMemory(("l.0", "l.1"), 32768, 2, True),)),
            },
            "differ in size",
        ),
        (
            {
                (0, 0): told()[0, 0],
                (0, 1): ShardFacts((replace(told()[0, 0].groups[0], arrangement="other"),)),
            },
            "arrange their blocks differently",
        ),
    ],
)
def test_disagreeing_workers_are_refused(facts: dict[WorkerRank, ShardFacts], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        group_layouts(facts, 1, 2, 1)


def test_plain_engine_is_served(model: Path) -> None:
    assert unsupported_reason(engine(model), groups(attention())) == ""
    without = engine(model, cache_config__enable_prefix_caching=False)
    assert unsupported_reason(without, groups(attention())) == ""
    assert unsupported_reason(engine(model), groups(attention(MLAAttentionSpec))) == ""


@pytest.mark.parametrize(
    ("change", "specs", "why"),
    [
        ({"cache_config__calculate_kv_scales": True}, [attention()], "run time"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, [attention()], "random seed"),
        ({}, [attention(block_size=96)], "not a multiple of the 64 tokens"),
        ({"model_config__rswa_window": 128}, [attention()], "where the prompt ended"),
        ({}, [attention(), attention(MambaSpec)], "own copies do not serve MambaSpec"),
        ({}, [attention(MambaSpec)], "RitornelloTier of vLLM's offloading"),
        ({}, [attention(tokens_per_state=4)], "several tokens in one state"),
        (
            {"cache_config__enable_prefix_caching": False},
            [attention(MLAAttentionSpec)],
            "prefix caching is off",
        ),
        ({}, [], "keeps no KV"),
        ({}, [attention(), attention(non_causal=True)], "not causal"),
        (
            {},
            [attention(kv_cache_specs={"l.0": attention(), "l.1": attention(non_causal=True)})],
            "not causal",
        ),
        (
            {
                "model_config__runner_type": "pooling",
                "model_config__is_prefix_caching_supported": False,
            },
            [attention()],
            "no prefix caching for this pooling model",
        ),
    ],
)
def test_unsupported_engines_are_refused(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    specs: list[Any],
    why: str,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert why in unsupported_reason(engine(model, **change), groups(*specs))


def test_pooling_that_continues_prefixes_is_served(model: Path) -> None:
    pooling = engine(
        model, model_config__runner_type="pooling", model_config__is_prefix_caching_supported=True
    )
    assert unsupported_reason(pooling, groups(attention())) == ""


@pytest.mark.parametrize("limits_hits", [False, True])
def test_routed_experts_are_served_only_where_vllm_limits_hits(
    model: Path, monkeypatch: pytest.MonkeyPatch, limits_hits: bool
) -> None:
    module: Any = ModuleType(whole_prompts.ROUTED_EXPERTS)
    methods = {"cap_external_hit": None} if limits_hits else {}
    module.AuxOutputSchedulerConnector = type("AuxOutputSchedulerConnector", (), methods)
    monkeypatch.setattr(whole_prompts, "import_module", {module.__name__: module}.__getitem__)
    returning = engine(model, aux_output_config=SimpleNamespace(enabled=True))
    reason = unsupported_reason(returning, groups(attention()))
    assert reason == "" if limits_hits else "--enable-return-routed-experts" in reason


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_context_parallelism_is_refused_at_startup(model: Path, kind: str) -> None:
    require_no_context_parallel(engine(model))
    with pytest.raises(ValueError, match="context parallel size 2"):
        require_no_context_parallel(
            engine(model, **{f"parallel_config__{kind}_context_parallel_size": 2})
        )


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"parallel_config__world_size": 2}, 1),
        ({"max_concurrent_batches": 2}, 1),
        ({}, 2),
    ],
)
def test_several_workers_batches_or_groups_require_async_loads(
    model: Path, change: dict[str, Any], count: int
) -> None:
    assert not requires_async_loads(engine(model), groups(attention()))
    assert requires_async_loads(engine(model, **change), groups(*[attention()] * count))
