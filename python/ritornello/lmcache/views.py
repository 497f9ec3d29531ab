"""Views of LMCache's memory objects that keep the objects alive.

LMCache frees an object's memory at the latest with the last reference to the object, and a view of
the memory does not hold a reference to the object. The views of this module hold a reference. The
core keeps a buffer until no I/O uses the buffer, even after a cancelled ticket or a closed store,
so the object outlives its transfer. Its memory may not: LMCache also frees memory explicitly, and
marks the object as invalid (`lmcache_objects` deletes pages that were stored from such memory).
"""

import ctypes
from typing import Any


def owning_view(obj: Any, address: int | None = None) -> Any:
    """Returns the bytes of a memory object, at `address` if given. The object lives as long as the
    view and all buffers exported from it. Bytes that do not depend on the object are returned
    without a reference to it.
    """
    if address is None:
        memory = obj.byte_array
        if not isinstance(memory, memoryview) or not isinstance(memory.obj, ctypes.Array):
            return memory  # owns its bytes
    else:
        memory = memoryview((ctypes.c_ubyte * obj.get_size()).from_address(address))
    memory.obj.owner = obj  # type: ignore[attr-defined]
    return memory
