"""LMCache frees the memory of objects by force while the adapter stores them: tested with LMCache's
first tier (L1).
"""

import threading
from typing import Any

import pytest
import torch
from harness import MIB, AdapterKind, keys_of, lookup, wait
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager

LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 4, 64, 64])], dtypes=[torch.bfloat16])
FIRST, OTHER = 1, 2


def written(l1: L1Manager, keys: list[Any], value: int) -> list[Any]:
    """Puts objects of one value in L1. Returns their memory objects, which are read-locked."""
    reserved = l1.reserve_write(keys, [False] * len(keys), LAYOUT)
    for _, obj in reserved.values():
        assert obj is not None
        obj.raw_data.fill_(value)
    l1.finish_write(keys)
    return [obj for _, obj in l1.reserve_read(keys).values()]


@pytest.mark.parametrize("frees", [True, False])
def test_object_freed_during_put_is_not_found(
    plugin: AdapterKind, monkeypatch: pytest.MonkeyPatch, frees: bool
) -> None:
    memory = L1MemoryManagerConfig(size_in_bytes=64 * MIB, use_lazy=False, shm_name="")
    l1 = L1Manager(L1ManagerConfig(memory_config=memory))
    adapter = plugin.open()
    store, held = adapter._objects.store, threading.Event()
    submit, late = store.submit_put, []

    def submit_put(scope: Any, keys: Any, pages: Any) -> Any:
        # The put reads the memory only after LMCache has freed it and used it again.
        if frees:
            l1.clear(force=True)
            late.extend(written(l1, keys_of(2, start=100), OTHER))
        held.set()
        return submit(scope, keys, pages)

    monkeypatch.setattr(store, "submit_put", submit_put)
    keys = keys_of(2)
    objects = written(l1, keys, FIRST)
    addresses = [obj.data_ptr for obj in objects]
    number = adapter.submit_store_task(keys, objects)
    del objects
    assert held.is_set()
    assert not frees or [obj.data_ptr for obj in late] == addresses
    fd = adapter.get_store_event_fd()
    result = wait(fd, lambda: adapter.pop_completed_store_tasks().get(number))
    assert result.is_successful() is not frees
    assert lookup(adapter, keys) == [not frees] * 2
    assert adapter.counts().get("skipped_pages:freed", 0) == (2 if frees else 0)
    adapter.close()
