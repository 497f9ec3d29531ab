"""The limit of a disk: four threads write or read one preallocated file by direct I/O, 1 MiB at a
time.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter

THREADS = 4
OPERATION = 1 << 20
# `os.preadv` or `os.pwritev`. Arguments: file, memory, offset in the file. Returns the bytes moved.
Move = Callable[[int, list[memoryview], int], int]


class DiskLimit:
    """A file of `nbytes` bytes. `write`, `write_new` and `read` move all bytes of the file from or
    to `memory`, and return the duration in seconds. `memory` must have `nbytes` bytes, and begin at
    a multiple of the system's page size.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes
        self._file = self._create()
        self._pool = ThreadPoolExecutor(THREADS)

    def write(self, memory: memoryview) -> float:
        return self._timed(os.pwritev, memory)

    def read(self, memory: memoryview) -> float:
        return self._timed(os.preadv, memory)

    def write_new(self, memory: memoryview) -> float:
        """Replaces the file with a new preallocated file, and writes to the new file."""
        os.close(self._file)
        self._path.unlink()
        self._file = self._create()
        return self.write(memory)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)
        self._path.unlink()

    def _create(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(file, 0, self._nbytes)
        return file

    def _timed(self, move: Move, memory: memoryview) -> float:
        begun = perf_counter()
        list(self._pool.map(partial(self._lane, move, memory), range(THREADS)))
        return perf_counter() - begun

    def _lane(self, move: Move, memory: memoryview, lane: int) -> None:
        for at in range(lane * OPERATION, self._nbytes, THREADS * OPERATION):
            part = memory[at : min(at + OPERATION, self._nbytes)]
            if move(self._file, [part], at) != len(part):
                raise SystemExit("disk: an operation moved fewer bytes than requested")
