"""Checks that the installed vLLM has the tested connector interface."""

from typing import Any

from ritornello.connector.interface import (
    EngineInterface,
    abstract_difference,
    constructor_difference,
    missing_hooks,
)

INTERFACE = EngineInterface("ritornello.vllm", "vLLM", "0.32 and 0.33", "connector interface")

ABSTRACT = frozenset(
    {
        "build_connector_meta",
        "get_num_new_matched_tokens",
        "save_kv_layer",
        "start_load_kv",
        "update_state_after_alloc",
        "wait_for_layer_load",
        "wait_for_save",
    }
)
# Optional hooks. A vLLM that lacks one would never call our method, and no error would show this.
HOOKS = frozenset(
    {
        "bind_connector_metadata",
        "bind_kv_cache_manager",
        "build_connector_worker_meta",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "clear_connector_metadata",
        "get_block_ids_with_load_errors",
        "get_external_cache_hit_sources",
        "get_handshake_metadata",
        "get_kv_connector_stats",
        "get_transfer_results",
        "on_new_request",
        "register_kv_caches",
        "request_finished",
        "requires_kv_delivery",
        "reset_cache",
        "set_xfer_handshake_metadata_pp_aware",
        "shutdown",
        "update_connector_output",
    }
)
PARAMETERS = ("vllm_config", "role", "kv_cache_config")


def interface_difference(base: Any) -> str:
    """Returns how vLLM's connector base class differs from the tested class; "" if they are
    equal.
    """
    return (
        abstract_difference(base, ABSTRACT)
        or missing_hooks(base, HOOKS)
        or constructor_difference(base, PARAMETERS)
    )
