"""Ritornello as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "RitornelloConnector",
        "kv_connector_module_path": "ritornello.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": "/nvme/kv", "capacity": "200GiB"}}'

Settings in addition to `path`, among others: `capacity` (needed only to create the store; half of
the free space if omitted) and `read_only`; all are in `settings.Settings`. A request can opt out in
its `kv_transfer_params`: `{"ritornello.no_load": true}`, `{"ritornello.no_store": true}`. Start
vLLM with `--shutdown-timeout 20`: by default it kills its processes before they can finish a save.

`data_path` decides how bytes move. On CPUs the connector copies them itself (`CpuPath`). On GPUs it
builds vLLM's own offloading, with the store as a tier below vLLM's host memory (`OffloadingPath`);
the tier can also be configured without the connector: `RitornelloTier`
(docs/engines/vllm-tier.md).

vLLM calls the modules `connector` and `tier.manager`, and the wrappers that `weights` installs
around some of vLLM's methods. The modules that make decisions (`scheduler`, `worker`, `identity`,
`layout`) do not import vLLM, so that they can be tested without an engine.
"""

from typing import TYPE_CHECKING

from ritornello import core_log
from ritornello.connector import deferred_imports

if TYPE_CHECKING:
    from ritornello.vllm.connector import RitornelloConnector
    from ritornello.vllm.tier.manager import RitornelloTier

__all__ = ["RitornelloConnector", "RitornelloTier"]


# vLLM handles lines of loggers below its own only.
core_log.log_below("vllm.ritornello")

# Imported at first use, because these modules import vLLM.
__getattr__ = deferred_imports(
    __name__, RitornelloConnector="connector", RitornelloTier="tier.manager"
)
