"""The connector interface of every supported vLLM, read from its sources without importing them.

Methods that the connector overrides must exist in vLLM with parameters that it accepts, and the
attributes that it uses of vLLM's objects must have the same names.
"""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm_sources import class_of, downloaded, installed, is_abstract, methods

from ritornello.vllm import data_path
from ritornello.vllm.connector import RitornelloConnector
from ritornello.vllm.cpu_path import CpuPath
from ritornello.vllm.drafts import EXACT_ACCEPTANCE, WITH_KV
from ritornello.vllm.interface import ABSTRACT, DELEGATED, HOOKS, NOT_DELEGATED, PARAMETERS
from ritornello.vllm.offloading_path import OffloadingPath
from ritornello.vllm.support import OFFLOADED, SERVED
from ritornello.vllm.weights.engine import ADMIT_METHOD, CALL_METHODS, RESET_METHOD
from ritornello.vllm.weights.watch import (
    RESUME_METHOD,
    RUNNER_METHODS,
    SUSPEND_METHODS,
    WORKER_METHODS,
    WORKER_METHODS_OPTIONAL,
)

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"


@pytest.fixture(params=["installed", pytest.param("next", marks=pytest.mark.long)])
def sources(request: pytest.FixtureRequest) -> Path:
    return installed() if request.param == "installed" else downloaded()


def test_base_class_is_the_tested_one(sources: Path) -> None:
    base = methods(class_of(sources, BASE, "KVConnectorBase_V1"))
    assert {name for name, method in base.items() if is_abstract(method)} == ABSTRACT
    assert not HOOKS - set(base)
    assert tuple(argument.arg for argument in base["__init__"].args.args) == ("self", *PARAMETERS)


def test_overrides_take_vllm_arguments(sources: Path) -> None:
    base = methods(class_of(sources, BASE, "KVConnectorBase_V1"))
    base |= methods(class_of(sources, BASE, "SupportsHMA"))
    for path, least in ((CpuPath, 20), (OffloadingPath, 1)):
        ours = {name for name in vars(path) if name in base and name != "__init__"}
        assert len(ours) >= least
        for name in ours - {"requires_kv_delivery"}:
            function = inspect.unwrap(getattr(path, name))
            taken = [name for name in inspect.signature(function).parameters if name != "kwargs"]
            passed = [argument.arg for argument in base[name].args.args][1:]
            assert [name for name in taken if name != "self"] == passed, name


def test_every_method_is_delegated_or_listed(sources: Path) -> None:
    declared = methods(class_of(sources, BASE, "KVConnectorBase_V1"))
    declared |= methods(class_of(sources, BASE, "SupportsHMA"))
    public = {name for name in declared if not name.startswith("_")}
    assert len(public) > 40
    assert sorted(public - DELEGATED - set(NOT_DELEGATED)) == []
    assert all(NOT_DELEGATED.values())
    assert not DELEGATED & set(NOT_DELEGATED)


def test_calls_reach_data_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """`RitornelloConnector` passes calls of methods to its data path, and calls of class methods to
    the data path's class.
    """

    class Recorder:
        def __init__(self, kind: str) -> None:
            self._kind = kind

        def __getattr__(self, name: str) -> Any:
            if name in properties:
                return f"property {name}"
            return lambda *given, **named: (self._kind, name, given, named)

    properties = {"requires_kv_delivery", "supports_divergent_local_hybrid_hits"}
    connector, tried = object.__new__(RitornelloConnector), set()
    connector.data_path = Recorder("instance")
    monkeypatch.setattr(data_path, "data_path", lambda: Recorder("class"))
    for base in (KVConnectorBase_V1, SupportsHMA):
        for name in DELEGATED & set(vars(base)):
            reached = getattr(connector, name)
            if name in properties:
                assert reached == f"property {name}"
            else:
                kind = "class" if isinstance(vars(base)[name], classmethod) else "instance"
                assert reached(1, second=2) == (kind, name, (1,), {"second": 2})
            tried.add(name)
    assert tried > HOOKS | ABSTRACT


@pytest.mark.parametrize(
    ("file", "name", "used"),
    [
        ("vllm/v1/core/kv_cache_manager.py", "KVCacheManager", {"get_block_ids", "evict_blocks"}),
        ("vllm/v1/core/block_pool.py", "BlockPool", {"get_num_free_blocks"}),
        (
            "vllm/v1/executor/abstract.py",
            "Executor",
            {"get_kv_connector_handshake_metadata"},
        ),
        ("vllm/v1/core/kv_cache_manager.py", "KVCacheBlocks", {"get_block_ids"}),
        ("vllm/v1/request.py", "Request", {"num_tokens", "get_skip_reading_prefix_cache"}),
        ("vllm/v1/engine/core.py", "EngineCore", {*CALL_METHODS, RESET_METHOD, ADMIT_METHOD}),
        (
            "vllm/v1/worker/gpu_worker.py",
            "Worker",
            {
                *WORKER_METHODS,
                *WORKER_METHODS_OPTIONAL,
                *SUSPEND_METHODS,
                RESUME_METHOD,
                "execute_model",
            },
        ),
        ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner", {*RUNNER_METHODS, "get_model"}),
        ("vllm/v1/worker/gpu/model_runner.py", "GPUModelRunner", {*RUNNER_METHODS, "get_model"}),
        ("vllm/lora/worker_manager.py", "WorkerLoRAManager", {"_load_adapter"}),
    ],
)
def test_used_parts_of_vllm_exist(sources: Path, file: str, name: str, used: set[str]) -> None:
    assert not used - set(methods(class_of(sources, file, name)))


