"""The storage begins to read the next batch of a prefetch before SGLang has the current batch: on
SGLang's real controllers, operations and host pools.
"""

from contextlib import nullcontext
from queue import Queue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Attach
from hosts import controller, fill, hashes, mha, mla, page_bytes, slots
from sglang.srt.managers import cache_controller
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
)
from sglang.version import __version__

from ritornello.sglang.pools import PoolRead
from ritornello.sglang.transfers import READ_IN, transfer_obstacle

BATCH, PAGES, WAIT = 2, 5, 60.0
# Positions in a host pool: a put stores the pages at `FROM`, and a prefetch loads them to `TO`.
FROM, TO = [3, 1, 4, 2, 0], [5, 11, 6, 8, 7]
Events = list[tuple[str, str, int]]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", BATCH)


def queued(host: Any, keys: list[str], *sides: PoolTransfer) -> PrefetchOperation:
    """Returns a prefetch of SGLang in the state before its transfer: its keys were found in the
    storage, and its memory, the positions `TO`, was allocated.
    """
    handle = SimpleNamespace(rid="test")
    operation = PrefetchOperation(handle, [], pool_transfers=[*sides] or None)
    operation.hash_value, operation.host_indices = keys, slots(host, TO)
    return operation


def run(host: Any, storage: Any, operation: PrefetchOperation, v1: bool = True) -> list[int]:
    """Runs an operation on SGLang's thread for prefetches. Returns the numbers of completed tokens
    that the thread reported before the end of the operation. `v1`: pages are read by the function
    that passes SGLang's host memory to the storage, not by the function that copies each page.
    """
    control = controller(host, storage)
    control.__class__ = HybridCacheController
    control.mem_pool_host = SimpleNamespace(layout_lease=nullcontext)
    control.page_get_func = control._page_get_zero_copy if v1 else control._generic_page_get
    control.prefetch_buffer, control.prefetch_sync_queue = Queue(), Queue()
    control.storage_stop_event = Event()
    thread = Thread(target=control.prefetch_io_aux_func)
    thread.start()
    try:
        control.prefetch_buffer.put(operation)
        completed = []
        while not (report := control.prefetch_sync_queue.get(timeout=WAIT)).completed_req:
            if report.completed_tokens is not None:
                completed.append(report.completed_tokens)
    finally:
        control.storage_stop_event.set()
        control.prefetch_buffer.put(None)
        thread.join(WAIT)
    return completed


def recorded(storage: Any, monkeypatch: pytest.MonkeyPatch) -> Events:
    """Returns a list to which the beginning and the end of each read of a pool are appended: the
    verb (`begin`, `finish` or `abandon`), the pool's name, and the number of pages of the read.
    """
    events: Events = []
    for pool in storage._pools.values():
        for name in ("begin_get", "begin_get_flat", "finish_get", "abandon_get"):
            method = getattr(pool, name)

            def noted(
                read: Any,
                *given: Any,
                name: str = name,
                method: Any = method,
                pool: Any = pool,
                **named: Any,
            ) -> Any:
                keys = read.keys if isinstance(read, PoolRead) else read
                events.append((name.partition("_")[0], pool.name, len(keys)))
                return method(read, *given, **named)

            monkeypatch.setattr(pool, name, noted)
    return events


def contents(host: Any, pages: list[int]) -> list[bytes]:
    return [page_bytes(host, page) for page in pages]


