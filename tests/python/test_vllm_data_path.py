"""The data path that `RitornelloConnector` chooses, by vLLM's platform and `RITORNELLO_DEVICE`.
vLLM's platform and the modules of the data paths, which need vLLM, have stand-ins.
"""

import sys
from types import ModuleType
from typing import Any

import pytest

from ritornello.vllm import device_choice
from ritornello.vllm.data_path import data_path

PACKAGE = "ritornello.vllm"
CLASSES = {"cpu_path": "CpuPath", "device_path": "DevicePath", "offloading_path": "OffloadingPath"}
PLATFORMS = ("cpu", "cuda", "rocm", "xpu")


class Platform:
    """Stand-in for vLLM's `current_platform`. As in vLLM, ROCm is like CUDA and is not CUDA."""

    def __init__(self, name: str) -> None:
        self._name = name

    def is_cpu(self) -> bool:
        return self._name == "cpu"

    def is_cuda(self) -> bool:
        return self._name == "cuda"

    def is_rocm(self) -> bool:
        return self._name == "rocm"

    def is_xpu(self) -> bool:
        return self._name == "xpu"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda() or self.is_rocm()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that sets the platform and the environment variable (None: not set)."""

    def engine(platform: str, device: str | None) -> None:
        module: Any = ModuleType("vllm.platforms")
        module.current_platform = Platform(platform)
        monkeypatch.setitem(sys.modules, "vllm.platforms", module)
        for name, kind in CLASSES.items():
            path: Any = ModuleType(f"{PACKAGE}.{name}")
            setattr(path, kind, kind)
            monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", path)
        if device is None:
            monkeypatch.delenv(device_choice.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(device_choice.VARIABLE, device)

    return engine


@pytest.mark.parametrize(
    ("device", "chosen"),
    [
        (None, ("CpuPath", "OffloadingPath", "OffloadingPath", "OffloadingPath")),
        ("", ("CpuPath", "OffloadingPath", "OffloadingPath", "OffloadingPath")),
        ("own", ("CpuPath", "DevicePath", "OffloadingPath", "OffloadingPath")),
        ("emulated", ("DevicePath",) * 4),
    ],
)
def test_platform_and_variable_choose_data_path(
    engine: Any, device: str | None, chosen: tuple[str, ...]
) -> None:
    for platform, expected in zip(PLATFORMS, chosen, strict=True):
        engine(platform, device)
        assert data_path() == expected, platform


@pytest.mark.parametrize("platform", PLATFORMS)
def test_unknown_value_of_variable_is_refused_on_every_platform(engine: Any, platform: str) -> None:
    engine(platform, "cuda")
    with pytest.raises(ValueError, match=f"{device_choice.VARIABLE} is 'cuda'"):
        data_path()