@pytest.mark.parametrize(
    ("file", "texts"),
    [
        ("vllm/v1/metrics/cache_hit_source.py", ["DISK = "]),
        ("vllm/v1/attention/backends/cpu_attn.py", ["def _get_attn_isa(\n    dtype"]),
        (
            "vllm/v1/kv_cache_interface.py",
            [
                "hash_block_size:",
                "max_tp_shards:",
                "tokens_per_state:",
                "extra_retained_tokens:",
                *(f"class {kind}(" for kind in SERVED + OFFLOADED),
            ],
        ),
        (
            "vllm/config/speculative.py",
            [
                "draft_model_config: ",
                "draft_load_config: ",
                "rejection_sample_method: ",
                *(f'"{method}"' for method in (*WITH_KV, *EXACT_ACCEPTANCE)),
            ],
        ),
        # A step's pages are saved after the draft model has run.
        (
            "vllm/v1/worker/gpu_model_runner.py",
            [
                "defer_finalize=defer_kv_connector_finalize",
                "            self.finalize_kv_connector()",
            ],
        ),
        (
            "vllm/v1/outputs.py",
            [
                "kv_connector_worker_meta",
                "invalid_block_ids",
                "finished_recving",
                "failed_recving",
            ],
        ),
        ("vllm/v1/core/block_pool.py", ["self.null_block = "]),
        (
            "vllm/v1/core/sched/interface.py",
            ["def has_unfinished_requests(self)", "def schedule(self"],
        ),
        ("vllm/v1/engine/core.py", [".set_xfer_handshake_metadata_pp_aware("]),
        # `ritornello` hooks the engine core's `reset_prefix_cache`, which must have this signature.
        # vLLM's pauses reset the cache through this method.
        (
            "vllm/v1/engine/core.py",
            [
                "def reset_prefix_cache(\n        self, reset_running_requests: bool = False, "
                "reset_connector: bool = False\n    ) -> bool:",
                "if not self.reset_prefix_cache(",
            ],
        ),
        # vLLM loads LoRA adapters only in this file.
        ("vllm/lora/worker_manager.py", ["lora = self._load_adapter(lora_request)"]),
        ("vllm/lora/request.py", ["load_inplace: bool = False"]),
        ("vllm/v1/core/sched/output.py", ["total_num_scheduled_tokens: int"]),
        ("vllm/config/parallel.py", ["enable_eplb: bool = False"]),
        (
            "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
            ["class KVConnectorTransferResults", "finished_recving:", "failed_recving:"],
        ),
        (
            "vllm/v1/attention/backends/cpu_attn.py",
            # Blocks are read head by head, the keys of a head before its values.
            [
                "view((num_blocks, num_kv_heads, block_size * 2, -1))",
                "key_cache, value_cache = kv_cache.chunk(2, dim=2)",
            ],
        ),
    ],
)
def test_used_names_exist(sources: Path, file: str, texts: list[str]) -> None:
    code = (sources / file).read_text()
    assert [text for text in texts if text not in code] == []


def test_failure_policy_is_read_after_constructor(sources: Path) -> None:
    code = (sources / "vllm/v1/core/sched/scheduler.py").read_text()
    made = code.index("KVConnectorFactory.create_connector(")
    assert made < code.index("kv_transfer_config.kv_load_failure_policy")


def test_multi_connector_has_used_names(sources: Path) -> None:
    folder = "vllm/distributed/kv_transfer/kv_connector"
    multi = methods(class_of(sources, f"{folder}/v1/multi_connector.py", "MultiConnector"))
    # `engine_config.of_outermost` reads `vllm_config` where children are constructed.
    assert "vllm_config" in [argument.arg for argument in multi["__init__"].args.args]
    assert "connector_cls(temp_config" in ast.unparse(multi["__init__"])
    factory = methods(class_of(sources, f"{folder}/factory.py", "KVConnectorFactory"))
    taken = [argument.arg for argument in factory["register_connector"].args.args]
    assert taken == ["cls", "name", "module_path", "class_name"]
    step = class_of(sources, "vllm/v1/core/sched/output.py", "SchedulerOutput")
    assert "has_sync_kv_loads: bool" in ast.unparse(step)
    output = ast.unparse(class_of(sources, "vllm/v1/outputs.py", "KVConnectorOutput"))
    assert "invalid_block_ids: set[int]" in output
    assert "failed_recving: set[str]" in output


def test_policy_is_read_after_connector_construction(sources: Path) -> None:
    scheduler = methods(class_of(sources, "vllm/v1/core/sched/scheduler.py", "Scheduler"))
    text = ast.unparse(scheduler["__init__"])
    made = text.index("KVConnectorFactory.create_connector(")
    assert made < text.index("kv_transfer_config.kv_load_failure_policy")
