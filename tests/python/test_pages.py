"""The types of memory that puts and gets take as pages: a get returns the bytes of the put."""

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import Bytes, blank, keys_of, pages_of

import ritornello as rt

COUNT = 5
# Bytes of a page: two multiples of the unit of 4 KiB, of which the second is long enough to be
# split (over 256 KiB), and two other sizes.
SIZES = [196_608, 1_048_576, 5_000, 1]


class Tensor:
    """Stand-in for torch's tensors, without the buffer protocol and without `__array__`."""

    class Device:
        type = "cpu"

    device = Device()

    def __init__(self, array: Bytes) -> None:
        self._array = array

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def is_contiguous(self) -> bool:
        return True


def rows(array: Bytes) -> Any:
    return array


def lists(array: Bytes) -> Any:
    return [memoryview(row) for row in array]


def tensors(array: Bytes) -> Any:
    return [Tensor(row) for row in array]


def fragments(array: Bytes) -> Any:
    """Returns each page as four uneven pieces, one of them empty, and one a tensor."""
    third = array.shape[1] // 3
    return [
        [row[:third], row[:0], Tensor(row[third : 2 * third]), row[2 * third :]] for row in array
    ]


def pool(array: Bytes) -> Any:
    return rt.PagePool([array], [array.shape[1]]).pages(range(len(array)))


def split_pool(array: Bytes) -> Any:
    """Returns a pool of two buffers, the left and the right halves of the pages: in memory, each
    left half is followed by its right half.
    """
    width = array.shape[1]
    flat, left = array.reshape(-1), width // 2
    if left == 0:
        return pool(array)
    halves = rt.PagePool([flat, flat[left:]], [left, width - left], strides=[width, width])
    return halves.pages(range(len(array)))


FORMS = [rows, lists, tensors, fragments, pool, split_pool]


def aligned(pages: int, page_bytes: int) -> Bytes:
    memory = mmap.mmap(-1, max(pages * page_bytes, mmap.PAGESIZE))
    return np.frombuffer(memory, np.uint8, pages * page_bytes).reshape(pages, page_bytes)


def unaligned(pages: int, page_bytes: int) -> Bytes:
    return np.zeros(pages * page_bytes + 1, np.uint8)[1:].reshape(pages, page_bytes)


@pytest.mark.parametrize("page_bytes", SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("memory", [aligned, unaligned])
def test_bytes_are_returned_unchanged(
    store: rt.Store,
    page_bytes: int,
    form: Callable[[Bytes], Any],
    memory: Callable[[int, int], Bytes],
) -> None:
    scope = rt.Scope.opaque("forms", page_bytes)
    keys = keys_of("forms", COUNT)
    right = pages_of(keys, page_bytes)
    source, out = memory(COUNT, page_bytes), memory(COUNT, page_bytes)
    source[:] = right
    assert store.put_batch(scope, keys, form(source)) == COUNT
    assert store.get_batch(scope, keys, form(out)) == COUNT
    assert (out == right).all()


def test_pages_may_have_any_dtype_and_shape(store: rt.Store) -> None:
    keys = keys_of("dtypes", 3)
    pages = np.arange(3 * 2 * 4 * 8, dtype=np.float32).reshape(3, 2, 4, 8)
    scope = rt.Scope.opaque("dtypes", pages[0].nbytes)
    store.put_batch(scope, keys, pages)
    out = np.zeros_like(pages)
    assert store.get_batch(scope, keys, list(out)) == 3
    assert (out == pages).all()


def test_put_takes_bytes_and_get_fills_bytearrays(store: rt.Store) -> None:
    scope = rt.Scope.opaque("bytes", 100)
    keys = keys_of("bytes", 2)
    store.put_batch(scope, keys, [b"a" * 100, [b"b" * 60, bytearray(b"c" * 40)]])
    out = [bytearray(100), bytearray(100)]
    assert store.get_batch(scope, keys, out) == 2
    assert out == [b"a" * 100, b"b" * 60 + b"c" * 40]


def test_out_may_be_longer_than_keys(store: rt.Store) -> None:
    scope = rt.Scope.opaque("longer", 64)
    keys = keys_of("longer", 2)
    store.put_batch(scope, keys, pages_of(keys, 64))
    out = blank(4, 64)
    assert store.get_batch(scope, keys, out) == 2
    assert (out[:2] == pages_of(keys, 64)).all()
    assert (out[2:] == 0xA5).all()


def test_pool_takes_pages_in_any_order(store: rt.Store) -> None:
    scope = rt.Scope.opaque("order", 4096)
    keys = keys_of("order", 3)
    right = pages_of(keys, 4096)
    memory = blank(8, 4096)
    registered = rt.PagePool([memory], [4096])
    assert (len(registered), registered.page_bytes) == (8, 4096)
    store.put_batch(scope, keys, right)
    assert store.get_batch(scope, keys, registered.pages([6, 0, 3])) == 3
    assert (memory[[6, 0, 3]] == right).all()
    assert (memory[[1, 2, 4, 5, 7]] == 0xA5).all()
    store.delete(scope, keys)
    assert store.put_batch(scope, keys, registered.pages(np.array([6, 0, 3]))) == 3


def test_pool_may_have_strided_buffers(store: rt.Store) -> None:
    """The pool has one buffer for each of two layers, with a gap after every block."""
    layers = [blank(4, 1000), blank(4, 1000)]
    registered = rt.PagePool(layers, [600, 900], strides=[1000, 1000])
    scope = rt.Scope.opaque("strides", 1500)
    keys = keys_of("strides", 2)
    right = pages_of(keys, 1500)
    store.put_batch(scope, keys, right)
    assert store.get_batch(scope, keys, registered.pages([3, 1])) == 2
    for row, block in enumerate([3, 1]):
        assert (layers[0][block, :600] == right[row, :600]).all()
        assert (layers[1][block, :900] == right[row, 600:]).all()
        assert (layers[0][block, 600:] == 0xA5).all()


def test_pool_keeps_buffers_alive(store: rt.Store) -> None:
    scope = rt.Scope.opaque("alive", 4096)
    keys = keys_of("alive", 2)
    pages = rt.PagePool([pages_of(keys, 4096)], [4096]).pages([0, 1])
    assert store.put_batch(scope, keys, pages) == 2
    out = blank(2, 4096)
    assert store.get_batch(scope, keys, out) == 2
    assert (out == pages_of(keys, 4096)).all()
