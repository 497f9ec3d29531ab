"""The connector interface of vLLM: checks that the installed vLLM has the tested one, and passes
its calls to a data path.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from ritornello.connector.interface import (
    EngineInterface,
    abstract_difference,
    constructor_difference,
    missing_hooks,
)

# The tested versions of vLLM.
TESTED = ("0.32.0", "0.33.0")
INTERFACE = EngineInterface("ritornello.vllm", "vLLM", TESTED, "connector interface")

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
# Optional methods of a connector. A vLLM without one of them never calls our override, and no error
# shows this.
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


# The connector interface by name. `RitornelloConnector` passes calls of `DELEGATED` to its data
# path: methods and properties to the instance, class methods to the class. Names that an installed
# version lacks are skipped.
DELEGATED = (
    ABSTRACT
    | HOOKS
    | frozenset(
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
)
# Public names of the interface that are not passed on, with the reason.
NOT_DELEGATED = {"role": "the constructor's argument, which the base class keeps"}


def delegation(bases: Sequence[type], path: Callable[[], Any]) -> type:
    """Returns a class whose members pass calls to `self.data_path`, and class methods to the class
    that `path` returns. `bases`: vLLM's classes, which declare the interface.
    """
    members: dict[str, Any] = {}
    for name in sorted(DELEGATED):
        declared = next((vars(base)[name] for base in bases if name in vars(base)), None)
        if isinstance(declared, property):
            members[name] = property(attrgetter(f"data_path.{name}"), doc=declared.__doc__)
        elif isinstance(declared, classmethod):
            members[name] = classmethod(_forward(name, declared.__func__, lambda _: path()))
        elif declared is not None:
            members[name] = _forward(name, declared, attrgetter("data_path"))
    return type("Delegation", (), members)


def _forward(name: str, declared: Any, target: Callable[[Any], Any]) -> Any:
    def forward(owner: Any, *args: Any, **named: Any) -> Any:
        return getattr(target(owner), name)(*args, **named)

    # `functools.wraps` would copy `__isabstractmethod__`.
    forward.__name__, forward.__doc__ = name, declared.__doc__
    forward.__wrapped__ = declared  # type: ignore[attr-defined]
    return forward
