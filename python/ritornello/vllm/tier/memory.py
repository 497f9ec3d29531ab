"""vLLM's host tier as pages of a `PagePool`: row `i` is page `i`, written from where it
is, and read in place, or through the store's staging memory where the disk reaches that faster.

The rows lie in a shared mapping, each begins at a multiple of 4 KiB, and a view counts them. vLLM
releases the view when it stops, and then unmaps the rows, which nobody else's hold on them may
prevent; so the pool knows them by address, and `HostRows` keeps the array behind the view for as
long as jobs may run.
"""

import ctypes

from ritornello.memory import wants_staging


class HostRows:
    """`view`: of shape (rows, row_bytes), C-contiguous. `staged`: what is loaded from a store in
    `folder` comes through its staging memory.
    """

    def __init__(self, view: memoryview, row_bytes: int, folder: str) -> None:
        from ritornello._core import PagePool

        behind = memoryview(view.obj)
        if behind.nbytes != view.nbytes or not view.c_contiguous:
            raise ValueError("the host tier is not one contiguous array of rows")
        start = ctypes.addressof(ctypes.c_ubyte.from_buffer(behind))
        whole = (ctypes.c_ubyte * view.nbytes).from_address(start)
        self._behind: object = view.obj
        self.pool = PagePool([whole], [row_bytes])
        self.staged = wants_staging(folder, start, view.nbytes)
