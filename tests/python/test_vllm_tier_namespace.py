"""Our secondary tier of vLLM's offloading: the properties of engines that separate one engine's
chunks from another's, engines that are refused, and the check of vLLM's interface of secondary
tiers.
"""

from dataclasses import MISSING, dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_identity import engine, groups, model

from ritornello.vllm.tier import interface
from ritornello.vllm.tier.namespace import (
    ROW_BYTES_MAX,
    KernelPlatform,
    Namespace,
    is_unbounded,
    namespace_of,
    spec_text,
    unsupported_reason,
    window_chunks,
    windows_refusal,
)
from ritornello.vllm.tier.sequence import Group

__all__ = ["model"]

ROW = 65536


@dataclass(frozen=True)
class FullAttentionSpec:
    """Stand-in for vLLM's class."""

    num_kv_heads: int = 2
    block_size: int = 64
    dtype: str = "torch.bfloat16"
    sliding_window: int | None = None


@dataclass(frozen=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Stand-in for vLLM's class."""

    sink_len: int | None = None


@dataclass(frozen=True)
class SlidingWindowSpec:
    """Stand-in for vLLM's class."""

    sliding_window: int
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec:
    """Stand-in for vLLM's class."""

    attention_chunk_size: int


@dataclass(frozen=True)
class MambaSpec:
    """Stand-in for vLLM's class."""

    shapes: tuple[tuple[int, ...], ...] = ((2, 64),)


MACHINE = KernelPlatform("0.32.0", "cuda 9.0 None")


def processor(options: dict[str, Any] | None) -> Any:
    """Returns a stand-in for vLLM's `MultiModalConfig`."""
    return SimpleNamespace(mm_processor_kwargs=options)


def pruning(rate: float | None, method: str = "evs") -> Any:
    """Returns a stand-in for vLLM's `MultiModalConfig`."""
    return SimpleNamespace(video_pruning_rate=rate, video_pruning_method=method)


@dataclass(frozen=True)
class QuantSpec:
    """Stand-in for vLLM's class, whose text lacks the activation."""

    weight: str
    activation: str | None = None

    def __str__(self) -> str:
        return self.weight


@dataclass(frozen=True)
class QuantizationConfigArgs:
    """Stand-in for vLLM's class."""

    linear: QuantSpec | None = None
    ignore: tuple[str, ...] = ()


def offloading(count: int = 1, **changes: Any) -> Any:
    """Returns the part of a vLLM `OffloadingConfig` that our tier uses, with `count` groups."""
    parallel = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    parallel |= {name: changes.pop(name) for name in list(changes) if name in parallel}
    portable = changes.pop("is_parallelism_agnostic", False)
    group = [
        SimpleNamespace(group_id=n, tokens_per_block=64, layer_names=("l.0", "l.1"))
        for n in range(count)
    ]
    fields: dict[str, Any] = {
        "groups": tuple(group),
        "cache": SimpleNamespace(
            blocks_per_chunk=changes.pop("blocks_per_chunk", 1),
            tokens_per_hash=changes.pop("tokens_per_hash", 64),
        ),
        "model": SimpleNamespace(dtype="bfloat16"),
        "parallel": SimpleNamespace(**parallel, is_parallelism_agnostic=portable),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
    }
    return SimpleNamespace(**(fields | changes))


def vllm(folder: Path, **changes: Any) -> Any:
    made = engine(folder, **changes)
    made.model_config.get_total_num_kv_heads = lambda: 2
    made.model_config.get_head_size = lambda: 64
    return made


def of(folder: Path, **changes: Any) -> Namespace:
    """Returns the namespace of an engine. `changes`: other values of fields of vLLM's
    configuration, by "section__field", or of `OffloadingConfig`, or `machine` (the kernel
    platform), `row` (bytes of a chunk in the host tier) or `specs` (one for each KV cache group).
    """
    config = {name: changes.pop(name) for name in list(changes) if "__" in name}
    machine, row = changes.pop("machine", MACHINE), changes.pop("row", ROW)
    specs = changes.pop("specs", [FullAttentionSpec()])
    return namespace_of(
        vllm(folder, **config),
        groups(*specs),
        offloading(len(specs), **changes),
        row,
        machine,
    )


def test_same_engine_has_same_scope(model: Path) -> None:
    one, two = of(model), of(model)
    assert one == two
    assert one.scope(one.groups[0]).id == two.scope(two.groups[0]).id
    assert one.model.epoch == b""


def test_stored_chunks_keep_their_scope(model: Path) -> None:
    """If the id of this scope changes, chunks that earlier versions stored are not found."""
    one = of(model, tp_size=2, cache_config__cache_dtype="fp8")
    assert one.scope(one.groups[0]).id.hex() == "5ae477d26f2bb26aa651a9c00bbc6e51"


@pytest.mark.parametrize(
    "change",
    [
        {"tp_size": 2},
        {"pp_size": 2},
        {"pcp_size": 2},
        {"dcp_size": 2},
        {"blocks_per_chunk": 4},
        {"tokens_per_hash": 32},
        {"kv_cache_layout": "BLHNC"},
        {"replicated_layout": True},
        {"row": 2 * ROW},
        {"machine": KernelPlatform("0.33.0", "cuda 9.0 None")},
        {"machine": KernelPlatform("0.32.0", "cuda 8.0 None")},
        {"machine": KernelPlatform("0.32.0", "cuda 9.0 None", "canonical v1")},
        {"specs": [FullAttentionSpec(dtype="torch.float8_e4m3fn")]},
        {"specs": [FullAttentionSpec(), FullAttentionSpec()]},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0", "31"]},
        {"model_config__multimodal_config": processor({"size": {"longest_edge": 1024}})},
        {"model_config__multimodal_config": pruning(0.5)},
        {"model_config__quantization_config": {"linear": "mxfp4"}},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"model_config__quantization": "awq"},
        {"model_config__hf_config": SimpleNamespace(to_dict=lambda: {"model_type": "other"})},
    ],
)
def test_scope_covers_changes_of_bytes(model: Path, change: dict[str, Any]) -> None:
    one, other = of(model), of(model, **change)
    assert one.scope(one.groups[0]).id != other.scope(other.groups[0]).id


