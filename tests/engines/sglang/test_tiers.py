"""Storages with tiers, on SGLang's real host pools and classes: two machines share a remote."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Attach
from hosts import controller, fill, hashes, mamba, mha, mla, page_bytes, slots
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.model_runner import ModelRunner

from ritornello.sglang import piece_lookup
from ritornello.sglang.identity import keys_of
from ritornello.sglang.prefills import Prefills, prefills
from ritornello.sglang.prompts import UNKNOWN, prompt_obstacle, prompts

FROM, TO = [3, 1, 4, 2, 0], [5, 11, 6, 8, 7]
WAIT = 60.0

Machine = Callable[..., Any]


@pytest.fixture
def machine(attach: Attach, tmp_path: Path) -> Machine:
    """Returns a function that attaches a host pool to the tiers of the machine `name`: its own
    disk, and a directory that all machines share as their remote. `v1`: see `attach`.
    """
    (tmp_path / "far").mkdir()

    def machine(name: str, host: Any, *sides: Any, gate: str = "always", v1: bool = True) -> Any:
        tiers = [f"disk {tmp_path}/{name} 640MiB", f"file://{tmp_path}/far"]
        said = {"tiers": tiers, "gate": gate, "prefetch": "wait_complete"}
        return attach(host, *sides, v1=v1, tiers=said)

    return machine


def after(*keys: str) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=[*keys])


def found(storage: Any, keys: list[str], extra: HiCacheStorageExtraInfo | None = None) -> int:
    """Looks pages up on a thread that did not attach the storage, as SGLang does."""
    with ThreadPoolExecutor(1) as thread:
        return int(thread.submit(storage.batch_exists, keys, extra).result(WAIT))


def flush(storage: Any) -> None:
    assert storage._store.call("flush", lambda cache: cache.flush() is None, False)


def test_pages_of_other_machine_are_loaded(machine: Machine) -> None:
    host = mha("page_first")
    fill(host, 1)
    keys, expected = hashes("shared"), [page_bytes(host, page) for page in FROM]
    one, two = machine("one", host), machine("two", host)
    assert all(one.batch_set_v1(keys[:2], slots(host, FROM[:2]), after()))
    assert all(one.batch_set_v1(keys[2:], slots(host, FROM[2:]), after(*keys[:2])))
    flush(one)
    fill(host, 2)
    # `after` passes the keys of pages that SGLang has in memory.
    assert found(two, keys[1:], after(keys[0])) == 4
    # If a lookup begins with the prompt's first page, SGLang passes no list of keys before it.
    assert found(two, [*keys, *hashes("other", 2)]) == 5
    assert found(two, keys[3:], after(UNKNOWN)) == 2
    assert controller(host, two)._page_get_zero_copy(None, keys, slots(host, TO)) == 5
    assert [page_bytes(host, page) for page in TO] == expected


def test_pages_whose_predecessors_are_unknown_are_not_shared(machine: Machine) -> None:
    host = mha("page_first")
    keys = hashes("no place")
    one, two = machine("one", host), machine("two", host)
    assert all(one.batch_set_v1(keys, slots(host, FROM), None))
    flush(one)
    assert (found(one, keys), found(two, keys)) == (5, 0)


def test_side_pools_are_not_shared_without_main_pool(machine: Machine, tmp_path: Path) -> None:
    """With `interface_v1` set to 0, SGLang passes no keys of the pages before a put of the main
    pool, so these pages are not written to the remote, and neither are the side pools' pages.
    """
    host, states = mha("page_first"), mamba()
    keys = hashes("copies")
    one = machine("one", host, ("mamba", states), v1=False)
    assert one.batch_set(keys, [host.get_data_page(page * host.page_size) for page in FROM])
    (stored,) = one.batch_set_v2([side(PoolName.MAMBA, keys[-1:], states, FROM[-1:])]).values()
    assert all(stored)
    flush(one)
    assert restorable(one, keys, asked(PoolName.MAMBA, 1)) == [5]
    assert list((tmp_path / "far").rglob("*.1")) == []


def side(name: PoolName, keys: list[str], host: Any, pages: list[int]) -> PoolTransfer:
    return PoolTransfer(
        name=name,
        keys=keys,
        host_indices=slots(host, pages),
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )


def asked(name: PoolName, window: int) -> PoolTransfer:
    """Returns what SGLang passes to a lookup for a side pool: one placeholder for each page of the
    window, because the prefix, and thus the window's keys, are not known yet.
    """
    return PoolTransfer(name=name, keys=["?"] * window, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def restorable(storage: Any, keys: list[str], *sides: PoolTransfer) -> list[int]:
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(storage.batch_exists_v2, keys, [*sides], after()).result(WAIT)
    assert found.kv_hit_pages == max(found.restorable_prefix_pages, default=0)
    return list(found.restorable_prefix_pages)


def test_machines_serve_each_others_side_pools(machine: Machine) -> None:
    host, states, window = mha("page_first"), mamba(), mha("page_first", layers=(0, 2))
    sides = (("mamba", states), ("swa", window))
    machines = [machine(name, host, *sides) for name in ("one", "two")]
    for seed, (storing, loading) in enumerate((machines, machines[::-1])):
        keys = hashes(f"hybrid {seed}")
        for number, pool in enumerate((host, states, window)):
            fill(pool, 10 * seed + number)
        expected = (
            [page_bytes(host, page) for page in FROM[:4]],
            [page_bytes(states, 3)],
            [page_bytes(window, page) for page in (6, 8)],
        )
        assert all(storing.batch_set_v1(keys, slots(host, FROM), after()))
        # The window pool lacks the prompt's last page, so only four pages can be restored.
        stored = [
            side(PoolName.MAMBA, [keys[3], keys[4]], states, [3, 4]),
            side(PoolName.SWA, [keys[2], keys[3]], window, [6, 8]),
        ]
        assert all(map(all, storing.batch_set_v2(stored, after()).values()))
        flush(storing)
        for number, pool in enumerate((host, states, window)):
            fill(pool, 10 * seed + number + 5)
        queried = [asked(PoolName.MAMBA, 1), asked(PoolName.SWA, 2)]
        assert restorable(loading, keys, *queried) == [4]
        pages = slots(host, TO[:4])
        assert controller(host, loading)._page_get_zero_copy(None, keys[:4], pages) == 4
        got = loading.batch_get_v2(
            [
                side(PoolName.MAMBA, keys[3:4], states, [9]),
                side(PoolName.SWA, keys[2:4], window, [1, 2]),
            ]
        )
        assert got == {PoolName.MAMBA: [True], PoolName.SWA: [True, True]}
        assert expected == (
            [page_bytes(host, page) for page in TO[:4]],
            [page_bytes(states, 9)],
            [page_bytes(window, page) for page in (1, 2)],
        )
        assert not loading._store._leased


def test_missing_page_of_other_machine_bounds_prefix(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Raise the time limit after which a lookup looks up no further attention windows, because slow
    # machines would exceed it.
    monkeypatch.setattr(piece_lookup, "WINDOWS_SECONDS", WAIT)
    host, window = mha("page_first"), mha("page_first", layers=(0, 2))
    one, two = (machine(name, host, ("swa", window)) for name in ("one", "two"))
    keys, lone = hashes("gap"), hashes("lone")
    for prompt, places in ((keys, [0, 1, 2, 4]), (lone, [1, 4])):
        assert all(one.batch_set_v1(prompt, slots(host, FROM), after()))
        there = side(PoolName.SWA, [prompt[place] for place in places], window, places)
        assert all(one.batch_set_v2([there], after())[PoolName.SWA])
    flush(one)
    assert restorable(one, keys, asked(PoolName.SWA, 2)) == [1, 2, 3]
    assert restorable(two, keys, asked(PoolName.SWA, 2))[-1:] == [3]
    assert restorable(two, lone, asked(PoolName.SWA, 2)) == []
    assert len(two._store._leased) == 1


def test_indexer_of_other_machine_is_loaded(machine: Machine) -> None:
    host, indexer = mha("page_first"), mla("page_first", layers=1)
    fill(indexer, 3)
    one, two = (machine(name, host, ("indexer", indexer)) for name in ("one", "two"))
    keys, expected = hashes("indexer"), [page_bytes(indexer, page) for page in FROM[:3]]
    assert all(one.batch_set_v1(keys, slots(host, FROM), after()))
    stored = PoolTransfer(
        name=PoolName.INDEXER, keys=keys[:3], host_indices=slots(indexer, FROM[:3])
    )
    assert all(one.batch_set_v2([stored], after())[PoolName.INDEXER])
    flush(one)
    assert restorable(two, keys, PoolTransfer(name=PoolName.INDEXER)) == [1, 2, 3]
    fill(indexer, 4)
    loaded = PoolTransfer(name=PoolName.INDEXER, keys=keys[:3], host_indices=slots(indexer, TO[:3]))
    assert all(two.batch_get_v2([loaded])[PoolName.INDEXER])
    assert [page_bytes(indexer, page) for page in TO[:3]] == expected


def test_queued_operation_with_side_pools_begins_fetch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, states = mha("page_first"), mamba()
    one, two = (machine(name, host, ("mamba", states)) for name in ("one", "two"))
    keys = hashes("queued")
    assert all(one.batch_set_v1(keys, slots(host, FROM), after()))
    flush(one)
    # SGLang's hash function takes a minute to compile.
    monkeypatch.setattr(two._early, "_hashes", lambda operation, tokens: keys)
    queued = SimpleNamespace(
        prefix_keys=[],
        pool_transfers=[asked(PoolName.MAMBA, 1)],
        assume_stored=False,
        is_terminated=lambda: False,
    )
    two.on_prefetch_begin(queued)
    until = time.monotonic() + WAIT
    while two._store.exists(two._pools["kv"].scopes[0], keys_of(keys)) != [True] * 5:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_sglang_has_wrapped_methods(machine: Machine) -> None:
    machine("one", mha("page_first"), gate="auto")
    assert prompts.watched
    assert prefills.record is not None
    assert prompt_obstacle(UnifiedRadixCache, HybridCacheController) == ""
    assert Prefills().watch(type("Runner", (ModelRunner,), {"forward": ModelRunner.forward})) == ""


def test_host_tier_is_refused(attach: Attach, tmp_path: Path) -> None:
    tiers = ["host 1GiB", f"disk {tmp_path}/disk 640MiB"]
    with pytest.raises(ValueError, match="--hicache-size"):
        attach(mha("page_first"), tiers={"tiers": tiers})
