"""Replaces SGLang's compiled kernels on a machine without a GPU, as far as its CPU path with
torch's attention needs them. Tests with this package exercise SGLang's control path, host pools and
storage interface, but not its kernels, pinned memory, and the overlap of copies and computation.
"""

import builtins
from collections.abc import Callable
from typing import Any

import torch

from . import kvcacheio

# SGLang's host pools import these names on CUDA only, but call them whenever the I/O backend
# `direct` is chosen. As builtins the names are found without an import.
for name in (
    "transfer_kv_direct",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_per_layer_direct_pf_lf",
):
    setattr(builtins, name, getattr(kvcacheio, name))


def __getattr__(name: str) -> Callable[..., Any]:
    """Returns a kernel that can be imported, and fails when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    missing.__name__ = name
    return missing


class Cudart:
    """Pretends to register host memory with a GPU."""

    def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:  # noqa: N802
        return 0

    def cudaGetErrorString(self, _: int) -> str:  # noqa: N802
        return "no GPU"


def pageable(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a tensor constructor to ignore `pin_memory`."""

    def made(*arguments: Any, pin_memory: bool = False, **others: Any) -> Any:
        return make(*arguments, **others)

    return made


torch.cuda.cudart = lambda: Cudart()
for name in ("zeros", "empty", "empty_like", "zeros_like", "full", "tensor"):
    setattr(torch, name, pageable(getattr(torch, name)))
