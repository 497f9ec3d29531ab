"""The connector interface of each tested version of vLLM, read from sources without imports.

`package_uses` finds what the package uses of objects that have a type. The tests list the other
uses: attributes of objects without a type, and lines of vLLM's code on which the package relies,
such as hooked methods, local variables and calls.
"""

import ast
from typing import Any

import pytest
from declarations import Sources, parameters
from expression_types import Hints
from package_uses import PackageUses
from released import require_alike, require_served, uses_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from ritornello.vllm import data_path
from ritornello.vllm.connector import RitornelloConnector
from ritornello.vllm.drafts import EXACT_ACCEPTANCE, WITH_KV
from ritornello.vllm.interface import (
    ABSTRACT,
    HOOKS,
    NOT_DELEGATED,
    PARAMETERS,
    TESTED,
    public_members,
)
from ritornello.vllm.loaded_files import FILE_FORMATS
from ritornello.vllm.model import LLAMA4_UNSCALED_TOKENS
from ritornello.vllm.support import OFFLOADED, SERVED
from ritornello.vllm.weights.engine import ADMIT_METHOD, CALL_METHODS, RESET_METHOD
from ritornello.vllm.weights.watch import (
    RESUME_METHOD,
    RUNNER_METHODS,
    SUSPEND_METHODS,
    WORKER_METHODS,
    WORKER_METHODS_OPTIONAL,
)

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
BASE = f"{CONNECTORS}.v1.base"
CACHES = "vllm.v1.kv_cache_interface"
HINTS = Hints(
    kinds={
        "KVCacheSpec": [(CACHES, kind) for kind in SERVED],
        "KVConnectorWorkerMetadata": [("ritornello.vllm.metadata", "WorkerReport")],
    }
)
# Public names of the interface, besides `ABSTRACT` and `HOOKS`, that the connector passes to its
# data path. `test_every_method_is_delegated_or_listed` fails for a new name: before it is added
# here, check that each data path serves it, by its own method or by the default of its base class.
OTHERS = frozenset(
    {
        "bind_gpu_block_pool",
        "finish_forward",
        "get_finished",
        "get_finished_count",
        "get_kv_connector_kv_cache_events",
        "get_loaded_kv_cache_group_ids",
        "get_mem_pool_context",
        "get_required_kvcache_layout",
        "handle_preemptions",
        "has_connector_metadata",
        "has_pending_block_frees",
        "has_pending_push_work",
        "register_finished_partial_tail",
        "request_finished_all_groups",
        "requires_piecewise_for_cudagraph",
        "reset_capture_state",
        "restore_kv_caches",
        "set_host_xfer_buffer_ops",
        "set_xfer_handshake_metadata",
        "supports_divergent_local_hybrid_hits",
        "supports_sleep_mode",
        "take_events",
        "unregister_kv_caches",
    }
)
DELEGATED = ABSTRACT | HOOKS | OTHERS
# Overrides of methods that vLLM has since the given version.
SINCE = {
    "CpuPath.supports_sleep_mode": "0.33.0",
    "RitornelloTier.config_info": "0.33.0",
    "RitornelloTier.config_info_keys": "0.33.0",
}


@pytest.fixture(params=TESTED, ids="vllm-{}".format)
def uses(request: pytest.FixtureRequest) -> PackageUses:
    return uses_of("vllm", request.param, HINTS)


@pytest.fixture
def sources(uses: PackageUses) -> Sources:
    return uses.sources


def test_vllm_has_everything_that_is_used(uses: PackageUses) -> None:
    require_served(uses, names=180, overrides=45)


def test_versions_take_the_same_arguments() -> None:
    require_alike("vllm", TESTED, HINTS)


def test_public_methods_override_methods_of_vllm(
    uses: PackageUses, request: pytest.FixtureRequest
) -> None:
    version = TESTED.index(request.node.callspec.params["uses"])
    assert uses.own_methods() == {n for n, since in SINCE.items() if TESTED.index(since) > version}


