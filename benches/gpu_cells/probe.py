"""Describes the machine, and measures its disk and the link between host and GPU."""

import mmap
import os
import platform

import torch

from benches.disk_limit import DiskLimit
from benches.gpu_cells.rig import GIB, Rig, Row, Rows, timed

ROUNDS = 8


def machine(rig: Rig) -> Rows:
    """Returns one row: the device, its pinned memory, the number of CPUs, and the versions of Linux
    and torch; of a GPU also the number of its multiprocessors and the bytes of its memory.
    """
    row: Row = {
        "device": rig.device.describe(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        **rig.device.stats()["staging"],
    }
    if not rig.emulated:
        properties = torch.cuda.get_device_properties(0)
        row |= {"sms": properties.multi_processor_count, "memory": properties.total_memory}
    return [row]


def link(rig: Rig) -> Rows:
    """Returns the rates of large copies from pinned host memory to the device, back, and in both
    directions together.
    """
    nbytes = (16 << 20) if rig.emulated else GIB
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=not rig.emulated) for _ in range(2)]
    there = [rig.random(nbytes, seed) for seed in range(2)]
    streams = [None, None] if rig.emulated else [torch.cuda.Stream() for _ in range(2)]

    def copy(directions: str) -> float:
        rig.finish()
        with timed() as times:
            for _ in range(ROUNDS):
                for at, direction in enumerate(directions):
                    pair = (there[at], host[at]) if direction == "h" else (host[at], there[at])
                    with torch.cuda.stream(streams[at]):
                        pair[0].copy_(pair[1], non_blocking=True)
            rig.finish()
        return ROUNDS * nbytes * len(directions) / times.wall

    rows: Rows = []
    for name, directions in (("to device", "h"), ("from device", "d"), ("both", "hd")):
        copy(directions)
        rate = max(copy(directions) for _ in range(3))
        rows.append({"direction": name, "gb_s": rate / 1e9})
    return rows


def disk(rig: Rig) -> Rows:
    """Returns the rates of direct reads and writes of 1 MiB by four threads on one file."""
    nbytes = (32 << 20) if rig.emulated else 2 * GIB
    limit = DiskLimit(rig.folder / "limit", nbytes)
    with mmap.mmap(-1, nbytes) as memory:
        view = memoryview(memory)
        view[:] = os.urandom(1 << 20) * (nbytes >> 20)
        write = max(nbytes / limit.write(view) for _ in range(2))
        read = max(nbytes / limit.read(view) for _ in range(3))
        view.release()
    limit.close()
    return [{"op": "read", "gb_s": read / 1e9}, {"op": "write", "gb_s": write / 1e9}]
