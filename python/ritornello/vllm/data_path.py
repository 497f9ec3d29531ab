"""Which data path serves an engine: the only place that decides this.

    CPU                   `CpuPath`: our own copies between KV memory and the store
    CUDA, ROCm, XPU       `OffloadingPath`: vLLM's own offloading to host memory, our tier below it
    CUDA, on demand       `DevicePath`: our own copies between GPU and store

A data path is a connector (`KVConnectorBase_V1`) whose constructor takes two further arguments, as
`CpuPath` describes them. `RitornelloConnector` passes every call of vLLM to it.
"""

from typing import Any


def data_path() -> Any:
    """Returns the class of the data path for the platform that vLLM runs on."""
    from vllm.platforms import current_platform

    from ritornello.vllm import device_path

    device = device_path.chosen()
    if device == device_path.EMULATED or (device and current_platform.is_cuda()):
        return device_path.DevicePath
    if current_platform.is_cpu():
        from ritornello.vllm.cpu_path import CpuPath

        return CpuPath
    from ritornello.vllm.offloading_path import OffloadingPath

    return OffloadingPath
