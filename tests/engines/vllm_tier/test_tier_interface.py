"""The interface of secondary tiers of every supported vLLM, read from its sources without importing
them.

Methods that the tier overrides must exist in vLLM with parameters that it accepts, and the
attributes that it uses of vLLM's objects must have the same names.
"""

import ast
import inspect
from pathlib import Path

import pytest
from vllm_sources import class_of, downloaded, installed, is_abstract, methods

from ritornello.vllm import RitornelloTier
from ritornello.vllm.interface import PARAMETERS as CONNECTOR_PARAMETERS
from ritornello.vllm.offloading_path import OffloadingPath
from ritornello.vllm.tier.interface import ABSTRACT, HOOKS, JOB, PARAMETERS, RESULT
from ritornello.vllm.tier.manager import AsyncLookups

OFFLOAD = "vllm/v1/kv_offload"
CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/offloading"
BASE = f"{OFFLOAD}/tiering/base.py"


@pytest.fixture(params=["installed", "next"])
def sources(request: pytest.FixtureRequest) -> Path:
    return installed() if request.param == "installed" else downloaded()


def fields(node: ast.ClassDef) -> tuple[str, ...]:
    """Returns the fields of a dataclass, in order, without private fields that its constructor
    omits.
    """
    return tuple(
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    )


def parameters(method: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in method.args.args]


def test_tier_class_is_the_tested_one(sources: Path) -> None:
    base = methods(class_of(sources, BASE, "SecondaryTierManager"))
    assert {name for name, method in base.items() if is_abstract(method)} == ABSTRACT
    assert not HOOKS - set(base)
    assert tuple(parameters(base["__init__"])) == ("self", *PARAMETERS)
    assert fields(class_of(sources, BASE, "TransferJob")) == JOB
    assert fields(class_of(sources, BASE, "JobResult")) == RESULT


def test_overrides_take_vllm_arguments(sources: Path) -> None:
    base = methods(class_of(sources, BASE, "SecondaryTierManager"))
    ours = {name for name in vars(RitornelloTier) if name in base and name != "__init__"}
    assert len(ours) > 12
    for name in ours:
        taken = list(inspect.signature(getattr(RitornelloTier, name)).parameters)
        passed = parameters(base[name])[1:]
        assert [name for name in taken if name not in ("self", "cls")] == passed, name


def test_next_vllm_requires_config_info() -> None:
    base = methods(class_of(downloaded(), BASE, "SecondaryTierManager"))
    assert parameters(base["config_info_keys"]) == ["cls", "tier_config"]
    assert parameters(base["config_info"]) == ["self"]
    tier = {"type": "RitornelloTier", "module_path": "ritornello.vllm", "path": "/x"}
    keys = RitornelloTier.config_info_keys(tier | {"backpressure": {}})
    assert "ritornello_path" in keys
    assert "tier" not in keys


def test_async_lookups_are_batched(sources: Path) -> None:
    base = methods(class_of(sources, f"{OFFLOAD}/tiering/async_lookup.py", "AsyncLookupManager"))
    assert parameters(base["__init__"]) == ["self", "tier_type"]
    assert {name for name, method in base.items() if is_abstract(method)} == {"batch_lookup"}
    taken = list(inspect.signature(AsyncLookups.batch_lookup).parameters)
    assert taken == parameters(base["batch_lookup"])
    assert not {"lookup", "flush", "cleanup", "shutdown"} - set(base)


def test_engine_configuration_is_on_stack(sources: Path) -> None:
    """The tier finds vLLM's configuration in the stack frame of the caller that constructs it, and
    checks that its settings are the same object as in the tier's own configuration.
    """
    scheduler = class_of(sources, f"{CONNECTOR}/scheduler.py", "OffloadingConnectorScheduler")
    init = methods(scheduler)["__init__"]
    assert parameters(init) == ["self", "spec", "vllm_config", "kv_cache_config"]
    assert "spec.get_manager()" in ast.unparse(init)
    config = (sources / f"{CONNECTOR}/config.py").read_text()
    assert "extra_config = kv_transfer_config.kv_connector_extra_config" in config
    assert "extra_config=extra_config" in config
    assert "self.extra_config = config.extra_config" in (sources / f"{OFFLOAD}/base.py").read_text()


