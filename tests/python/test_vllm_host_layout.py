"""Tests which engines are served. vLLM's host memory consists of rows, one for each offloaded
chunk. An engine is served if each row holds the bytes of all its workers.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ritornello.vllm.host_layout import machines_refusal, stages_are_equal, stages_refusal


class FullAttentionSpec:
    """Stand-in for vLLM's class."""


class UniformTypeKVCacheSpecs:
    """Stand-in for vLLM's class."""


def parallel(**changes: Any) -> Any:
    fields = {"world_size": 4, "nnodes_within_dp": 1, "distributed_executor_backend": "mp"}
    return SimpleNamespace(**(fields | changes))


def group(layers: int, kind: type = FullAttentionSpec) -> Any:
    return SimpleNamespace(layer_names=[f"l.{n}" for n in range(layers)], kv_cache_spec=kind())


@pytest.mark.parametrize(
    "served", [{}, {"world_size": 1, "distributed_executor_backend": "ray"}], ids=str
)
def test_workers_on_one_machine_are_served(served: dict[str, Any]) -> None:
    assert machines_refusal(parallel(**served)) == ""


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ({"nnodes_within_dp": 2}, "other machines"),
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend mp"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
)
def test_workers_that_may_be_on_other_machines_are_refused(
    refused: dict[str, Any], said: str
) -> None:
    reason = machines_refusal(parallel(**refused))
    assert said in reason
    assert "\n" not in reason


def test_equal_stages_are_served() -> None:
    assert stages_are_equal([30, 30], [group(30)], has_draft_kv=False, has_skipped_layers=False)


@pytest.mark.parametrize(
    ("layers", "groups", "has_draft_kv"),
    [
        ([31, 30], [group(31)], False),
        ([31, 30], [group(30)], False),
        # Ten of the 30 layers have no KV. In another stage the number of such layers may differ.
        ([30, 30], [group(20)], False),
        ([30, 30], [group(15), group(15)], False),
        ([30, 30], [group(30, UniformTypeKVCacheSpecs)], False),
        ([30, 30], [group(30)], True),
    ],
)
def test_stages_that_may_differ_are_refused(
    layers: list[int], groups: list[Any], has_draft_kv: bool
) -> None:
    assert not stages_are_equal(layers, groups, has_draft_kv=has_draft_kv, has_skipped_layers=False)


@pytest.mark.parametrize(("skipped", "refused"), [([], False), (["35"], True)])
def test_stages_with_layers_skipped_by_cache_dtype_are_refused(
    skipped: list[str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV cache groups of the first stage do not show layers that the second stage skips."""
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    utils: Any = ModuleType("vllm.distributed.utils")
    utils.get_pp_indices = lambda total, stage, stages: (stage * 30, stage * 30 + 30)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    config: Any = SimpleNamespace(
        parallel_config=parallel(pipeline_parallel_size=2),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 60),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=skipped),
        speculative_config=None,
    )
    caches: Any = SimpleNamespace(kv_cache_groups=[group(30)])
    reason = stages_refusal(config, caches)
    assert ("--kv-cache-dtype-skip-layers" in reason) == refused == bool(reason)


def test_one_stage_is_served() -> None:
    for sizes in ({"world_size": 1}, {"pipeline_parallel_size": 1}):
        config: Any = SimpleNamespace(parallel_config=parallel(**sizes))
        caches: Any = SimpleNamespace(kv_cache_groups=[])
        assert stages_refusal(config, caches) == ""