def test_page_transfer_of_sglang_is_wrapped(attach: Attach) -> None:
    attach(mha("page_first"))
    assert __version__ in READ_IN
    assert transfer_obstacle(HiCacheController, __version__) == ""
    assert hasattr(HiCacheController._page_transfer, "__wrapped__")


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("v1", [True, False], ids=["zero_copy", "generic"])
def test_next_batch_begins_before_batch_ends(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, layout: str, v1: bool
) -> None:
    host = mha(layout)
    fill(host, 1)
    keys, expected = hashes(layout), contents(host, FROM)
    storage = attach(host, v1=v1)
    control = controller(host, storage)
    put = control._page_set_zero_copy if v1 else control._generic_page_set
    assert put(keys, slots(host, FROM))
    fill(host, 2)
    others = [page for page in range(host.page_num) if page not in TO]
    kept = contents(host, others)
    events = recorded(storage, monkeypatch)
    assert run(host, storage, queued(host, keys), v1) == [2 * 16, 4 * 16, 5 * 16]
    assert contents(host, TO) == expected
    assert contents(host, others) == kept
    order = [("begin", 2), ("begin", 2), ("finish", 2), ("begin", 1), ("finish", 2), ("finish", 1)]
    assert [(event, pages) for event, _, pages in events] == order


def test_split_heads_are_read_ahead(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    host = mha("page_head", heads=2)
    fill(host, 1)
    keys, expected = hashes("split"), contents(host, FROM)
    storage = attach(host, tp_lcm_size=2, should_split_heads=True)
    assert all(storage.batch_set_v1(keys, slots(host, FROM)))
    fill(host, 2)
    events = recorded(storage, monkeypatch)
    assert run(host, storage, queued(host, keys)) == [2 * 16, 4 * 16, 5 * 16]
    assert contents(host, TO) == expected
    assert [event for event, *_ in events[:3]] == ["begin", "begin", "finish"]


def test_pool_with_positions_of_main_pool_is_read_ahead(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, indexer = mha("page_first"), mla("page_first", layers=1)
    fill(host, 1)
    fill(indexer, 2)
    keys = hashes("derived")
    storage = attach(host, ("indexer", indexer))
    assert all(storage.batch_set_v1(keys, slots(host, FROM)))
    stored = PoolTransfer(name=PoolName.INDEXER, keys=keys, host_indices=slots(indexer, FROM))
    assert all(storage.batch_set_v2([stored])[PoolName.INDEXER])
    expected = contents(host, FROM), contents(indexer, FROM)
    fill(host, 3)
    fill(indexer, 4)
    events = recorded(storage, monkeypatch)
    side = PoolTransfer(name=PoolName.INDEXER, indices_from_pool=PoolName.KV)
    assert run(host, storage, queued(host, keys, side)) == [2 * 16, 4 * 16, 5 * 16]
    assert (contents(host, TO), contents(indexer, TO)) == expected
    for pool in ("kv", "indexer"):
        order = [event for event, name, _ in events if name == pool]
        assert order == ["begin", "begin", "finish", "begin", "finish", "finish"]


def test_terminated_operation_abandons_read_of_next_batch(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = mha("page_first")
    fill(host, 1)
    keys, expected = hashes("terminated"), contents(host, FROM[:BATCH])
    storage = attach(host)
    assert all(storage.batch_set_v1(keys, slots(host, FROM)))
    fill(host, 2)
    events, operation = recorded(storage, monkeypatch), queued(host, keys)
    pool = storage._pools["kv"]
    finish = pool.finish_get

    def finish_get(*given: Any) -> Any:
        filled = finish(*given)
        operation.mark_terminate()
        return filled

    monkeypatch.setattr(pool, "finish_get", finish_get)
    assert run(host, storage, operation) == [BATCH * 16] * 3
    assert contents(host, TO[:BATCH]) == expected
    assert [event for event, *_ in events] == ["begin", "begin", "finish", "abandon"]


def test_missing_page_ends_transfer(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    host = mha("page_first")
    keys = hashes("short")
    storage = attach(host)
    assert all(storage.batch_set_v1(keys[:3], slots(host, FROM[:3])))
    events = recorded(storage, monkeypatch)
    assert run(host, storage, queued(host, keys)) == [2 * 16, 3 * 16, 3 * 16]
    assert events[-1] == ("abandon", "kv", 1)
    assert storage.counts()["loaded_pages"] == 3
