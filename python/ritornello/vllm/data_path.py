"""Chooses the data path that serves an engine.

    CPU                   `CpuPath`: our own copies between KV memory and the store
    CUDA, ROCm, XPU       `OffloadingPath`: vLLM's own offloading to host memory, our tier below it
    CUDA, if `RITORNELLO_DEVICE` is `own`, and every platform, if it is `emulated`
                          `DevicePath`: our own copies between GPU and store

A data path is a connector (`KVConnectorBase_V1`) whose constructor takes two further arguments, as
`CpuPath` describes them. `RitornelloConnector` passes every call of vLLM to the data path.
"""

from typing import Any

from ritornello.vllm import device_choice


def data_path() -> Any:
    """Returns the class of the data path for the platform that vLLM runs on."""
    from vllm.platforms import current_platform

    device = device_choice.chosen()
    if device == device_choice.EMULATED or (device and current_platform.is_cuda()):
        from ritornello.vllm.device_path import DevicePath

        return DevicePath
    if current_platform.is_cpu():
        from ritornello.vllm.cpu_path import CpuPath

        return CpuPath
    from ritornello.vllm.offloading_path import OffloadingPath

    return OffloadingPath
