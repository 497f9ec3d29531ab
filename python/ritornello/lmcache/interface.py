"""Checks that the installed LMCache has the tested adapter interface."""

from typing import Any

from ritornello.connector.interface import (
    EngineInterface,
    abstract_difference,
    field_difference,
    method_difference,
)

# The tested versions of LMCache.
TESTED = ("0.5.5", "0.5.6")
INTERFACE = EngineInterface("ritornello.lmcache", "LMCache", TESTED, "adapter interface")

ABSTRACT = frozenset(
    {
        "close",
        "get_load_event_fd",
        "get_lookup_and_lock_event_fd",
        "get_store_event_fd",
        "pop_completed_store_tasks",
        "query_load_result",
        "query_lookup_and_lock_result",
        "submit_load_task",
        "submit_lookup_and_lock_task",
        "submit_store_task",
        "submit_unlock",
    }
)
# Methods that the adapter calls or overrides, with their parameters in the tested versions.
PARAMETERS = {
    "__init__": ("max_capacity_bytes",),
    "_notify_keys_accessed": ("keys",),
    "_notify_keys_deleted": ("keys", "sizes"),
    "_notify_keys_stored": ("keys", "sizes"),
    "delete": ("keys",),
    "get_usage": (),
    "list_l2_keys": ("model_name", "page_size", "cursor"),
    "register_listener": ("listener",),
    "report_status": (),
    "submit_load_task": ("keys", "objects"),
    "submit_lookup_and_lock_task": ("keys", "group_layout_descs"),
    "submit_store_task": ("keys", "objects"),
    "submit_unlock": ("keys",),
}
KEY_FIELDS = ("chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt")


def interface_difference(base: Any, key: Any) -> str:
    """Returns how LMCache's adapter base class and object key differ from the tested classes; "" if
    they do not differ.
    """
    return (
        abstract_difference(base, ABSTRACT)
        or method_difference(base, PARAMETERS)
        or field_difference("an object key", key, KEY_FIELDS)
    )
