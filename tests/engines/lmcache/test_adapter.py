"""Adapters made by LMCache's factory in this process, called as LMCache's controllers call them."""

import gc
import select
import time
import weakref
from typing import Any

import pytest
import torch
from harness import MIB, AdapterKind, Memory, fill, has_right_bytes, keys_of, load, lookup, store
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.config import EvictionConfig
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.storage_controllers.eviction_controller import (
    L2AdapterEvictionState,
    L2EvictionController,
)

import ritornello as rt

SHAPE = (2, 4, 64, 64)
OBJECT = 2 * 4 * 64 * 64 * 2
# A chunk of 256 tokens of Llama-3.1-405B with all KV heads on one rank. No chunk in docs/models.md
# has more bytes.
LONG_SHAPE, LONG_OBJECT = (2, 126, 256, 8 * 128), 126 * MIB


class Listener(L2AdapterListener):
    """Records the keys that an adapter reports to LMCache's eviction as stored, read or deleted."""

    def __init__(self) -> None:
        self.stored: dict[Any, int] = {}
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored |= dict(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


def put(adapter: Any, memory: Memory, keys: list[Any], **layout: Any) -> Any:
    objects = memory.objects(len(keys), layout.pop("shape", SHAPE), **layout)
    fill(objects, keys)
    return store(adapter, keys, objects)


def test_stored_objects_are_loaded(adapter_kind: AdapterKind, memory: Memory) -> None:
    adapter, keys = adapter_kind.open(memory), keys_of(12)
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    result = put(adapter, memory, keys)
    assert result.is_successful() and result.bytes_transferred() == 12 * OBJECT
    asked = keys_of(14)
    assert lookup(adapter, asked) == [True] * 12 + [False] * 2
    out = memory.objects(14, SHAPE)
    assert load(adapter, asked, out) == [True] * 12 + [False] * 2
    assert all(has_right_bytes(obj, key) for obj, key in zip(out[:12], keys, strict=True))
    adapter.submit_unlock(keys)
    adapter.close()


def test_longest_chunk_is_loaded_after_restart(plugin: AdapterKind) -> None:
    memory, keys = Memory(2 * LONG_OBJECT), keys_of(1)
    stored, loaded = memory.objects(2, LONG_SHAPE)
    pattern = torch.randint(0, 256, (MIB + 1,), dtype=torch.uint8)
    stored.raw_data.copy_(pattern.repeat(126)[:LONG_OBJECT])
    adapter = plugin.open(memory)
    result = store(adapter, keys, [stored])
    assert result.is_successful() and result.bytes_transferred() == LONG_OBJECT
    adapter.close()
    adapter = plugin.open(memory)
    assert lookup(adapter, keys) == [True]
    assert load(adapter, keys, [loaded]) == [True]
    assert torch.equal(loaded.raw_data, stored.raw_data)
    adapter.submit_unlock(keys)
    adapter.close()


def test_ranks_groups_and_salts_are_separate(adapter_kind: AdapterKind, memory: Memory) -> None:
    adapter = adapter_kind.open(memory)
    kinds: list[dict[str, Any]] = [
        {},
        {"kv_rank": 0x02010201},
        {"object_group_id": 1},
        {"cache_salt": "tenant"},
        {"model_name": "another"},
    ]
    mixed = [key for kind in kinds[:-1] for key in keys_of(2, **kind)]
    assert put(adapter, memory, mixed).is_successful()
    out = memory.objects(len(mixed), SHAPE)
    assert all(load(adapter, mixed, out))
    assert all(has_right_bytes(obj, key) for obj, key in zip(out, mixed, strict=True))
    assert lookup(adapter, keys_of(2, **kinds[-1])) == [False] * 2
    adapter.close()


def test_different_size_is_miss(adapter_kind: AdapterKind, memory: Memory) -> None:
    adapter, keys = adapter_kind.open(memory), keys_of(2)
    put(adapter, memory, keys)
    out = memory.objects(2, (2, 4, 32, 64))
    assert load(adapter, keys, out) == [False] * 2
    assert not any(obj.raw_data.any() for obj in out)
    adapter.close()


def test_other_dtype_or_shape_is_miss(plugin: AdapterKind, memory: Memory) -> None:
    adapter, keys = plugin.open(memory), keys_of(2)
    put(adapter, memory, keys)
    assert load(adapter, keys, memory.objects(2, SHAPE, torch.float16)) == [False] * 2
    assert load(adapter, keys, memory.objects(2, (4, 2, 64, 64))) == [False] * 2
    wanted = {0: MemoryLayoutDesc([torch.Size(SHAPE)], [torch.float16])}
    assert lookup(adapter, keys, wanted) == [False] * 2, (
        "objects of another dtype must not be found"
    )
    wanted = {0: MemoryLayoutDesc([torch.Size(SHAPE)], [torch.bfloat16])}
    assert lookup(adapter, keys, wanted) == [True] * 2
    put(adapter, memory, keys, dtype=torch.float16)
    assert load(adapter, keys, memory.objects(2, SHAPE, torch.float16)) == [True] * 2
    adapter.close()


def test_usage_and_keys_survive_restart(plugin: AdapterKind, memory: Memory) -> None:
    adapter = plugin.open(memory)
    keys = keys_of(5) + keys_of(3, cache_salt="tenant") + keys_of(2, model_name="another")
    put(adapter, memory, keys)
    for again in (False, True):
        if again:
            adapter.close()
            adapter = plugin.open(memory)
        usage = adapter.get_usage()
        assert usage.total_bytes_used == 10 * OBJECT
        assert dict(usage.bytes_by_cache_salt) == {"": 7 * OBJECT, "tenant": 3 * OBJECT}
        assert 0 < usage.usage_fraction < 1
        listed, cursor = [], None
        while True:
            page = adapter.list_l2_keys(None, 4, cursor)
            assert len(page.entries) <= 4
            listed += [(entry.key.to_object_key(), entry.size_bytes) for entry in page.entries]
            cursor = page.next_page_token
            if cursor is None:
                break
        assert sorted(listed, key=repr) == sorted(((key, OBJECT) for key in keys), key=repr)
        only = adapter.list_l2_keys("another", 100)
        assert [entry.key.to_object_key() for entry in only.entries] == keys[-2:]
    with pytest.raises(ValueError):
        adapter.list_l2_keys(None, 0)
    with pytest.raises(ValueError):
        adapter.list_l2_keys(None, 5, "nonsense")
    adapter.close()


def test_listeners_get_keys_of_earlier_and_new_objects(plugin: AdapterKind, memory: Memory) -> None:
    adapter, old, new = plugin.open(memory), keys_of(3), keys_of(2, start=50)
    put(adapter, memory, old)
    adapter.close()
    adapter, listener = plugin.open(memory), Listener()
    adapter.register_listener(listener)
    until = time.monotonic() + 60
    while len(listener.stored) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    assert listener.stored == dict.fromkeys(old, OBJECT)
    put(adapter, memory, new)
    load(adapter, old, memory.objects(3, SHAPE))
    assert listener.accessed == old
    adapter.delete([*old[:1], *keys_of(1, start=99)])
    assert listener.deleted == [*old[:1], *keys_of(1, start=99)], (
        "`delete` must report all its keys, also keys that are not stored"
    )
    adapter.close()
    assert listener.stored == dict.fromkeys([*old, *new], OBJECT)


def test_lmcache_evicts_objects_stored_before_restart(plugin: AdapterKind, memory: Memory) -> None:
    adapter, keys = plugin.open(memory), keys_of(8)
    put(adapter, memory, keys)
    adapter.close()
    adapter = plugin.open(memory)
    assert adapter.supports_global_eviction
    config = EvictionConfig("LRU", trigger_watermark=0.0001, eviction_ratio=0.5)
    state = L2AdapterEvictionState(0, adapter, config)
    controller = L2EvictionController([state])
    until = time.monotonic() + 60
    while adapter.get_usage().total_bytes_used == 8 * OBJECT and time.monotonic() < until:
        controller._check_and_evict(state)
        time.sleep(0.1)
    left = lookup(adapter, keys)
    assert 0 < sum(left) < 8
    assert adapter.get_usage().total_bytes_used == sum(left) * OBJECT
    adapter.close()


def test_deleted_objects_are_misses(adapter_kind: AdapterKind, memory: Memory) -> None:
    adapter, keys = adapter_kind.open(memory), keys_of(6)
    put(adapter, memory, keys)
    adapter.delete(keys[1:3])
    assert lookup(adapter, keys) == [True, False, False, True, True, True]
    assert adapter.get_usage().total_bytes_used == 4 * OBJECT
    adapter.close()


def test_locked_objects_are_not_evicted(plugin: AdapterKind) -> None:
    memory = Memory(128 * MIB)
    # The store is small enough that the test fills it several times.
    with rt.Store.open(plugin.path, "64MiB", segment_bytes=8 << 20):
        pass
    adapter = plugin.open(memory, params={"capacity": "64MiB"})
    keys = keys_of(4)
    put(adapter, memory, keys)
    assert lookup(adapter, keys) == [True] * 4
    buffer, big = memory.objects(2, (1, 1, 1024, 1024)), 2 * MIB
    for start in range(100, 200, 2):
        store(adapter, keys_of(2, start=start), buffer)
    assert adapter.report_status()["locked_objects"] == 4
    out = memory.objects(4, SHAPE)
    assert load(adapter, keys, out) == [True] * 4
    assert all(has_right_bytes(obj, key) for obj, key in zip(out, keys, strict=True))
    adapter.submit_unlock(keys)
    assert adapter.report_status()["locked_objects"] == 0
    assert 10 * big < adapter.get_usage().total_bytes_used < 64 * MIB
    adapter.close()


def test_dropped_unlock_releases_leases(
    plugin: AdapterKind, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, keys = plugin.open(memory), keys_of(4)

    def leases() -> int:
        stats: dict[str, int] = adapter._objects.store.call("stats", lambda it: it.stats(), {})
        return stats["leases"]

    put(adapter, memory, keys)
    assert lookup(adapter, keys) == [True] * 4
    assert leases() == 1
    # `LookupExecutor.submit` calls `query(True)` for a query that is dropped, for example because
    # the executor is closed.
    monkeypatch.setattr(adapter._lookups, "submit", lambda query: query(True))
    adapter.submit_unlock(keys)
    assert leases() == 0
    adapter.close()


def test_unopenable_store_serves_nothing(plugin: AdapterKind, memory: Memory) -> None:
    plugin.path.write_text("a file, not a directory")
    adapter, keys = plugin.open(memory), keys_of(2)
    assert not put(adapter, memory, keys).is_successful()
    assert lookup(adapter, keys) == [False] * 2
    assert load(adapter, keys, memory.objects(2, SHAPE)) == [False] * 2
    adapter.submit_unlock(keys)
    adapter.delete(keys)
    status = adapter.report_status()
    assert not status["is_healthy"] and "open" in status["problem"]
    assert adapter.list_l2_keys().entries == ()
    assert adapter.get_usage().total_bytes_used == 0
    adapter.close()
    adapter.close()


def test_reopened_store_is_healthy(plugin: AdapterKind, memory: Memory) -> None:
    first, keys = plugin.open(memory), keys_of(2)
    assert put(first, memory, keys).is_successful()
    first.close()
    elsewhere = plugin.path.with_name("elsewhere")
    plugin.path.rename(elsewhere)
    plugin.path.write_text("a file, not a directory")
    adapter, listener = plugin.open(memory), Listener()
    adapter.register_listener(listener)
    assert not adapter.report_status()["is_healthy"]
    assert adapter.get_usage().total_capacity_bytes == 0
    plugin.path.unlink()
    elsewhere.rename(plugin.path)
    until = time.monotonic() + 60
    while not adapter.report_status()["is_healthy"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert lookup(adapter, keys) == [True] * 2
    while not listener.stored:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert set(listener.stored) == set(keys)
    assert adapter.get_usage().total_capacity_bytes > 0
    adapter.close()


def test_objects_outside_l1_memory_are_served(plugin: AdapterKind, memory: Memory) -> None:
    adapter, keys, elsewhere = plugin.open(memory), keys_of(2), Memory(MIB)
    assert put(adapter, elsewhere, keys).is_successful()
    out = elsewhere.objects(2, SHAPE)
    assert load(adapter, keys, out) == [True] * 2
    assert all(has_right_bytes(obj, key) for obj, key in zip(out, keys, strict=True))
    adapter.close()


def test_constructor_refuses_invalid_settings(adapter_kind: AdapterKind) -> None:
    with pytest.raises(ValueError, match="unknown key 'size'"):
        adapter_kind.open(params={"size": 1})


def test_dropped_objects_live_until_their_store_task_ends(
    plugin: AdapterKind, memory: Memory
) -> None:
    adapter, keys = plugin.open(memory), keys_of(6)
    objects = memory.objects(6, SHAPE)
    fill(objects, keys)
    references = [weakref.ref(obj) for obj in objects]
    number = adapter.submit_store_task(keys, objects)
    del objects
    gc.collect()
    assert all(reference() is not None for reference in references)
    until, done = time.monotonic() + 60, {}
    while number not in done:
        assert time.monotonic() < until
        select.select([adapter.get_store_event_fd()], [], [], 1)
        done |= adapter.pop_completed_store_tasks()
    assert done[number].is_successful()
    gc.collect()
    assert not any(reference() is not None for reference in references)
    adapter.close()