def test_connector_configures_offloading(sources: Path) -> None:
    """`OffloadingPath` derives from vLLM's connector, and sets these keys of its configuration."""
    folder = "vllm/distributed/kv_transfer/kv_connector/v1"
    connector = methods(
        class_of(sources, f"{folder}/offloading_connector.py", "OffloadingConnector")
    )
    assert parameters(connector["__init__"]) == ["self", *CONNECTOR_PARAMETERS]
    for name in ("get_num_new_matched_tokens", "build_prom_metrics"):
        taken = list(inspect.signature(getattr(OffloadingPath, name)).parameters)
        assert [p for p in taken if p != "self"] == parameters(connector[name])[1:]
    config = (sources / f"{CONNECTOR}/config.py").read_text()
    assert "def build_offloading_config(\n    vllm_config" in config
    assert 'extra_config.get("blocks_per_chunk")' in config
    read = {
        f"{OFFLOAD}/base.py": ["offload_prompt_only", "self_describing_kv_events"],
        f"{OFFLOAD}/cpu/spec.py": ["cpu_bytes_to_use"],
        f"{OFFLOAD}/tiering/spec.py": ["secondary_tiers"],
    }
    for file, keys in read.items():
        code = "".join((sources / file).read_text().split())
        assert [key for key in keys if f'self.extra_config.get("{key}"' not in code] == [], file
    # Settings of a tier, Python objects included, reach its constructor.
    assert "            **config,\n" in (sources / f"{OFFLOAD}/tiering/factory.py").read_text()
    assert '"TieringOffloadingSpec"' in (sources / f"{OFFLOAD}/factory.py").read_text()
    parallel = (sources / "vllm/config/parallel.py").read_text()
    assert "    data_parallel_size_local: int" in parallel
    assert "def is_cpu(self) -> bool:" in (sources / "vllm/platforms/interface.py").read_text()


def test_only_cache_reset_drains_jobs(sources: Path) -> None:
    """The tier begins an epoch in `drain_jobs`, which vLLM calls only to reset its cache."""
    manager = class_of(sources, f"{OFFLOAD}/tiering/manager.py", "TieringOffloadingManager")
    drains = [name for name, m in methods(manager).items() if ".drain_jobs()" in ast.unparse(m)]
    assert drains == ["reset_cache"]


@pytest.mark.parametrize(
    ("file", "name", "used"),
    [
        (
            "config.py",
            "OffloadingConfig",
            {
                "groups",
                "extra_config",
                "model",
                "cache",
                "parallel",
                "replicated_layout",
                "canonical_layout",
                "kv_cache_layout",
                "worker_kv_bytes_per_block",
            },
        ),
        ("config.py", "OffloadingGroupConfig", {"tokens_per_block", "layer_names", "group_id"}),
        ("config.py", "OffloadingCacheConfig", {"tokens_per_hash", "blocks_per_chunk"}),
        (
            "config.py",
            "OffloadingParallelConfig",
            {
                "tp_size",
                "pp_size",
                "pcp_size",
                "dcp_size",
                "is_parallelism_agnostic",
                "world_size",
            },
        ),
        ("base.py", "ReqContext", {"req_id", "kv_transfer_params", "_offload_key_positions"}),
        ("base.py", "OffloadingEvent", {"keys", "medium", "removed", "locality"}),
        ("base.py", "OffloadingKVEventsConfig", {"self_describing_kv_events"}),
        ("base.py", "OffloadingMetricMetadata", {"documentation", "labelnames"}),
    ],
)
def test_used_parts_of_vllm_exist(sources: Path, file: str, name: str, used: set[str]) -> None:
    assert not used - set(fields(class_of(sources, f"{OFFLOAD}/{file}", name)))


@pytest.mark.parametrize(
    ("file", "texts"),
    [
        (f"{OFFLOAD}/base.py", ["group_idx.to_bytes(4, ", "def get_offload_key_position("]),
        (f"{OFFLOAD}/base.py", ["class OffloadingCounterMetadata(OffloadingMetricMetadata):"]),
        (f"{CONNECTOR}/canonical_mapping.py", ["def canonical_format_id("]),
        (f"{CONNECTOR}/metrics.py", ["def increase_counter(\n        self,\n        counter_name"]),
        ("vllm/v1/attention/backends/cpu_attn.py", ["def _get_attn_isa(\n    dtype"]),
        (f"{OFFLOAD}/cpu/shared_offload_region.py", ["BLOCK_SIZE_ALIGNMENT: int = mmap.PAGESIZE"]),
    ],
)
def test_used_names_exist(sources: Path, file: str, texts: list[str]) -> None:
    code = (sources / file).read_text()
    assert [text for text in texts if text not in code] == []


def test_host_row_depends_on_parallel_size(tmp_path: Path) -> None:
    """One rank and two ranks write the same two layers of two heads as vLLM lays them out. Rows
    that are not canonical are never shared, for any value of `is_parallelism_agnostic`.
    """
    import torch
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    page = 4096
    layers = [torch.full((2, page), 10 * n, dtype=torch.int8) for n in (1, 2)]
    for n, layer in enumerate(layers):
        layer[1] = 10 * (n + 1) + 1
    rows = []
    for ranks in (1, 2):
        region: bytes = b""
        made = []
        for rank in range(ranks):
            part = SharedOffloadRegion(
                engine_id=f"ritornello-test-{tmp_path.parent.name}-{tmp_path.name}-{ranks}",
                num_chunks=1,
                rank=rank,
                kv_bytes_per_chunk=4 * page,
                cpu_page_size=4 * page // ranks,
            )
            made.append(part)
            heads = slice(2 * rank // ranks, 2 * (rank + 1) // ranks)
            for layer in layers:
                mine = layer[heads].reshape(1, -1)
                part.create_next_worker_view(mine.shape[1])[:] = mine
        region = bytes(made[0].mmap_obj)  # type: ignore[arg-type]
        rows.append(region)
        for part in made:
            part.cleanup()
    assert sorted(rows[0]) == sorted(rows[1])
    assert rows[0] != rows[1]