def test_order_of_skipped_layers_keeps_scope(model: Path) -> None:
    none, *lists = (
        of(model, cache_config__kv_cache_dtype_skip_layers=skipped)
        for skipped in ([], ["1", "0"], ["0", "1"])
    )
    assert none == of(model)
    assert lists[0] == lists[1]


def test_processor_options_are_compared_by_value(model: Path) -> None:
    none, one, two, other = (
        of(model, model_config__multimodal_config=processor(options))
        for options in (None, {"a": 1, "b": [2]}, {"b": (2,), "a": 1}, {"a": 1, "b": [3]})
    )
    assert none == of(model)
    assert one == two != other


def test_scope_covers_rate_and_method_of_video_pruning(model: Path) -> None:
    none, *others = (
        of(model, model_config__multimodal_config=config)
        for config in (pruning(None), pruning(0.5), pruning(0.75), pruning(0.5, "vidcom2"))
    )
    assert none == of(model)
    assert len({one.scope(one.groups[0]).id for one in others}) == 3


def test_scope_covers_every_field_of_quantization(model: Path) -> None:
    none, *others = (
        of(model, model_config__quantization_config=config)
        for config in (
            None,
            QuantizationConfigArgs(QuantSpec("fp8")),
            QuantizationConfigArgs(QuantSpec("mxfp4")),
            QuantizationConfigArgs(QuantSpec("fp8", "fp8")),
            QuantizationConfigArgs(QuantSpec("fp8"), ("lm_head",)),
        )
    )
    assert none == of(model)
    assert len({one.scope(one.groups[0]).id for one in others}) == 4


def test_other_weights_make_other_scopes(model: Path) -> None:
    before = of(model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4000] + b"\3" * 4000)
    after = of(model)
    assert before.scope(before.groups[0]).id != after.scope(after.groups[0]).id


def test_weights_without_files_get_random_epoch(model: Path) -> None:
    one, two = (of(model, load_config__load_format="dummy") for _ in range(2))
    assert one.model.epoch != two.model.epoch
    assert one.with_new_epoch().model.epoch != one.model.epoch