def test_connector_base_class_has_tested_interface(sources: Sources) -> None:
    base = sources.methods(BASE, "KVConnectorBase_V1")
    assert sources.abstract(BASE, "KVConnectorBase_V1") == ABSTRACT
    assert not HOOKS - set(base)
    assert tuple(parameters(base["__init__"]).positional) == PARAMETERS


def test_every_method_is_delegated_or_listed(sources: Sources) -> None:
    declared = {*sources.methods(BASE, "KVConnectorBase_V1"), *sources.methods(BASE, "SupportsHMA")}
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
    for name, declared in public_members((KVConnectorBase_V1, SupportsHMA)).items():
        if name in NOT_DELEGATED:
            continue
        reached = getattr(connector, name)
        if name in properties:
            assert reached == f"property {name}"
        else:
            kind = "class" if isinstance(declared, classmethod) else "instance"
            assert reached(1, second=2) == (kind, name, (1,), {"second": 2})
        tried.add(name)
    assert tried > HOOKS | ABSTRACT


@pytest.mark.parametrize(
    ("module", "name", "used"),
    [
        ("vllm.v1.core.kv_cache_manager", "KVCacheManager", {"evict_blocks", "get_block_ids"}),
        ("vllm.v1.executor.abstract", "Executor", {"get_kv_connector_handshake_metadata"}),
        ("vllm.v1.request", "Request", {"get_skip_reading_prefix_cache"}),
        ("vllm.v1.engine.core", "EngineCore", {*CALL_METHODS, RESET_METHOD, ADMIT_METHOD}),
        (
            "vllm.v1.worker.gpu_worker",
            "Worker",
            {
                *WORKER_METHODS,
                *WORKER_METHODS_OPTIONAL,
                *SUSPEND_METHODS,
                RESUME_METHOD,
                "execute_model",
                "model_runner",
                "rank",
                "vllm_config",
            },
        ),
        ("vllm.v1.worker.worker_base", "WorkerWrapperBase", {"worker"}),
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", {*RUNNER_METHODS, "get_model"}),
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", {*RUNNER_METHODS, "get_model"}),
        ("vllm.lora.worker_manager", "WorkerLoRAManager", {"_load_adapter"}),
        ("vllm.lora.request", "LoRARequest", {"load_inplace", "lora_name", "lora_path"}),
        (
            "vllm.v1.core.sched.output",
            "SchedulerOutput",
            {"has_sync_kv_loads", "num_scheduled_tokens", "total_num_scheduled_tokens"},
        ),
        ("vllm.config", "LoRAConfig", {"target_modules"}),
        ("vllm.config", "ModelConfig", {"model_weights", "original_max_model_len"}),
        (
            "vllm.config",
            "MultiModalConfig",
            {"mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_processor_cache_gb"},
        ),
        ("vllm.config", "ParallelConfig", {"enable_eplb"}),
        ("vllm.config", "KVTransferConfig", {"kv_load_failure_policy"}),
        (CACHES, "KVCacheConfig", {"hash_block_size"}),
        (CACHES, "FullAttentionSpec", {"head_size", "max_tp_shards", "tokens_per_state"}),
        (CACHES, "SlidingWindowSpec", {"extra_retained_tokens", "sliding_window"}),
    ],
)
def test_vllm_has_attributes_that_are_used_without_a_type(
    sources: Sources, module: str, name: str, used: set[str]
) -> None:
    assert not used - set(sources.members(module, name))


@pytest.mark.parametrize(
    ("protocol", "module"),
    [
        ("BlockPool", "vllm.v1.core.block_pool"),
        ("CacheManager", "vllm.v1.core.kv_cache_manager"),
        ("Request", "vllm.v1.request"),
        ("Step", "vllm.v1.core.sched.output"),
    ],
)
def test_vllm_classes_fit_our_protocols(sources: Sources, protocol: str, module: str) -> None:
    theirs = {"CacheManager": "KVCacheManager", "Step": "SchedulerOutput"}.get(protocol, protocol)
    used = set(sources.members("ritornello.vllm.request_state", protocol))
    assert used
    assert not used - set(sources.members(module, theirs))


