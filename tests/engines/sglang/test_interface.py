"""The storage interface of each tested version of SGLang, read from sources without imports, and
the storage that the factory of the installed SGLang constructs.
"""

import ast
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from declarations import Sources, parameters
from expression_types import Hints
from hosts import config
from package_uses import PackageUses
from released import require_alike, require_served, uses_of
from sglang.srt import runtime_context
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from ritornello.sglang import RitornelloStorage, storage
from ritornello.sglang.engine import OPTIONS, dcp_size_of, is_storage_writer
from ritornello.sglang.identity import ORDER_FREE
from ritornello.sglang.interface import (
    ABSTRACT,
    CONFIG,
    HARMLESS_METHODS,
    METHODS,
    RECORDER,
    RESULT,
    TESTED,
    TRANSFER,
    UPDATE_METHODS,
)
from ritornello.sglang.metrics import RANKS
from ritornello.sglang.transfers import METHOD

HICACHE = "sglang.srt.mem_cache.hicache_storage"
POOLS = "sglang.srt.mem_cache.pool_host"
CONTROLLER = "sglang.srt.managers.cache_controller"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
# Classes that declare SGLang's options, by namespace: SGLang's function `get_model` returns an
# object with the options of the class `Model`. `ServerArgs` has the options of all these classes.
FIELDS = {
    name: (f"sglang.srt.arg_groups.fields.{name}", name.capitalize())
    for name in ("device", "memory", "model", "observability", "parallel", "serving", "spec")
}
HINTS = Hints(
    results={
        **{f"get_{name}": FIELDS[name] for name in ("memory", "model", "observability", "serving")},
        "process_model_config": ("sglang.srt.configs.model_config", "ModelConfig"),
    },
    parts={"ParallelContext": [FIELDS["parallel"]], "ServerArgs": list(FIELDS.values())},
)
# Public methods of our storage that SGLang's base class lacks. SGLang calls `close` if a storage
# has it, and `close` logs the result of `counts`. Our hooks of SGLang's classes use the remaining
# methods.
OWN = {
    f"RitornelloStorage.{name}"
    for name in (
        "close",
        "counts",
        "on_flush",
        "on_prefetch_begin",
        "on_prefetch_end",
        "on_transfer_begin",
        "on_transfer_end",
        "uses_prompts",
    )
}
# Methods of SGLang's base class that do nothing, and that our storage does not override.
NOT_OVERRIDDEN = {"on_host_pools_registered"}
DYNAMIC = {
    "backend_name": "ritornello",
    "module_path": "ritornello.sglang",
    "class_name": "RitornelloStorage",
}


@pytest.fixture(params=TESTED, ids="sglang-{}".format)
def uses(request: pytest.FixtureRequest) -> PackageUses:
    return uses_of("sglang", request.param, HINTS)


@pytest.fixture
def sources(uses: PackageUses) -> Sources:
    return uses.sources


def test_sglang_has_everything_that_is_used(uses: PackageUses) -> None:
    require_served(uses, names=70, overrides=14)
    assert uses.own_methods() == OWN


def test_versions_take_the_same_arguments() -> None:
    require_alike("sglang", TESTED, HINTS)


def test_storage_base_class_has_tested_interface(sources: Sources) -> None:
    base = sources.methods(HICACHE, "HiCacheStorage")
    assert sources.abstract(HICACHE, "HiCacheStorage") == ABSTRACT
    assert {name: tuple(parameters(base[name]).positional) for name in METHODS} == METHODS
    public = {name for name in base if not name.startswith("_")}
    assert public - set(METHODS) <= NOT_OVERRIDDEN
    assert not {*CONFIG, *RANKS} - set(sources.fields(HICACHE, "HiCacheStorageConfig"))
    assert not TRANSFER - set(sources.fields(HICACHE, "PoolTransfer"))
    assert not RESULT - set(sources.fields(HICACHE, "PoolTransferResult"))


