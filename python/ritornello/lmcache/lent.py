"""Memory that LMCache lends for a transfer.

LMCache gives an object's memory to the next one when nothing refers to the object any more, and a
view of the memory does not refer to it. So each view here does: the core keeps a buffer until
nothing reads or writes it any more, also where a ticket is cancelled or the store is closed.
"""

import ctypes
from typing import Any


def lent(obj: Any, address: int | None = None) -> Any:
    """The bytes of a memory object; the object lives at least as long as what is returned, and as
    whatever was made of it. `address`: where they begin, if known.
    """
    if address is None:
        memory = obj.byte_array
        if not isinstance(memory, memoryview) or not isinstance(memory.obj, ctypes.Array):
            return memory  # bytes that own themselves
    else:
        memory = memoryview((ctypes.c_ubyte * obj.get_size()).from_address(address))
    memory.obj.owner = obj  # type: ignore[attr-defined]
    return memory
