"""The connector interface of vLLM: checks that the installed vLLM has the tested interface, and
passes vLLM's calls to a data path.
"""

from collections.abc import Callable, Sequence
from inspect import isfunction
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
# Optional methods of a connector, which the tested vLLM calls. A vLLM without such a method would
# never call our override, and no error would show this.
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
    """Returns how vLLM's connector base class differs from the tested class in its abstract
    methods, hooks and constructor parameters, without differences that are accepted; "" if it does
    not.
    """
    return (
        abstract_difference(base, ABSTRACT)
        or missing_hooks(base, HOOKS)
        or constructor_difference(base, PARAMETERS)
    )


# Public names of the interface that are not passed on, with the reason.
NOT_DELEGATED = {"role": "the constructor's argument, which the base class keeps"}


def public_members(bases: Sequence[type]) -> dict[str, Any]:
    """Returns the public members that `bases` and their base classes declare, by name."""
    members: dict[str, Any] = {}
    for kind in (kind for base in bases for kind in base.__mro__):
        for name, declared in vars(kind).items():
            if not name.startswith("_"):
                members.setdefault(name, declared)
    return members


def delegation(bases: Sequence[type], path: Callable[[], Any]) -> type:
    """Returns a class that passes every public name of `bases`, vLLM's classes that declare the
    interface, except `NOT_DELEGATED`, to the data path: methods and properties to `self.data_path`,
    class methods to the class that `path` returns. Names that only a newer vLLM declares are
    included, because vLLM's offloading connector, from which the data path of GPU engines derives,
    may override them.
    """
    members: dict[str, Any] = {}
    for name, declared in public_members(bases).items():
        if name in NOT_DELEGATED:
            continue
        if isinstance(declared, property):
            members[name] = property(attrgetter(f"data_path.{name}"), doc=declared.__doc__)
        elif isinstance(declared, classmethod):
            members[name] = classmethod(_forward(name, declared.__func__, lambda _: path()))
        elif isfunction(declared):
            members[name] = _forward(name, declared, attrgetter("data_path"))
        else:
            members[name] = _Attribute(name, path)
    return type("Delegation", (), members)


class _Attribute:
    """A class attribute or static method. Read from a connector, returns the attribute of its data
    path; read from the connector's class, returns the attribute of the class that `path` returns.
    """

    def __init__(self, name: str, path: Callable[[], Any]) -> None:
        self._name = name
        self._path = path

    def __get__(self, connector: Any, _: type | None = None) -> Any:
        owner = self._path() if connector is None else connector.data_path
        return getattr(owner, self._name)


def _forward(name: str, declared: Any, target: Callable[[Any], Any]) -> Any:
    def forward(owner: Any, *args: Any, **named: Any) -> Any:
        return getattr(target(owner), name)(*args, **named)

    # `functools.wraps` would copy `__isabstractmethod__`: a connector with this method would then
    # be an abstract class, of which Python makes no instance.
    forward.__name__, forward.__doc__ = name, declared.__doc__
    forward.__wrapped__ = declared  # type: ignore[attr-defined]
    return forward