def test_parallel_sizes_share_rank_free_rows_only(model: Path) -> None:
    """By vLLM's guarantee two kinds of rows do not depend on the number of ranks: rows of which all
    ranks have one copy (`replicated_layout`), and rows in a canonical layout with
    `is_parallelism_agnostic`.
    """

    def at(ranks: int, **layout: bool) -> Namespace:
        specs = [FullAttentionSpec(num_kv_heads=2 // ranks)]
        return of(model, **{"tp_size": ranks, "specs": specs} | layout)

    assert at(1, canonical_layout=True, is_parallelism_agnostic=True) == at(
        2, canonical_layout=True, is_parallelism_agnostic=True
    )
    assert at(1, is_parallelism_agnostic=True) != at(2, is_parallelism_agnostic=True)
    assert at(1, canonical_layout=True) != at(2, canonical_layout=True)
    assert at(1, replicated_layout=True) == at(2, replicated_layout=True)


def test_spec_text_has_all_fields() -> None:
    spec = FullAttentionSpec(2)
    told = "(num_kv_heads=2, block_size=64, dtype=torch.bfloat16, sliding_window=None)"
    assert spec_text(spec, rank_free=False) == f"FullAttentionSpec{told}"
    assert "num_kv_heads" not in spec_text(spec, rank_free=True)


def test_only_full_attention_is_unbounded() -> None:
    assert is_unbounded(FullAttentionSpec())
    assert is_unbounded(SinkFullAttentionSpec(sink_len=4))
    # This is the specification that vLLM gives to layers with a window if its hybrid cache manager
    # is off.
    assert is_unbounded(FullAttentionSpec(sliding_window=128))
    assert not is_unbounded(SlidingWindowSpec(128))
    assert not is_unbounded(ChunkedLocalAttentionSpec(128))
    assert not is_unbounded(MambaSpec())
    assert not is_unbounded(SimpleNamespace())


@pytest.mark.parametrize(
    ("spec", "chunk_tokens", "chunks"),
    [
        (SlidingWindowSpec(128), 64, 2),
        (SlidingWindowSpec(128), 256, 1),
        (SlidingWindowSpec(129), 64, 3),
        (SlidingWindowSpec(1), 64, 1),
        (SlidingWindowSpec(128, extra_retained_tokens=1), 64, 2),
        (SlidingWindowSpec(128, extra_retained_tokens=2), 64, 3),
        (ChunkedLocalAttentionSpec(8192), 256, 32),
        (ChunkedLocalAttentionSpec(8192), 16384, 1),
        (MambaSpec(), 64, 1),
        (MambaSpec(), 1 << 20, 1),
    ],
    ids=repr,
)
def test_window_is_counted_in_chunks(spec: Any, chunk_tokens: int, chunks: int) -> None:
    assert window_chunks(spec, chunk_tokens) == chunks


def test_groups_of_hybrid_model_name_their_windows(model: Path) -> None:
    specs = [FullAttentionSpec(), SlidingWindowSpec(256), MambaSpec()]
    space = of(model, specs=specs, blocks_per_chunk=2)
    chunk = 128
    assert space.groups == (
        Group(0, chunk, chained=True, window_chunks=1),
        Group(1, chunk, chained=False, window_chunks=2),
        Group(2, chunk, chained=False, window_chunks=1),
    )
    assert [space.scope(group).chained for group in space.groups] == [True, False, False]
    assert len({space.scope(group).id for group in space.groups}) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache_config__calculate_kv_scales": True}, "run time"),
        ({"cache_config__cache_dtype": "fp8_per_token_head"}, "run time"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "PYTHONHASHSEED"),
        ({"model_config__rswa_window": 128}, "R-SWA"),
    ],
)
def test_ambiguous_engines_are_refused(
    model: Path, changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert unsupported_reason(vllm(model), offloading(), ROW) == ""
    assert said in unsupported_reason(vllm(model, **changes), offloading(), ROW)


def test_oversized_chunks_and_unknown_engines_are_refused(model: Path) -> None:
    assert "was not found" in unsupported_reason(None, offloading(), ROW)
    assert "blocks_per_chunk" in unsupported_reason(vllm(model), offloading(), ROW_BYTES_MAX + 4096)
    assert unsupported_reason(vllm(model), offloading(), ROW_BYTES_MAX) == ""
    assert "no KV cache group" in unsupported_reason(vllm(model), offloading(0), ROW)


@pytest.mark.parametrize("spec", [SlidingWindowSpec(128), ChunkedLocalAttentionSpec(128)], ids=repr)
def test_windows_in_chunks_of_several_blocks_are_refused_before_fix(spec: Any) -> None:
    caches = groups(FullAttentionSpec(), spec)
    reason = windows_refusal(offloading(2, blocks_per_chunk=4), caches, "0.32.0")
    assert '"blocks_per_chunk": 1' in reason
    assert "\n" not in reason
    assert windows_refusal(offloading(2, blocks_per_chunk=4), caches, "0.33.0") == ""
    assert windows_refusal(offloading(2), caches, "0.32.0") == ""
    others = groups(FullAttentionSpec(sliding_window=128), MambaSpec())
    assert windows_refusal(offloading(2, blocks_per_chunk=4), others, "0.32.0") == ""


def base(**changes: Any) -> Any:
    """Returns a stand-in for vLLM's class of secondary tiers that has the interface in
    `ritornello.vllm.tier.interface`; `changes` adds or replaces members, and `"gone"` removes
    a member.
    """

    def made(
        self: Any,
        offloading_spec: Any,
        primary_kv_view: Any,
        tier_type: Any,
        backpressure_detector: Any = None,
    ) -> None: ...

    fields: dict[str, Any] = dict.fromkeys(interface.HOOKS | interface.ABSTRACT)
    fields |= {"__abstractmethods__": interface.ABSTRACT, "__init__": made} | changes
    return SimpleNamespace(**{name: value for name, value in fields.items() if value != "gone"})


@dataclass
class Job:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: Any
    submit_time: float


@dataclass
class Result:
    job_id: int
    success: bool
    successful_keys: Any
    transfer_time: Any
    transfer_bytes: Any


class Answers(Enum):
    HIT = 1
    MISS = 2
    RETRY = 3
    HIT_PENDING = 4


def wider_constructor(
    self: Any,
    offloading_spec: Any,
    primary_kv_view: Any,
    tier_type: Any,
    backpressure_detector: Any = None,
    numa_node: Any = None,
) -> None: ...


def stricter_constructor(
    self: Any,
    offloading_spec: Any,
    primary_kv_view: Any,
    tier_type: Any,
    backpressure_detector: Any,
    numa_node: Any,
) -> None: ...


def widened(record: type, **further: Any) -> Any:
    """Returns a dataclass with the fields of `record`, and with `further` fields that have these
    defaults; `MISSING`: no default.
    """
    fields = [(name, object) for name in record.__annotations__]
    more = [(name, object, field(default=default)) for name, default in further.items()]
    return make_dataclass(record.__name__, [*fields, *more], kw_only=True)


def test_superset_of_interface_is_accepted() -> None:
    tier = base(__init__=wider_constructor, submit_delete=lambda self, keys: None)
    result = widened(Result, retries=0)
    assert interface.interface_difference(tier, Job, result, Answers) == ""


def test_job_with_a_further_field_is_refused() -> None:
    # vLLM may set the field although it has a default, for example to the length of a transfer.
    job = widened(Job, offset=0)
    assert "offset" in interface.interface_difference(base(), job, Result, Answers)


@pytest.mark.parametrize(
    ("tier", "job", "result", "problem"),
    [
        (base(), widened(Job, deadline=MISSING), Result, "Job has .*, submit_time, deadline"),
        (base(), Job, widened(Result, deadline=MISSING), "Result has .*, transfer_bytes, deadline"),
        (base(__init__=stricter_constructor), Job, Result, "backpressure_detector, numa_node"),
    ],
)
def test_unknown_required_part_fails_in_one_line(
    tier: Any, job: Any, result: Any, problem: str
) -> None:
    difference = interface.interface_difference(tier, job, result, Answers)
    with pytest.raises(ImportError, match=problem) as refused:
        interface.INTERFACE.require(difference, "0.34.0")
    assert "\n" not in str(refused.value)


def test_unknown_interface_fails_in_one_line() -> None:
    assert interface.interface_difference(base(), Job, Result, Answers) == ""
    interface.INTERFACE.require("", "0.33.0")
    abstract = base(__abstractmethods__=interface.ABSTRACT | {"submit_delete"})
    assert "take_events" in interface.interface_difference(
        base(take_events="gone"), Job, Result, Answers
    )
    difference = interface.interface_difference(abstract, Job, Result, Answers)
    assert "submit_delete" in difference
    other = base(__init__=lambda self, config: None)
    assert "takes config" in interface.interface_difference(other, Job, Result, Answers)
    assert "Result has" in interface.interface_difference(base(), Result, Result, Answers)
    assert "RETRY" in interface.interface_difference(base(), Job, Result, Enum("Few", "HIT MISS"))
    with pytest.raises(ImportError, match=r"0\.34\.0 differs") as raised:
        interface.INTERFACE.require(difference, "0.34.0")
    assert "\n" not in str(raised.value)
