"""Counts of weight changes, in memory that the processes of one machine share."""

import mmap
import os
import tempfile
from pathlib import Path
from threading import Lock

# Bytes of one counter, an unsigned little-endian integer.
SLOT = 8
SHARED_MEMORY = Path("/dev/shm")


class ChangeCounters:
    """`slots` counters; a slot is the index of a counter. Each counter is incremented by one
    process only, from any of its threads; the scheduler's process also raises counters to counts
    that workers report. Two readings are equal if and only if nothing was counted between them.
    """

    def __init__(self, memory: mmap.mmap, slots: int) -> None:
        self._memory = memory
        self._bytes = slots * SLOT
        self._lock = Lock()

    @classmethod
    def create(cls, slots: int) -> tuple["ChangeCounters", Path]:
        """Returns counters at zero, and the file to which other processes attach. The caller
        unlinks the file after they have attached. Raises OSError if the file system is full: a file
        without reserved space would end the process by SIGBUS at the first access.
        """
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        file, name = tempfile.mkstemp(prefix="ritornello-weights-", dir=folder)
        try:
            os.posix_fallocate(file, 0, slots * SLOT)
            return cls(mmap.mmap(file, slots * SLOT), slots), Path(name)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    @classmethod
    def attach(cls, path: Path, slots: int) -> "ChangeCounters | None":
        """Returns the counters of another process; None if their file cannot be mapped, as on
        another machine.
        """
        try:
            with path.open("r+b") as file:
                return cls(mmap.mmap(file.fileno(), slots * SLOT), slots)
        except (OSError, ValueError):
            return None

    @classmethod
    def private(cls, slots: int) -> "ChangeCounters":
        return cls(mmap.mmap(-1, slots * SLOT), slots)

    def add(self, slot: int) -> None:
        with self._lock:
            self._write(slot, self.count(slot) + 1)

    def raise_to(self, slot: int, count: int) -> None:
        """Raises a counter to `count`. Writes nothing if the counter is at least `count`, as the
        counter of a worker on this machine always is, because the worker read `count` from it. A
        write could undo a change that such a worker counts at the same time.
        """
        with self._lock:
            if count > self.count(slot):
                self._write(slot, count)

    def count(self, slot: int) -> int:
        return count_in(self._memory, slot)

    def read(self) -> bytes:
        """Returns all counts at this moment, to be compared with another reading."""
        return self._memory[: self._bytes]

    def _write(self, slot: int, count: int) -> None:
        self._memory[slot * SLOT : (slot + 1) * SLOT] = count.to_bytes(SLOT, "little")


def count_in(reading: bytes | mmap.mmap, slot: int) -> int:
    """Returns the count of the counter `slot` in a reading (`ChangeCounters.read`)."""
    return int.from_bytes(reading[slot * SLOT : (slot + 1) * SLOT], "little")
