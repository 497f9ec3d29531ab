"""Memory objects of LMCache that the caller drops live until their transfers end."""

import ctypes
import gc
import mmap
import select
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import open_small

from ritornello._core import Completions
from ritornello.lmcache.lmcache_objects import Item, ObjectStore
from ritornello.lmcache.naming import (
    RANK_BYTES,
    STRONG_HASH_BYTES,
    Family,
    ObjectFormat,
    ObjectName,
)
from ritornello.lmcache.settings import Settings
from ritornello.lmcache.views import owning_view

NBYTES = 1 << 20
COUNT = 4


class MemoryObj:
    """Stand-in for LMCache's memory object: its memory is freed when the object is
    garbage-collected, even while views of the memory exist.
    """

    def __init__(self, fill: int = 0) -> None:
        self.mapping = mmap.mmap(-1, NBYTES)
        self.mapping.write(bytes([fill]) * NBYTES)
        self.here = (ctypes.c_ubyte * NBYTES).from_buffer(self.mapping)
        self.data_ptr = ctypes.addressof(self.here)

    def get_size(self) -> int:
        return NBYTES

    @property
    def byte_array(self) -> memoryview:
        return memoryview((ctypes.c_ubyte * NBYTES).from_address(self.data_ptr))


@pytest.fixture
def l2(tmp_path: Path) -> Iterator[ObjectStore]:
    open_small(tmp_path / "store").close()
    opened = ObjectStore(Settings.parse({"path": str(tmp_path / "store")}))
    yield opened
    opened.store.close()


def items(objects: list[MemoryObj], *, in_arena: bool) -> list[Item | None]:
    return [
        Item(
            ObjectName(Family("m", 0, ""), bytes([place]) * (RANK_BYTES + STRONG_HASH_BYTES)),
            ObjectFormat(NBYTES),
            owning_view(obj, obj.data_ptr if in_arena else None),
        )
        for place, obj in enumerate(objects)
    ]


def wait(l2: ObjectStore, completions: Completions) -> list[bool]:
    done: list[Any] = []
    while not done:
        assert select.select([completions.fileno()], [], [], 60)[0]
        done = l2.complete_tickets(completions.drain())
    ok: list[bool] = done[0].ok
    return ok


def alive(references: "list[weakref.ref[MemoryObj]]") -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("in_arena", [False, True])
def test_dropped_objects_live_until_their_transfer_ends(l2: ObjectStore, in_arena: bool) -> None:
    completions = Completions()
    for number, is_put in enumerate((True, False)):
        objects = [MemoryObj(7) for _ in range(COUNT)]
        references = [weakref.ref(obj) for obj in objects]
        moved = items(objects, in_arena=in_arena)
        assert l2.start(number, moved, completions, is_put=is_put) is None
        del moved
        del objects
        assert alive(references) == COUNT
        assert wait(l2, completions) == [True] * COUNT
        assert alive(references) == 0


def test_dropped_objects_live_until_transfer_of_closed_store_ends(l2: ObjectStore) -> None:
    completions = Completions()
    objects = [MemoryObj(7) for _ in range(COUNT)]
    references = [weakref.ref(obj) for obj in objects]
    l2.start(1, items(objects, in_arena=True), completions, is_put=True)
    del objects
    assert alive(references) == COUNT
    l2.store.close()
    wait(l2, completions)
    assert alive(references) == 0


def test_byte_array_that_owns_its_memory_is_returned_as_it_is() -> None:
    class Buffer:
        byte_array = b"x" * 8

    assert owning_view(Buffer()) == b"x" * 8
