"""Checks that the installed SGLang has the tested storage interface."""

import inspect
from typing import Any

from ritornello.connector.interface import (
    EngineInterface,
    abstract_difference,
    method_difference,
)

# The tested versions of SGLang.
TESTED = ("0.5.22", "0.5.23")
INTERFACE = EngineInterface("ritornello.sglang", "SGLang", TESTED, "storage interface")

ABSTRACT = frozenset({"batch_get", "batch_set", "exists", "get", "set"})
# Methods, with the parameters that SGLang passes. SGLang would never call an override of a method
# that it no longer has; calls with changed parameters would fail while serving.
METHODS = {
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "get": ("key", "target_location", "target_sizes"),
    "batch_get": ("keys", "target_locations", "target_sizes"),
    "set": ("key", "value", "target_location", "target_sizes"),
    "batch_set": ("keys", "values", "target_locations", "target_sizes"),
    "exists": ("key",),
    "batch_exists": ("keys", "extra_info"),
    "clear": (),
    "get_stats": (),
}
# `UPDATE_METHODS`: methods of SGLang's `WeightUpdater` that change weights. `HARMLESS_METHODS`:
# methods that do not. A public method in neither list counts as an update, because it may change
# weights.
UPDATE_METHODS = (
    "begin_weight_update",
    "end_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)
HARMLESS_METHODS = (
    "destroy_weights_update_group",
    "init_weights_update_group",
    "receive_weights_from_distributed",
)
# Called by `SchedulerWeightUpdaterManager` after every successful update.
RECORDER = "record_weight_version_after_update"
# Fields of SGLang's objects, which are read (`CONFIG`, `TRANSFER`) or set (`RESULT`).
CONFIG = frozenset(
    {
        "tp_rank",
        "tp_size",
        "attn_cp_rank",
        "attn_cp_size",
        "enable_storage_metrics",
        "extra_config",
        "is_mla_model",
        "model_name",
        "pp_rank",
        "pp_size",
        "should_split_heads",
        "tp_lcm_size",
    }
)
TRANSFER = frozenset({"name", "host_indices", "keys", "hit_policy"})
RESULT = frozenset({"kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"})


def interface_difference(base: Any, config: Any, transfer: Any, result: Any) -> str:
    """Returns why SGLang's storage classes (`HiCacheStorage`, `HiCacheStorageConfig`,
    `PoolTransfer`, `PoolTransferResult`) cannot be used as the tested classes; "" if they can be.
    """
    difference = abstract_difference(base, ABSTRACT) or method_difference(base, METHODS)
    if difference:
        return difference
    for kind, fields in ((config, CONFIG), (transfer, TRANSFER), (result, RESULT)):
        missing = sorted(fields - set(kind.__dataclass_fields__))
        if missing:
            return f"{kind.__name__} has no {', '.join(missing)}"
    return ""


def watch_obstacle(updater: Any, manager: Any, controller: Any) -> str:
    """Returns why updates of weights and flushes cannot be observed on `WeightUpdater`,
    `SchedulerWeightUpdaterManager` and `HiCacheController`; "" if they can be observed.
    """
    missing = sorted(set(UPDATE_METHODS) - set(update_methods(updater)))
    if missing:
        return f"{updater.__name__} has no {', '.join(missing)}"
    for kind, name in ((manager, RECORDER), (controller, "reset")):
        if not inspect.isfunction(getattr(kind, name, None)):
            return f"{kind.__name__} has no {name}"
    return ""


def update_methods(updater: Any) -> list[str]:
    """Returns the methods of `WeightUpdater` that change weights, or may do so."""
    public = [name for name in vars(updater) if not name.startswith("_")]
    methods = [name for name in public if inspect.isfunction(vars(updater)[name])]
    return sorted(set(methods) - set(HARMLESS_METHODS))
