"""The data path of CUDA engines with our own copies between the GPU and the store, chosen by the
environment variable `RITORNELLO_DEVICE`.
"""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

import os
from typing import TYPE_CHECKING, Any

from ritornello.vllm import kernels
from ritornello.vllm.cpu_path import CpuPath
from ritornello.vllm.kv_memory import DeviceMemory, KvMemory
from ritornello.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VARIABLE = "RITORNELLO_DEVICE"
# Values of the variable.
OWN, EMULATED = "own", "emulated"


def chosen() -> str:
    """Returns the value of the variable; "" if it is not set. ValueError for other values."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", OWN, EMULATED):
        raise ValueError(
            f"{VARIABLE} is {value!r}: set it to {OWN} for Ritornello's own copies between the GPU "
            "and the store, or leave it unset for vLLM's copies"
        )
    return value


class DevicePath(CpuPath):
    """As `CpuPath`, for KV memory on a device. All loads run beside other requests, because a
    failure of a load that a step waits for is known too late where steps overlap.
    """

    @classmethod
    def parse_settings(cls, extra: dict[str, Any]) -> Settings:
        settings = Settings.parse(extra)
        if settings.tiers:
            raise ValueError(
                f'{VARIABLE}={OWN} serves "path", not "tiers": leave {VARIABLE} unset for tiers'
            )
        return settings

    def kv_memory(self) -> KvMemory:
        workers = self._vllm_config.parallel_config.world_size
        return DeviceMemory(workers, emulated=chosen() == EMULATED)

    def block_layout(self, vllm_config: "VllmConfig", spec: Any) -> str:
        if chosen() == EMULATED:
            return kernels.block_layout(vllm_config, spec)
        return kernels.device_block_layout(vllm_config, spec)

    def loads_apart(self) -> bool:
        return True
