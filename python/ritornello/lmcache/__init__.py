"""Ritornello as an L2 adapter of LMCache, through either of its doors.

    lmcache server --l1-size-gb 20 --l2-adapter '{"type": "plugin",
        "module_path": "ritornello.lmcache", "class_name": "RitornelloL2Adapter",
        "adapter_params": {"path": "/nvme/kv", "capacity": "200GiB"}}'

`RitornelloL2Adapter` is the whole of it: leases between lookup and load, usage and keys that
survive a restart, dtype and shape in what decides whether bytes may be reused. `NativeClient`, for
`"type": "native_plugin"`, is what LMCache wraps in an adapter of its own; it knows sizes only.

Further settings beside `path`: see `settings`. `adapter` is the only module that imports LMCache.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ritornello.lmcache.adapter import RitornelloL2Adapter
    from ritornello.lmcache.client import NativeClient

__all__ = ["NativeClient", "RitornelloL2Adapter"]


def __getattr__(name: str) -> object:
    # LMCache is imported when the adapter is asked for, not before.
    if name == "RitornelloL2Adapter":
        from ritornello.lmcache.adapter import RitornelloL2Adapter

        return RitornelloL2Adapter
    if name == "NativeClient":
        from ritornello.lmcache.client import NativeClient

        return NativeClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
