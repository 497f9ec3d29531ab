"""vLLM's host tier as a `PagePool`: it is an array of rows, each of which holds one chunk, and row
`i` is page `i`. The store reads rows directly, and fills them directly or, if that is faster,
through its staging memory.

The rows are in a shared mapping, at multiples of 4 KiB. vLLM passes a view of the rows, releases
this view at shutdown, and then unmaps the rows. If the pool had a reference to the view, the
release would fail. Therefore the pool has the rows' address, and `HostRows` keeps the array behind
the view alive while jobs may run.
"""

import ctypes
from collections.abc import Iterable

from ritornello.staging_choice import wants_staging


class HostRows:
    """The host tier as rows. `view`: its memory, of shape (rows, row_bytes), C-contiguous.
    `staged`: loads from a store in `folders` go through the store's staging memory.
    """

    def __init__(self, view: memoryview, row_bytes: int, folders: Iterable[str]) -> None:
        from ritornello._core import PagePool

        whole_array = memoryview(view.obj)
        if whole_array.nbytes != view.nbytes or not view.c_contiguous:
            raise ValueError("the host tier is not one contiguous array of rows")
        start = ctypes.addressof(ctypes.c_ubyte.from_buffer(whole_array))
        buffer = (ctypes.c_ubyte * view.nbytes).from_address(start)
        self._memory_owner: object = view.obj
        self.pool = PagePool([buffer], [row_bytes])
        self.staged = wants_staging(folders, start, view.nbytes)
