"""Mooncake's store as a remote: `ritornello.mooncake:Mooncake?master=HOST:50051&host=HOST`.

Needs `mooncake.store` (`mooncake-transfer-engine`, or one of its other wheels) and a running
`mooncake_master`. Reads go by range into buffers that are registered with the transfer engine once.
The store has no list of its names, so `ritornello remote` cannot look into it; it evicts by itself.
"""

import ctypes
import socket
from queue import LifoQueue

from mooncake.store import MooncakeDistributedStore

from ritornello.errors import FatalError, RetryError

# Reads at once: as many as the remote has threads. Longer ones go by parts.
BUFFERS = 8
BUFFER_BYTES = 9 << 20
# Seconds to reach the master. The store's own `setup` tries for a minute and a half.
CONNECT = 5
# What the store answers about a name that it does not have, and about one that is being written.
NOT_FOUND = -704
ABSENT = (NOT_FOUND, -703)


class Mooncake:
    """See the module. Arguments are those of the store's `setup`, sizes in bytes."""

    def __init__(
        self,
        *,
        master: str,
        host: str,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        segment: str = "0",
        local_buffer: str = str(128 << 20),
    ) -> None:
        """`segment`: memory that this process adds to the store."""
        # Where there are several of them, etcd knows which it is.
        if "://" not in master:
            name, _, port = master.rpartition(":")
            try:
                socket.create_connection((name, int(port)), CONNECT).close()
            except (OSError, ValueError) as error:
                raise FatalError(f"no mooncake_master at {master}: {error}") from error
        self.store = MooncakeDistributedStore()
        done = self.store.setup(
            host, metadata, int(segment), int(local_buffer), protocol, devices, master
        )
        if done != 0:
            raise FatalError(f"no store ({done}): look at what mooncake_master says")
        self.buffers: LifoQueue[ctypes.Array[ctypes.c_char]] = LifoQueue()
        for _ in range(BUFFERS):
            buffer = ctypes.create_string_buffer(BUFFER_BYTES)
            done = self.store.register_buffer(ctypes.addressof(buffer), BUFFER_BYTES)
            if done != 0:
                raise FatalError(f"memory cannot be registered ({done})")
            self.buffers.put(buffer)

    def get(self, name: str, start: int, stop: int | None) -> bytes | None:
        """`value[start:stop]`, None without a value."""
        size = self.store.get_size(name)
        if size in ABSENT:
            return None
        if size < 0:
            raise RetryError(f"get_size says {size}")
        stop = size if stop is None else min(stop, size)
        parts = []
        buffer = self.buffers.get()
        try:
            for at in range(start, stop, BUFFER_BYTES):
                length = min(BUFFER_BYTES, stop - at)
                # One buffer, one name, one range.
                read = self.store.get_into_ranges(
                    [ctypes.addressof(buffer)], [[name]], [[[0]]], [[[at]]], [[[length]]]
                )[0][0][0]
                if read in ABSENT:
                    return None
                if read != length:
                    raise RetryError(f"get_into_ranges says {read} instead of {length}")
                parts.append(ctypes.string_at(buffer, length))
        finally:
            self.buffers.put(buffer)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def exists(self, name: str) -> bool:
        """Whether there is a value."""
        found: int = self.store.is_exist(name)
        if found < 0 and found not in ABSENT:
            raise RetryError(f"is_exist says {found}")
        return found == 1

    def set(self, name: str, value: bytes) -> None:
        """Writes a value."""
        done = self.store.upsert(name, value)
        if done != 0:
            raise RetryError(f"upsert says {done}")

    def delete(self, name: str) -> None:
        """Removes a value, also one that is being read."""
        done = self.store.remove(name, True)
        if done not in (0, NOT_FOUND):
            raise RetryError(f"remove says {done}")
