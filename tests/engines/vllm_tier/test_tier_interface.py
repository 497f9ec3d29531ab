"""The interface of secondary tiers of every tested vLLM, read from its sources without importing
them. `tests/engines/vllm/test_interface.py` covers all uses of objects that have a type. These
tests cover the tier's other uses: attributes of objects without a type, and lines of vLLM's code on
which the tier relies. The last test runs code of the installed vLLM.
"""

import ast
from pathlib import Path

import pytest
from declarations import Sources, parameters
from released import sources_of

from ritornello.vllm import RitornelloTier
from ritornello.vllm.interface import PARAMETERS as CONNECTOR_PARAMETERS
from ritornello.vllm.interface import TESTED
from ritornello.vllm.tier.interface import ABSTRACT, HOOKS, JOB, PARAMETERS, RESULT

OFFLOAD = "vllm.v1.kv_offload"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
BASE = f"{OFFLOAD}.tiering.base"


@pytest.fixture(scope="module", params=TESTED, ids="vllm-{}".format)
def sources(request: pytest.FixtureRequest) -> Sources:
    return Sources(sources_of("vllm", request.param))


def test_tier_base_class_has_tested_interface(sources: Sources) -> None:
    base = sources.methods(BASE, "SecondaryTierManager")
    assert sources.abstract(BASE, "SecondaryTierManager") == ABSTRACT
    assert not HOOKS - set(base)
    assert tuple(parameters(base["__init__"]).positional) == PARAMETERS
    assert sources.fields(BASE, "TransferJob") == JOB
    assert sources.fields(BASE, "JobResult") == RESULT


def test_newest_vllm_declares_config_info() -> None:
    newest = Sources(sources_of("vllm", TESTED[-1]))
    base = newest.methods(BASE, "SecondaryTierManager")
    assert parameters(base["config_info_keys"]).positional == ["tier_config"]
    assert parameters(base["config_info"]).positional == []
    tier = {"type": "RitornelloTier", "module_path": "ritornello.vllm", "path": "/x"}
    keys = RitornelloTier.config_info_keys(tier | {"backpressure": {}})
    assert "ritornello_path" in keys
    assert "tier" not in keys


def test_async_lookup_manager_has_tested_interface(sources: Sources) -> None:
    manager = (f"{OFFLOAD}.tiering.async_lookup", "AsyncLookupManager")
    assert parameters(sources.methods(*manager)["__init__"]).positional == ["tier_type"]
    assert sources.abstract(*manager) == {"batch_lookup"}


def test_engine_configuration_is_on_stack(sources: Sources) -> None:
    """The tier finds vLLM's configuration in the stack frame of a caller of its constructor: the
    configuration whose `kv_connector_extra_config` is the same object as the `extra_config` of the
    tier's own configuration.
    """
    scheduler = sources.methods(f"{CONNECTOR}.scheduler", "OffloadingConnectorScheduler")
    init = scheduler["__init__"]
    assert parameters(init).positional == ["spec", "vllm_config", "kv_cache_config"]
    assert "spec.get_manager()" in ast.unparse(init)
    config = sources.text(f"{CONNECTOR}.config")
    assert "extra_config = kv_transfer_config.kv_connector_extra_config" in config
    assert "extra_config=extra_config" in config
    assert "self.extra_config = config.extra_config" in sources.text(f"{OFFLOAD}.base")


def test_connector_configures_offloading(sources: Sources) -> None:
    """`OffloadingPath` derives from vLLM's connector, and sets the keys of its configuration that
    are checked here.
    """
    connector = sources.methods(f"{CONNECTOR}_connector", "OffloadingConnector")
    assert tuple(parameters(connector["__init__"]).positional) == CONNECTOR_PARAMETERS
    config = sources.text(f"{CONNECTOR}.config")
    assert "def build_offloading_config(\n    vllm_config" in config
    assert 'extra_config.get("blocks_per_chunk")' in config
    read = {
        f"{OFFLOAD}.base": ["offload_prompt_only", "self_describing_kv_events"],
        f"{OFFLOAD}.cpu.spec": ["cpu_bytes_to_use"],
        f"{OFFLOAD}.tiering.spec": ["secondary_tiers"],
    }
    for module, keys in read.items():
        code = "".join(sources.text(module).split())
        assert [key for key in keys if f'self.extra_config.get("{key}"' not in code] == [], module
    # Settings of a tier, Python objects included, reach its constructor.
    assert "            **config,\n" in sources.text(f"{OFFLOAD}.tiering.factory")
    assert '"TieringOffloadingSpec"' in sources.text(f"{OFFLOAD}.factory")


def test_only_cache_reset_drains_jobs(sources: Sources) -> None:
    """The tier begins an epoch in `drain_jobs`, which vLLM calls only to reset its cache."""
    manager = sources.methods(f"{OFFLOAD}.tiering.manager", "TieringOffloadingManager")
    drains = [name for name, m in manager.items() if ".drain_jobs()" in ast.unparse(m)]
    assert drains == ["reset_cache"]


@pytest.mark.parametrize(
    ("module", "name", "used"),
    [
        ("config", "OffloadingParallelConfig", {"dcp_size", "pcp_size", "pp_size", "tp_size"}),
        ("base", "ReqContext", {"_offload_key_positions", "kv_transfer_params", "req_id"}),
        ("base", "ScheduleEndContext", {"new_req_ids", "preempted_req_ids"}),
        ("base", "OffloadingKVEventsConfig", {"self_describing_kv_events"}),
        ("base", "OffloadingMetricMetadata", {"documentation", "labelnames"}),
    ],
)
def test_vllm_has_attributes_that_are_used_without_a_type(
    sources: Sources, module: str, name: str, used: set[str]
) -> None:
    assert not used - set(sources.members(f"{OFFLOAD}.{module}", name))


@pytest.mark.parametrize(
    ("module", "texts"),
    [
        (f"{OFFLOAD}.base", ["group_idx.to_bytes(4, ", "def get_offload_key_position("]),
        (f"{OFFLOAD}.cpu.shared_offload_region", ["BLOCK_SIZE_ALIGNMENT: int = mmap.PAGESIZE"]),
        # The steps that `PrefillTimes` observes.
        (
            "vllm.v1.engine.core",
            [
                "scheduler_output = self.scheduler.schedule(",
                "self.scheduler.update_from_output(\n            scheduler_output, model_output",
            ],
        ),
        (
            "vllm.v1.core.sched.output",
            [
                "    scheduled_new_reqs: list[NewRequestData]",
                "    scheduled_cached_reqs: CachedRequestData",
                "    num_scheduled_tokens: dict[str, int]",
                "    scheduled_spec_decode_tokens: dict[str, list[int]]",
                "    num_computed_tokens: list[int]",
                "    num_computed_tokens: int",
            ],
        ),
    ],
)
def test_vllm_sources_contain_the_code_that_is_relied_on(
    sources: Sources, module: str, texts: list[str]
) -> None:
    code = sources.text(module)
    assert [text for text in texts if text not in code] == []


def test_host_row_depends_on_parallel_size(tmp_path: Path) -> None:
    """One rank and two ranks write the same two layers of two heads to a row of vLLM's host tier.
    The rows have the same bytes in different orders. Engines of different parallel sizes therefore
    do not share such rows, even if `is_parallelism_agnostic` is set.
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
