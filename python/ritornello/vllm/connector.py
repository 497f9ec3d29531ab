"""vLLM's KV connector: passes every call to the engine's data path (`data_path`)."""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from ritornello.connector.interface import accept_constructor_defaults
from ritornello.vllm import data_path, engine_config
from ritornello.vllm.interface import INTERFACE, delegation, interface_difference

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

INTERFACE.require(interface_difference(KVConnectorBase_V1), vllm.__version__)

# A separate base class, so that Python finds its methods before the abstract methods of vLLM's
# classes.
Delegation: Any = delegation((KVConnectorBase_V1, SupportsHMA), lambda: data_path.data_path())


class RitornelloConnector(Delegation, KVConnectorBase_V1, SupportsHMA):
    """One instance in the scheduler's process, one in each worker. vLLM and MultiConnector know the
    connector by this class, whichever data path serves the engine.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        # Inside MultiConnector, a data path needs the engine's configuration: whether it may serve
        # depends on the other connectors.
        engine = engine_config.of_outermost(self, KVConnectorBase_V1)
        # Set `data_path` before vLLM's constructor runs, because the constructor may call methods
        # that are passed on to `data_path`.
        self.data_path: KVConnectorBase_V1 = data_path.data_path()(
            vllm_config, role, kv_cache_config, connector=self, engine=engine
        )
        super().__init__(vllm_config, role, kv_cache_config)


accept_constructor_defaults(RitornelloConnector, KVConnectorBase_V1)

# Register the class name: with it vLLM finds the class that reads the statistics of a connector
# inside MultiConnector.
with suppress(ValueError):  # registered already
    KVConnectorFactory.register_connector(
        "RitornelloConnector", "ritornello.vllm", "RitornelloConnector"
    )
