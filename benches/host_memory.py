"""Memory of a host tier: a file in /dev/shm, as vLLM makes it; the same file with its pages
collapsed into huge pages; or anonymous huge pages.
"""

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np

MIB = 1 << 20
HUGE = 2 * MIB
MADV_COLLAPSE = 25


class Host:
    """The host tier: `rows` rows of `row_bytes` bytes, each for one chunk of KV, in memory of one
    kind: "huge" (anonymous huge pages), "collapsed" (a file in huge pages), or another name (a file
    in pages of 4 KiB).
    """

    def __init__(self, kind: str, rows: int, row_bytes: int) -> None:
        size = rows * row_bytes
        self.kind = kind
        if kind == "huge":
            self._map = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            start = -address(self._map) % HUGE
            self._map.madvise(mmap.MADV_HUGEPAGE)
        else:
            path = f"/dev/shm/ritornello_bench_{os.getpid()}"
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            Path(path).unlink()
            start = 0
            os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        flat = np.frombuffer(self._map, np.int8, size, start)
        self.rows = flat.reshape(rows, row_bytes)
        self.rows[:] = np.random.default_rng(1).integers(-128, 127, row_bytes, np.int8)
        self.rows[:, :8] = np.arange(rows, dtype=np.int64)[:, None].view(np.int8)
        if kind == "collapsed":
            collapse(fd, size)
        if kind == "huge" and (found := huge_bytes(self._map)) < size - 2 * HUGE:
            told = f"only {found / MIB:.0f} of the {size / MIB:.0f} MiB are in huge pages"
            print(f"huge: {told}", file=sys.stderr)

    @property
    def view(self) -> memoryview:
        return self.rows.data


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def huge_bytes(memory: mmap.mmap) -> int:
    """Returns the bytes of an anonymous mapping that are in huge pages."""
    start, found, inside = address(memory), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= start < high
        elif inside and first == "AnonHugePages:":
            found += int(line.split()[1]) << 10
    return found


def collapse(fd: int, size: int) -> None:
    """Collapses the file's whole ranges of 2 MiB into huge pages, through a separate mapping that
    begins at a multiple of 2 MiB: the kernel requires this alignment, which vLLM's mapping may
    lack. Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    reserved = libc.mmap(None, size + HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    aligned = reserved + -reserved % HUGE
    fixed = mmap.MAP_SHARED | 0x10
    libc.mmap(aligned, size, mmap.PROT_READ | mmap.PROT_WRITE, fixed, fd, 0)
    begun = time.perf_counter()
    if libc.madvise(aligned, size - size % HUGE, MADV_COLLAPSE):
        raise OSError(ctypes.get_errno(), "MADV_COLLAPSE: " + os.strerror(ctypes.get_errno()))
    seconds = time.perf_counter() - begun
    print(f"collapsed {size / MIB:.0f} MiB in {seconds:.2f} s", file=sys.stderr)
    libc.munmap(reserved, size + HUGE)