def test_factory_calls_our_constructor(sources: Sources) -> None:
    factory = sources.methods(
        "sglang.srt.mem_cache.storage.backend_factory", "StorageBackendFactory"
    )
    code = ast.unparse(factory["_create_dynamic_backend"])
    assert "required_fields = ['backend_name', 'module_path', 'class_name']" in code
    assert "return backend_class(storage_config, kwargs)" in code
    assert "self.storage_backend.close()" in sources.text(CONTROLLER)


def test_every_update_of_weights_is_watched(sources: Sources) -> None:
    updater = {name for name in sources.methods(UPDATER, "WeightUpdater") if name[0] != "_"}
    assert updater == {*UPDATE_METHODS, *HARMLESS_METHODS}
    manager = sources.methods(MANAGER, "SchedulerWeightUpdaterManager")
    updates = {name for name in manager if name.startswith("update_weights_")}
    recorded = {name for name, code in manager.items() if f"self.{RECORDER}(" in ast.unparse(code)}
    assert RECORDER in manager
    assert recorded == updates
    controller = sources.members(CONTROLLER, "HiCacheController")
    assert not {"reset", "storage_backend"} - set(controller)


def test_sglang_keeps_memory_of_a_transfer_until_it_ends(sources: Sources) -> None:
    """Checks the statements of SGLang on which `ritornello.sglang.transfers` relies."""
    hybrid = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
    base = sources.methods(CONTROLLER, "HiCacheController")
    derived = sources.methods(hybrid, "HybridCacheController")
    batches = ast.unparse(base[METHOD])
    assert "operation.hash_value[i:i + STORAGE_BATCH_SIZE]" in batches
    assert "operation.host_indices[i * self.page_size:" in batches
    assert "transfer.indices_from_pool == PoolName.KV" in batches
    # SGLang's thread for prefetches reports the end of an operation only after the method `METHOD`
    # has returned; then the operation's memory is freed. The derived controller calls this method
    # of its base class, and does not use the operation's memory elsewhere.
    thread = ast.unparse(base["prefetch_io_aux_func"])
    assert thread.index(f"self.{METHOD}(operation)") < thread.index("completed_req=True")
    override = ast.unparse(derived["_page_transfer_with_stable_layout"])
    assert f"super().{METHOD}(operation)" in override
    assert thread.count("host_indices") == override.count("host_indices") == 0
    # Before the report of the end, SGLang frees only the memory of completed pages.
    tree = "sglang.srt.mem_cache.unified_radix_cache"
    cache = sources.methods(tree, "UnifiedRadixCache")
    assert "info.host_indices[:completed_tokens]" in ast.unparse(cache["release_aborted_request"])
    drained = ast.unparse(cache["_drain_storage_control_queues_impl"])
    freed = "operation.host_indices[operation.completed_tokens:]"
    assert drained.index("if ack.completed_req:") < drained.index(freed)
    # A flush of the cache waits for the thread that transfers, before it frees all memory.
    reset = ast.unparse(cache["_reset_full"])
    assert reset.index("cache_controller.reset()") < reset.index("mem_pool_host.clear()")
    assert "_stop_storage_threads()" in ast.unparse(base["reset"])
    assert "raise RuntimeError" in ast.unparse(base["_stop_storage_threads"])


def test_host_pools_have_used_methods_and_layouts(sources: Sources) -> None:
    pool = sources.members(f"{POOLS}.base", "HostKVCache")
    used = {"dtype", "layout", "page_num", "page_size", "shared_allocation_domain", "size"}
    used |= {"get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page"}
    assert not used - set(pool)
    modules = {"MHATokenToKVPoolHost": f"{POOLS}.mha", "MLATokenToKVPoolHost": f"{POOLS}.mla"}
    for kind, layout in ORDER_FREE:
        assert "get_page_buffer_meta" in sources.methods(modules[kind], kind)
        assert f'"{layout}"' in sources.text(modules[kind])
    assert "get_split_heads_page_buffer_meta" in sources.methods(
        f"{POOLS}.mha", "MHATokenToKVPoolHost"
    )


