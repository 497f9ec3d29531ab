"""Checks that the installed LMCache has the tested adapter interface."""

import inspect
from typing import Any

TESTED = "0.5.6"

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
# Further methods that are called or overridden: their parameters show whether they are unchanged.
PARAMETERS = {
    "__init__": ("self", "max_capacity_bytes"),
    "_notify_keys_accessed": ("self", "keys"),
    "_notify_keys_deleted": ("self", "keys", "sizes"),
    "_notify_keys_stored": ("self", "keys", "sizes"),
    "delete": ("self", "keys"),
    "get_usage": ("self",),
    "list_l2_keys": ("self", "model_name", "page_size", "cursor"),
    "register_listener": ("self", "listener"),
    "report_status": ("self",),
    "submit_load_task": ("self", "keys", "objects"),
    "submit_lookup_and_lock_task": ("self", "keys", "group_layout_descs"),
    "submit_store_task": ("self", "keys", "objects"),
    "submit_unlock": ("self", "keys"),
}
KEY_FIELDS = ("chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt")


def interface_difference(base: Any, key: Any) -> str:
    """Returns how LMCache's adapter base class and object key differ from the tested interface; ""
    if they are equal.
    """
    abstract = frozenset(base.__abstractmethods__)
    if abstract != ABSTRACT:
        return f"abstract methods differ: {', '.join(sorted(abstract ^ ABSTRACT))}"
    for name, expected in PARAMETERS.items():
        method = getattr(base, name, None)
        if method is None:
            return f"{name} is missing"
        parameters = tuple(inspect.signature(method).parameters)
        if parameters != expected:
            return f"{name} takes {', '.join(parameters[1:]) or 'nothing'}"
    fields = tuple(inspect.signature(key).parameters)
    if fields != KEY_FIELDS:
        return f"an object key has {', '.join(fields)}"
    return ""


def require_tested_interface(base: Any, key: Any, version: str) -> None:
    """Raises ImportError, in one line, for an untested interface."""
    problem = interface_difference(base, key)
    if problem:
        raise ImportError(
            f"ritornello.lmcache was written for LMCache {TESTED}; the adapter interface of "
            f"LMCache {version} differs ({problem}): use that version, or a newer ritornello"
        )
