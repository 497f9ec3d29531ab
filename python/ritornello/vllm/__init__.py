"""Ritornello as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "RitornelloConnector",
        "kv_connector_module_path": "ritornello.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": "/nvme/kv", "capacity": "200GiB"}}'

Further settings beside `path`: `capacity` (needed only when the store is created; half of the free
space where omitted) and `read_only`. One request may decline, in its `kv_transfer_params`:
`{"ritornello.no_load": true}`, `{"ritornello.no_store": true}`. Start vLLM with
`--shutdown-timeout 20`: by default it kills its processes before they can finish a save.

On GPUs vLLM's own offloading takes the store as a tier behind its host memory: `RitornelloTier`
(docs/engines/vllm-tier.md).

`connector` and `tier.door` are the only doors vLLM uses. Everything that decides something
(`scheduler`, `worker`, `identity`, `layout`) is free of vLLM imports, so that it can be tested
without an engine.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ritornello.vllm.connector import RitornelloConnector
    from ritornello.vllm.tier.manager import RitornelloTier

__all__ = ["RitornelloConnector", "RitornelloTier"]


def __getattr__(name: str) -> object:
    # vLLM is imported when one of them is asked for, not before.
    if name == "RitornelloConnector":
        from ritornello.vllm.connector import RitornelloConnector

        return RitornelloConnector
    if name == "RitornelloTier":
        from ritornello.vllm.tier.manager import RitornelloTier

        return RitornelloTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