@pytest.mark.parametrize(
    ("module", "texts"),
    [
        ("vllm.v1.attention.backends.cpu_attn", ["def _get_attn_isa(\n    dtype"]),
        (
            "vllm.v1.kv_cache_interface",
            [f"class {kind}(" for kind in SERVED + OFFLOADED],
        ),
        (
            "vllm.config.speculative",
            [
                "draft_model_config: ",
                "draft_load_config: ",
                "rejection_sample_method: ",
                *(f'"{method}"' for method in (*WITH_KV, *EXACT_ACCEPTANCE)),
            ],
        ),
        ("vllm.model_executor.model_loader", [f'"{name}": ' for name in FILE_FORMATS]),
        (
            "vllm.model_executor.models.llama4",
            [
                "gen_config = vllm_config.model_config.try_get_generation_config()\n"
                "        gen_config.update(vllm_config.model_config.override_generation_config)",
                f"vllm_config.model_config.max_model_len > {LLAMA4_UNSCALED_TOKENS}\n",
                '"attn_temperature_tuning", default_attn_temperature_tuning\n',
            ],
        ),
        # Images are named by a counter under these conditions, and by a hash or a client otherwise.
        (
            "vllm.renderers.base",
            [
                "and model_config.multimodal_config.mm_processor_cache_gb == 0\n"
                "            and not self.config.cache_config.enable_prefix_caching\n"
            ],
        ),
        # vLLM finalizes the connector, which saves the step's pages, after the draft model has run.
        (
            "vllm.v1.worker.gpu_model_runner",
            [
                "defer_finalize=defer_kv_connector_finalize",
                "            self.finalize_kv_connector()",
            ],
        ),
        (
            "vllm.v1.core.sched.interface",
            ["def has_unfinished_requests(self)", "def schedule(self"],
        ),
        ("vllm.v1.engine.core", [".set_xfer_handshake_metadata_pp_aware("]),
        # `ritornello` hooks the engine core's `reset_prefix_cache`, which must have this signature.
        # vLLM's pauses reset the cache through this method.
        (
            "vllm.v1.engine.core",
            [
                "def reset_prefix_cache(\n        self, reset_running_requests: bool = False, "
                "reset_connector: bool = False\n    ) -> bool:",
                "if not self.reset_prefix_cache(",
            ],
        ),
        # vLLM's workers load LoRA adapters by `_load_adapter`, which `ritornello` hooks.
        ("vllm.lora.worker_manager", ["lora = self._load_adapter(lora_request)"]),
        ("vllm.lora.request", ["load_inplace: bool = False"]),
        (
            "vllm.v1.attention.backends.cpu_attn",
            # In a block the heads follow each other, each with its keys before its values.
            [
                "view((num_blocks, num_kv_heads, block_size * 2, -1))",
                "key_cache, value_cache = kv_cache.chunk(2, dim=2)",
            ],
        ),
    ],
)
def test_vllm_sources_contain_the_code_that_is_relied_on(
    sources: Sources, module: str, texts: list[str]
) -> None:
    code = sources.text(module)
    assert [text for text in texts if text not in code] == []


def test_multi_connector_has_used_names(sources: Sources) -> None:
    init = sources.methods(f"{CONNECTORS}.v1.multi_connector", "MultiConnector")["__init__"]
    # `engine_config.of_outermost` reads `vllm_config` where children are constructed.
    assert "vllm_config" in parameters(init).positional
    assert "connector_cls(temp_config" in ast.unparse(init)
    factory = sources.methods(f"{CONNECTORS}.factory", "KVConnectorFactory")
    taken = parameters(factory["register_connector"]).positional
    assert taken == ["name", "module_path", "class_name"]
    output = ast.unparse(sources.class_of("vllm.v1.outputs", "KVConnectorOutput"))
    assert "invalid_block_ids: set[int]" in output
    assert "failed_recving: set[str]" in output


def test_load_failure_policy_is_read_after_connector_construction(sources: Sources) -> None:
    scheduler = sources.methods("vllm.v1.core.sched.scheduler", "Scheduler")
    text = ast.unparse(scheduler["__init__"])
    made = text.index("KVConnectorFactory.create_connector(")
    assert made < text.index("kv_transfer_config.kv_load_failure_policy")
