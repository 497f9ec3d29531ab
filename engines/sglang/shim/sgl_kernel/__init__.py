"""Stands in for SGLang's compiled kernels on a machine without a GPU: enough for its CPU path with
attention by torch. It exercises SGLang's control path, host pools and storage interface; its
kernels, pinned memory and overlap it does not.
"""

import builtins
from collections.abc import Callable
from typing import Any

import torch

from . import kvcacheio

# SGLang's host pools import these on CUDA only, and call them wherever `direct` is chosen.
for name in (
    "transfer_kv_direct",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_per_layer_direct_pf_lf",
):
    setattr(builtins, name, getattr(kvcacheio, name))


def __getattr__(name: str) -> Callable[..., Any]:
    """Every other kernel can be imported and not called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    missing.__name__ = name
    return missing


class Cudart:
    """Registers host memory with a GPU that is not there."""

    def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:  # noqa: N802
        return 0

    def cudaGetErrorString(self, _: int) -> str:  # noqa: N802
        return "no GPU"


def pageable(make: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor constructor that has no memory to pin."""

    def made(*arguments: Any, pin_memory: bool = False, **others: Any) -> Any:
        return make(*arguments, **others)

    return made


torch.cuda.cudart = lambda: Cudart()
for name in ("zeros", "empty", "empty_like", "zeros_like", "full", "tensor"):
    setattr(torch, name, pageable(getattr(torch, name)))
