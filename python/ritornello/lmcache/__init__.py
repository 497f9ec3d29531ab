"""Ritornello as an L2 adapter of LMCache, through either of LMCache's interfaces.

    lmcache server --l1-size-gb 20 --l2-adapter '{"type": "plugin",
        "module_path": "ritornello.lmcache", "class_name": "RitornelloL2Adapter",
        "adapter_params": {"path": "/nvme/kv", "capacity": "200GiB"}}'

`RitornelloL2Adapter` has all features: a lookup leases objects until LMCache unlocks them, usage
and keys survive a restart, and objects of a different dtype or shape are not reused.
`NativeClient`, for `"type": "native_plugin"`, is wrapped in an adapter of LMCache's own, and
distinguishes formats of objects by the objects' size only.

Settings in addition to `path`: see `settings`. Only `adapter` imports LMCache.
"""

from typing import TYPE_CHECKING

from ritornello.connector import deferred_imports

if TYPE_CHECKING:
    from ritornello.lmcache.adapter import RitornelloL2Adapter
    from ritornello.lmcache.client import NativeClient

__all__ = ["NativeClient", "RitornelloL2Adapter"]


# Imported at first use, because the adapter imports LMCache.
__getattr__ = deferred_imports(__name__, RitornelloL2Adapter="adapter", NativeClient="client")
