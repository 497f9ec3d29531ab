"""The device under test, KV memory on it, and times."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeAlias

import torch

from ritornello import Device, DevicePool, DeviceSlots

GIB = 1 << 30
# A row of a cell's table: columns by name.
Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = list[Row]


@dataclass(frozen=True)
class Shape:
    """KV memory of a model: a page has `layers` pieces of `piece` bytes, one for each layer."""

    name: str
    layers: int
    piece: int

    @property
    def page(self) -> int:
        return self.layers * self.piece


# Bytes of a layer's block: KV heads * tokens * head size * 2 (K and V) * 2 bytes; with MLA,
# tokens * 576 * 2 bytes.
SHAPES = (
    Shape("8B, blocks of 16", 32, 64 << 10),
    Shape("8B, blocks of 64", 32, 256 << 10),
    Shape("70B TP8, blocks of 16", 80, 8 << 10),
    Shape("70B TP8, blocks of 64", 80, 32 << 10),
    Shape("MLA, blocks of 64", 61, 72 << 10),
)
TINY = (Shape("tiny", 2, 4 << 10),)


@dataclass
class Memory:
    """Tensors on the device, and a view of `[blocks, bytes]` for each span of a page."""

    tensors: list[torch.Tensor]
    views: list[torch.Tensor]

    @property
    def blocks(self) -> int:
        return len(self.views[0])

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        return [(v.data_ptr(), v.shape[1], v.stride(0)) for v in self.views]

    def pages(self, blocks: Sequence[int]) -> torch.Tensor:
        """Returns the bytes of the pages in `blocks`, one row for each page."""
        index = torch.tensor(blocks, device=self.views[0].device)
        return torch.cat([view[index] for view in self.views], dim=1)


@dataclass
class Rig:
    device: Device
    torch_device: torch.device
    folder: Path
    emulated: bool
    # Bytes per second that the machine can move: "to device", "from device", "both" (in both
    # directions together), "disk read" and "disk write".
    limits: dict[str, float]

    @classmethod
    def open(cls, folder: Path, *, emulated: bool, staging: int) -> "Rig":
        where = torch.device("cpu" if emulated else "cuda:0")
        if not emulated:
            torch.cuda.init()
            torch.zeros(1, device=where)
        device = Device.open(0, staging=staging, emulated=emulated)
        return cls(device, where, folder, emulated, {})

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return TINY if self.emulated else SHAPES

    def limit(self, name: str) -> float:
        """Returns the measured limit `name` in bytes per second."""
        if name not in self.limits:
            raise LookupError(f"no limit {name!r}: run the cells `link` and `disk` first")
        return self.limits[name]

    def stream(self) -> int | None:
        """Returns the current CUDA stream of PyTorch, or None on an emulated device, which has no
        streams of PyTorch.
        """
        return None if self.emulated else int(torch.cuda.current_stream().cuda_stream)

    def finish(self) -> None:
        if not self.emulated:
            torch.cuda.synchronize()

    def random(self, nbytes: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.torch_device).manual_seed(seed)
        # Random 32-bit words take less time per byte than random bytes.
        words = (nbytes + 3) // 4
        random = torch.randint(
            -(1 << 31),
            1 << 31,
            (words,),
            dtype=torch.int32,
            device=self.torch_device,
            generator=generator,
        )
        return random.view(torch.uint8)[:nbytes]

    def memory(self, shape: Shape, blocks: int, seed: int = 1) -> Memory:
        """Returns one tensor of random bytes for each layer, as vLLM allocates KV memory."""
        tensors = [
            self.random(blocks * shape.piece, seed * 1000 + layer).view(blocks, shape.piece)
            for layer in range(shape.layers)
        ]
        return Memory(tensors, tensors)

    def pool(self, memory: Memory, way: str = "auto") -> DevicePool:
        self.finish()
        return self.device.pool(memory.spans, memory.blocks, owner=memory.tensors, way=way)

    def slots(self, page_bytes: int, pages: int) -> DeviceSlots:
        slots = self.device.slots(page_bytes, pages, timeout=30)
        if slots is None:
            raise MemoryError(f"pinned memory had no room for {pages} pages of {page_bytes} bytes")
        return slots


def bytes_of(slots: DeviceSlots, pages: int) -> torch.Tensor:
    """Returns the memory of slots as a tensor of `[pages, bytes]`, which does not keep the slots
    alive.
    """
    first, stride = slots.memory
    array = (ctypes.c_uint8 * (stride * pages)).from_address(first)
    whole = torch.frombuffer(array, dtype=torch.uint8).view(pages, stride)
    return whole[:, : slots.page_bytes]


@dataclass
class Times:
    """Seconds of wall clock, and processor seconds of this process."""

    wall: float = 0.0
    cpu: float = 0.0


@contextmanager
def timed() -> Iterator[Times]:
    times = Times(perf_counter(), process_time())
    yield times
    times.wall, times.cpu = perf_counter() - times.wall, process_time() - times.cpu
