"""The KV memory of a worker: in host memory, which the store reads and writes itself, or on a
device. Our own kernels or the copy engines move pages between the device and pinned memory, which
the store reads and writes.

On a device, work is ordered by streams:
* A load begins after the work that the engine has queued, because a step in flight may still write
  to blocks that vLLM has given to another request since. A load is reported when its copies have
  ended.
* A save begins after the step that fills its pages. vLLM may give its blocks to other requests
  before the save has read them: `protect` makes the engine's later work wait.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ritornello.connector.strided_blocks import Span, page_pool
from ritornello.vllm.layout import CacheTensor
from ritornello.vllm.offloading_settings import memory_bytes

if TYPE_CHECKING:
    from ritornello._core import Device, Ticket

# Pinned memory of all workers that this vLLM runs on a machine, together: at most 1/STAGING_SHARE
# of the machine's memory or of the control group's limit, and at most STAGING_MAX bytes per worker.
STAGING_SHARE, STAGING_MAX = 16, 4 << 30


class KvMemory(Protocol):
    """`device_type`: torch's name of the device that has the tensors."""

    device_type: str

    def open(self) -> None:
        """Does the work that takes long, such as opening the device, before the first request."""

    def problem(self) -> str:
        """Returns why the memory can no longer be used; "" if it can."""

    def arrangement(
        self, caches: Mapping[str, CacheTensor], layers: Iterable[str], apart: int
    ) -> str:
        """Returns how attention arranges the bytes in the blocks of `layers`; "" if the engine's
        configuration determines the arrangement. `apart`: the number of heads in a block if each
        head is one contiguous range of the block, else 0.
        """

    def pool(self, spans: Iterable[Span], blocks: int, owner: object) -> Any:
        """Returns a `PagePool` or `DevicePool` whose page `i` is the bytes of block `i` of `blocks`
        in all spans. `owner` keeps the memory of the spans alive.
        """

    def stream(self) -> int | None:
        """Returns the stream on which the engine queues its work; None if its work has no
        stream.
        """

    def protect(self, ticket: "Ticket") -> bool:
        """Makes the engine's later work wait until a put has read its blocks. Returns False if that
        is not possible: the put must then be cancelled.
        """


class HostMemory:
    """KV memory of an engine on CPUs. Puts have copied their blocks when they return."""

    device_type = "cpu"

    def open(self) -> None:
        pass

    def problem(self) -> str:
        return ""

    def arrangement(
        self, caches: Mapping[str, CacheTensor], layers: Iterable[str], apart: int
    ) -> str:
        return ""

    def pool(self, spans: Iterable[Span], blocks: int, owner: object) -> Any:
        return page_pool(spans, blocks)

    def stream(self) -> int | None:
        return None

    def protect(self, ticket: "Ticket") -> bool:
        return True


class DeviceMemory:
    """KV memory on the CUDA device of this worker, one of `workers` on this machine. `emulated`:
    the device is emulated in host memory, by a wheel that is built for tests. `attention` returns
    the name of the attention backend of a layer, given the layer's name.
    """

    def __init__(
        self, workers: int, attention: Callable[[str], str], *, emulated: bool = False
    ) -> None:
        self.device_type = "cpu" if emulated else "cuda"
        self._workers = workers
        self._attention = attention
        self._emulated = emulated
        self._device: Device | None = None

    def open(self) -> None:
        self._opened()

    def problem(self) -> str:
        if self._device is None or not self._device.broken:
            return ""
        return "the device failed: restart the engine to use it again"

    def arrangement(
        self, caches: Mapping[str, CacheTensor], layers: Iterable[str], apart: int
    ) -> str:
        """Returns the attention backends of the layers, each with the order of a block's dimensions
        in memory. Workers choose the backend, by their GPU and by what is installed, and backends
        order the dimensions differently.
        """
        found = {f"{self._attention(name)}/{_order(caches[name], apart)}" for name in layers}
        return "+".join(sorted(found))

    def pool(self, spans: Iterable[Span], blocks: int, owner: object) -> Any:
        rows = [(span.base, span.block_bytes, span.stride) for span in spans]
        return self._opened().pool(rows, blocks, owner=owner)

    def stream(self) -> int | None:
        if self._emulated:
            return None
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def protect(self, ticket: "Ticket") -> bool:
        return ticket.order(self.stream())

    def _opened(self) -> "Device":
        if self._device is None:
            from ritornello._core import Device

            share = memory_bytes() // (STAGING_SHARE * self._workers)
            staging = min(share, STAGING_MAX)
            self._device = Device.open(self._ordinal(), staging=staging, emulated=self._emulated)
        return self._device

    def _ordinal(self) -> int:
        if self._emulated:
            return 0
        import torch

        return int(torch.cuda.current_device())


def _order(cache: CacheTensor, apart: int) -> str:
    """Returns the dimensions of a block in the order in which they are in memory, outermost first.
    Dimensions of length 1 are omitted. If the `apart` heads are contiguous ranges, their dimension
    is omitted too: ranges of heads are stored separately, so that workers with another number of
    heads find the pages.
    """
    shape, strides = tuple(cache.shape), tuple(cache.stride())
    inside = [at for at in range(1, len(shape)) if shape[at] > 1]
    if apart and len(shape) > 1 and shape[1] == apart:
        inside = [at for at in inside if at != 1]
    return ".".join(str(at) for at in sorted(inside, key=lambda at: -strides[at]))
