"""Adapters, made by LMCache's factory, that keep objects in a disk tier and a remote."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import LAYOUT, manager_of
from harness import AdapterKind, Memory, fill, has_right_bytes, keys_of, load, lookup, store
from held_remote import Held
from lmcache.v1.distributed.api import MemoryLayoutDesc
from support import wait_until

import ritornello as rt
from ritornello.lmcache.adapter import _format_of

SHAPE = (2, 4, 64, 64)
HINT = {0: MemoryLayoutDesc([torch.Size(SHAPE)], [torch.bfloat16])}


def machine(path: Path, name: str, memory: Memory, remote: str) -> Any:
    """Returns the adapter of the machine `name`: a disk tier at `path`/`name`, and `remote`."""
    tiers = [f"disk {path}/{name} 256MiB", remote]
    params = {"tiers": tiers, "prefetch": "wait_complete"}
    return AdapterKind("plugin", path / name).open(memory, params=params)


def put(adapter: Any, memory: Memory, keys: list[Any]) -> None:
    objects = memory.objects(len(keys), SHAPE)
    fill(objects, keys)
    assert store(adapter, keys, objects).is_successful()


def flush(adapter: Any) -> None:
    """Waits until the remote has the stored objects."""
    adapter._objects.store.call("flush", lambda cache: cache.flush(), None)


def assert_served(adapter: Any, memory: Memory, keys: list[Any]) -> None:
    assert lookup(adapter, keys, HINT) == [True] * len(keys)
    assert adapter.report_status()["locked_objects"] == len(keys)
    out = memory.objects(len(keys), SHAPE)
    assert load(adapter, keys, out) == [True] * len(keys)
    assert all(has_right_bytes(obj, key) for obj, key in zip(out, keys, strict=True))
    adapter.submit_unlock(keys)
    assert adapter.report_status()["locked_objects"] == 0


def test_machines_serve_what_the_other_stored(tmp_path: Path, memory: Memory) -> None:
    (tmp_path / "far").mkdir()
    one, two = (machine(tmp_path, name, memory, f"file://{tmp_path}/far") for name in ("1", "2"))
    # The same six chunks of a prompt, with two values of `kv_rank`.
    first = keys_of(6) + keys_of(6, kv_rank=0x02010201)
    second = keys_of(4, start=50)
    put(one, memory, first)
    put(two, memory, second)
    flush(one)
    flush(two)
    assert_served(two, memory, first)
    assert_served(one, memory, second)
    assert lookup(two, keys_of(3, start=90), HINT) == [False] * 3
    counts = two.report_status()["counts"]
    assert counts["prefetches:completed"] > 0 and "errors" not in counts
    one.close()
    two.close()


def test_remote_that_is_down_costs_hits_only(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    # No server listens on this port.
    nowhere = "s3://bucket?endpoint=http://127.0.0.1:9&region=us-east-1"
    adapter = machine(tmp_path, "1", memory, nowhere)
    keys = keys_of(4)
    assert lookup(adapter, keys, HINT) == [False] * 4
    put(adapter, memory, keys)
    assert_served(adapter, memory, keys)
    adapter.close()


def test_close_ends_pending_lookups(tmp_path: Path, memory: Memory) -> None:
    (tmp_path / "far").mkdir()
    adapter = machine(tmp_path, "1", memory, f"file://{tmp_path}/far")
    calls: list[bool] = []
    # The query is pending until it is dropped, like a lookup in a remote that does not answer.
    adapter._lookups.submit(lambda expired: calls.append(expired) or not expired)
    started = time.monotonic()
    adapter.close()
    assert calls[-1] and time.monotonic() - started < 30


def test_results_of_aborted_lookups_are_dropped(tmp_path: Path, memory: Memory) -> None:
    """LMCache does not ask for the results of lookups whose request it aborted."""
    adapter = AdapterKind("plugin", tmp_path / "kv").open(memory)
    aborted = adapter.submit_lookup_and_lock_task(keys_of(1), {})
    result, _ = adapter._lookup_results[aborted]
    adapter._lookup_results[aborted] = (result, time.monotonic() - 1)
    lookup(adapter, keys_of(1))
    assert adapter.query_lookup_and_lock_result(aborted) is None
    adapter.close()


def test_pending_lookup_of_aborted_request_leaves_no_lease(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache aborts a request while its lookup waits for the remote, and never asks for the result
    of the lookup. The lookup still ends, and its leases expire.
    """
    monkeypatch.setattr("ritornello.lmcache.adapter.LEASE_SECONDS", 1.0)
    keys = keys_of(4)
    writer = machine(tmp_path, "1", memory, "held_remote:Held")
    put(writer, memory, keys)
    flush(writer)
    adapter = machine(tmp_path, "2", memory, "held_remote:Held")
    Held.asked = 0
    Held.released.clear()
    try:
        aborted = adapter.submit_lookup_and_lock_task(keys, HINT)
        wait_until(lambda: Held.asked)
        assert adapter.report_status()["locked_objects"] == 0
    finally:
        Held.released.set()
    # The lookup ends, and locks the objects that it found, although LMCache does not ask for its
    # result.
    wait_until(lambda: aborted in adapter._lookup_results)
    assert [leased.keys for (leased,) in adapter._locks._leases.values()]
    wait_until(lambda: adapter.report_status()["locked_objects"] == 0)
    stats = adapter._objects.store.call("stats", lambda cache: cache.stats(), {})
    assert stats["prefetch"]["running"] == 0
    with rt.Store.open(tmp_path / "2") as disk:
        wait_until(lambda: disk.stats()["leases"] == 0)
    # After the leases have ended, the next lookup drops the aborted lookup's result.
    assert lookup(adapter, keys, HINT) == [True] * len(keys)
    assert adapter.query_lookup_and_lock_result(aborted) is None
    adapter.close()
    writer.close()


def test_lookup_knows_the_format_of_lmcache_objects(tmp_path: Path) -> None:
    """A machine that has stored nothing derives the format for a lookup from LMCache's layout. This
    must be the format of the objects that LMCache allocates for the layout.
    """
    spec = AdapterKind("plugin", tmp_path / "kv").spec()
    manager = manager_of(spec)
    ((_, adapter),) = manager.l2_adapters()
    ((key, obj),) = manager.reserve_write(keys_of(1), LAYOUT).items()
    assert adapter._item(key, obj).format == _format_of(tuple(LAYOUT.shapes), tuple(LAYOUT.dtypes))
    manager.finish_write([key])
    manager.close()