def test_sglang_has_options_that_scopes_use(sources: Sources) -> None:
    options = {name for field in FIELDS.values() for name in sources.fields(*field)}
    assert not {*OPTIONS, "quantization_param_path"} - options


def test_configuration_without_newer_fields_is_served() -> None:
    """The storage configuration of SGLang 0.5.22 lacks `dcp_size` and `is_storage_writer`."""
    one = SimpleNamespace(is_mla_model=True, tp_rank=0)
    other = SimpleNamespace(is_mla_model=True, tp_rank=1)
    assert dcp_size_of(one) == 1
    assert is_storage_writer(one)
    assert not is_storage_writer(other)
    assert is_storage_writer(SimpleNamespace(is_mla_model=False, tp_rank=1))
    declared = SimpleNamespace(dcp_size=2, is_mla_model=True, is_storage_writer=True, tp_rank=1)
    assert dcp_size_of(declared) == 2
    assert is_storage_writer(declared)


def test_context_parallel_size_comes_from_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(attn_dcp_size=4)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    assert dcp_size_of(SimpleNamespace()) == 4


@pytest.mark.parametrize("name", sorted(METHODS))
def test_overrides_take_sglang_arguments(name: str) -> None:
    ours = getattr(RitornelloStorage, name)
    assert ours is not getattr(HiCacheStorage, name)
    assert tuple(inspect.signature(ours).parameters) == ("self", *METHODS[name])


def test_sglang_factory_constructs_storage(tmp_path: Path) -> None:
    extra = {**DYNAMIC, "path": str(tmp_path / "store"), "capacity": "640MiB"}
    made = StorageBackendFactory.create_backend("dynamic", config(extra), None)
    assert isinstance(made, RitornelloStorage)
    # No engine runs in this process, so the weights are unknown. The pages get a random epoch, in
    # which no other process finds them.
    assert made._engine.model.epoch
    made.close()


@pytest.mark.parametrize(
    ("extra", "others", "advice"),
    [
        ({}, {}, 'needs "path", the directory of the store'),
        ({"path": "/kv", "capcity": "1GiB"}, {}, "unknown key 'capcity'"),
        (
            {"path": "/kv"},
            {"dcp_size": 2, "tp_size": 2, "is_mla_model": True, "logical_page_size": 64},
            "does not serve decode context parallel size 2",
        ),
    ],
)
def test_unsupported_setup_fails_in_one_line(
    extra: dict[str, str], others: dict[str, int], advice: str
) -> None:
    with pytest.raises(ValueError, match=advice) as raised:
        StorageBackendFactory.create_backend(
            "dynamic", config({**DYNAMIC, **extra}, **others), None
        )
    assert "\n" not in str(raised.value)


def test_unknown_interface_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch_get_v1(self: object, keys: object, pages: object) -> None: ...

    with monkeypatch.context() as other:
        other.setattr(hicache_storage.HiCacheStorage, "batch_get_v1", batch_get_v1)
        with pytest.raises(ImportError, match="batch_get_v1 takes keys, pages") as raised:
            importlib.reload(storage)
    assert "written for SGLang 0.5.22 and 0.5.23;" in str(raised.value)
    assert "\n" not in str(raised.value)
    importlib.reload(storage)


def test_storage_attached_after_start_begins_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updater, manager, controller = storage.WATCHED
    watched = [(updater, name) for name in UPDATE_METHODS] + [
        (manager, RECORDER),
        (controller, "reset"),
    ]
    for kind, name in watched:
        monkeypatch.setattr(kind, name, getattr(kind, name))
    for name, value in (("epoch", b""), ("flushed", b""), ("_watched_controller", None)):
        monkeypatch.setattr(storage.updates, name, value)
    memory = SimpleNamespace(hicache_storage_backend=None)
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    importlib.reload(storage)
    assert storage.updates.epoch != storage.updates.flushed
