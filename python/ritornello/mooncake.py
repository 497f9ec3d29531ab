"""Mooncake's store as a remote: `ritornello.mooncake:Mooncake?master=HOST:50051&host=HOST`.

Requires `mooncake.store` (from `mooncake-transfer-engine` or one of its other wheels) and a running
`mooncake_master`. Values are read by range, into buffers that the constructor registers with
Mooncake's transfer engine. Mooncake cannot list its names, so `ritornello remote` does not work
with it. Mooncake evicts objects at any time.
"""

import ctypes
import socket
from queue import LifoQueue

from mooncake.store import MooncakeDistributedStore

from ritornello.errors import FatalError, RetryError

# Number of read buffers, one for each thread with which the remote calls a backend, and the size of
# a buffer. A value longer than `BUFFER_BYTES` is read in parts.
BUFFERS = 8
BUFFER_BYTES = 9 << 20
# Timeout in seconds of a connection that checks, before `setup`, whether the master can be reached:
# `setup` itself would try for 90 seconds.
CONNECT = 5
# Mooncake's status code for a name that does not exist. `ABSENT` also has the code for a name whose
# write is in progress.
NOT_FOUND = -704
ABSENT = (NOT_FOUND, -703)


class Mooncake:
    """Backend over a Mooncake client. Arguments: see `MooncakeDistributedStore.setup`; sizes are in
    bytes.
    """

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
        """`segment`: bytes of memory that this process contributes to Mooncake's store."""
        # An address with a scheme is the address of an etcd server, which names the current master.
        # Such an address is not checked.
        if "://" not in master:
            name, _, port = master.rpartition(":")
            try:
                socket.create_connection((name, int(port)), CONNECT).close()
            except (OSError, ValueError) as error:
                raise FatalError(
                    f"no mooncake_master at {master}: start it, or correct `master` ({error})"
                ) from error
        self.store = MooncakeDistributedStore()
        done = self.store.setup(
            host, metadata, int(segment), int(local_buffer), protocol, devices, master
        )
        if done != 0:
            raise FatalError(
                f"Mooncake's setup failed with status {done}: see the log of mooncake_master"
            )
        self.buffers: LifoQueue[ctypes.Array[ctypes.c_char]] = LifoQueue()
        for _ in range(BUFFERS):
            buffer = ctypes.create_string_buffer(BUFFER_BYTES)
            done = self.store.register_buffer(ctypes.addressof(buffer), BUFFER_BYTES)
            if done != 0:
                raise FatalError(
                    f"Mooncake cannot register a read buffer of {BUFFER_BYTES} bytes (status "
                    f"{done}): see Mooncake's log in this process"
                )
            self.buffers.put(buffer)

    def get(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Returns `value[start:stop]` of the value of `name`, or None if the name has no value."""
        size = self.store.get_size(name)
        if size in ABSENT:
            return None
        if size < 0:
            raise RetryError(f"Mooncake's get_size returned status {size}: see Mooncake's log")
        stop = size if stop is None else min(stop, size)
        parts = []
        buffer = self.buffers.get()
        try:
            for at in range(start, stop, BUFFER_BYTES):
                length = min(BUFFER_BYTES, stop - at)
                # The call takes lists of buffers, names and ranges, here one of each; the result
                # has the same nesting.
                read = self.store.get_into_ranges(
                    [ctypes.addressof(buffer)], [[name]], [[[0]]], [[[at]]], [[[length]]]
                )[0][0][0]
                if read in ABSENT:
                    return None
                if read != length:
                    raise RetryError(
                        f"Mooncake's get_into_ranges returned {read} instead of {length} bytes"
                    )
                parts.append(ctypes.string_at(buffer, length))
        finally:
            self.buffers.put(buffer)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def exists(self, name: str) -> bool:
        """Returns whether the name has a value."""
        found: int = self.store.is_exist(name)
        if found < 0 and found not in ABSENT:
            raise RetryError(f"Mooncake's is_exist returned status {found}: see Mooncake's log")
        return found == 1

    def set(self, name: str, value: bytes) -> None:
        """Writes a value."""
        done = self.store.upsert(name, value)
        if done != 0:
            raise RetryError(f"Mooncake's upsert returned status {done}: see Mooncake's log")

    def delete(self, name: str) -> None:
        """Removes a value, even while it is being read."""
        done = self.store.remove(name, True)
        if done not in (0, NOT_FOUND):
            raise RetryError(f"Mooncake's remove returned status {done}: see Mooncake's log")
