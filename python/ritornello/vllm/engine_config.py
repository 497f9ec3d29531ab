"""The engine's complete configuration, and the keys of a request, of which vLLM passes a connector
or a tier only a part.

`OffloadingPath` passes the configuration to the tier that it adds to vLLM's list of tiers. In two
other cases (`of_spec`, `of_outermost`) vLLM offers no way to receive it, and this module reads the
local variables of vLLM's constructors that are running. `key_positions` and `has_no_keys` read a
private attribute of vLLM's requests. No other module reads such variables; two others use one
private name of vLLM each (`kernels.py`, `weights/watch.py`), and say in which versions.
`test_tier_interface.py` and `test_interface.py` (in tests/engines) check the names and the order of
calls in the sources of vLLM 0.32.0 and 0.33.0.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from ritornello.vllm.weights.guard import WeightGuard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """vLLM's configurations of an engine and of its KV cache. `guard`: knows whether the weights
    changed; None in a worker, and if the user, and not the connector, lists the tier.
    """

    vllm_config: "VllmConfig" = field(repr=False)
    kv_cache_config: "KVCacheConfig" = field(repr=False)
    guard: WeightGuard | None = field(default=None, repr=False)


def of_spec(spec: "OffloadingSpec") -> EngineConfig | None:
    """Returns the configuration of the engine that constructs a tier which the user listed.

    vLLM passes a tier a summary of its configuration, in which a model is only a name. The complete
    configuration is a local variable of the caller that constructs the tier. A caller's
    configuration is the right one if the summary's `extra_config` is the same object, not a copy,
    as its `kv_connector_extra_config`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found, caches = (frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config"))
        transfer = getattr(found, "kv_transfer_config", None)
        settings = getattr(transfer, "kv_connector_extra_config", None)
        if caches is not None and settings is not None and settings is spec.extra_config:
            return EngineConfig(found, caches)
        frame = frame.f_back
    return None


def of_outermost(child: object, base: type) -> Any | None:
    """Returns the engine's configuration if another connector constructs `child`, else None.
    `base`: vLLM's connector class. The child's configuration has no reference to the engine's, so
    the constructor of the outermost connector is looked up on the stack.
    """
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        maker, config = names.get("self"), names.get("vllm_config")
        if maker is not child and isinstance(maker, base) and config is not None:
            found = config
        frame = frame.f_back
    return found


def key_positions(context: Any) -> Mapping[bytes, int]:
    """Returns the keys that vLLM has recorded so far in the `ReqContext` of a request. The value of
    a key is the number of tokens from the beginning of the request to the end of the tokens that
    the key covers; this end may be inside one of the chunks in which the tier stores tokens. Empty
    if the private attribute is missing.
    """
    positions: Mapping[bytes, int] = getattr(context, "_offload_key_positions", {})
    return positions


def has_no_keys(context: Any) -> bool:
    """Returns whether vLLM has recorded no key of a request so far. False if the private attribute
    is missing.
    """
    return getattr(context, "_offload_key_positions", None) == {}
