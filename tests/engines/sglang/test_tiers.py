"""Storages with tiers, on SGLang's real host pools and classes: two machines share a remote."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Attach
from hosts import controller, fill, hashes, mamba, mha, page_bytes, slots
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.model_runner import ModelRunner

from ritornello.sglang.prefills import Prefills, prefills
from ritornello.sglang.prompts import UNKNOWN, prompt_obstacle, prompts

FROM, TO = [3, 1, 4, 2, 0], [5, 11, 6, 8, 7]
WAIT = 60.0


@pytest.fixture
def machine(attach: Attach, tmp_path: Path) -> Any:
    """Attaches a pool to the tiers of a machine: a separate disk and the shared directory."""
    (tmp_path / "far").mkdir()

    def machine(name: str, host: Any, *sides: Any, gate: str = "always") -> Any:
        tiers = [f"disk {tmp_path}/{name} 640MiB", f"file://{tmp_path}/far"]
        said = {"tiers": tiers, "gate": gate, "prefetch": "wait_complete"}
        return attach(host, *sides, tiers=said)

    return machine


def after(*keys: str) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=[*keys])


def found(storage: Any, keys: list[str], extra: HiCacheStorageExtraInfo | None = None) -> int:
    """Looks pages up on a thread that did not attach the storage, as SGLang does."""
    with ThreadPoolExecutor(1) as thread:
        return int(thread.submit(storage.batch_exists, keys, extra).result(WAIT))


def flush(storage: Any) -> None:
    assert storage._store.call("flush", lambda cache: cache.flush() is None, False)


def test_pages_of_other_machine_are_loaded(machine: Any) -> None:
    host = mha("page_first")
    fill(host, 1)
    keys, expected = hashes("shared"), [page_bytes(host, page) for page in FROM]
    one, two = machine("one", host), machine("two", host)
    assert all(one.batch_set_v1(keys[:2], slots(host, FROM[:2]), after()))
    assert all(one.batch_set_v1(keys[2:], slots(host, FROM[2:]), after(*keys[:2])))
    flush(one)
    fill(host, 2)
    # SGLang has the first page.
    assert found(two, keys[1:], after(keys[0])) == 4
    # If a lookup begins with the prompt's first page, SGLang passes no list of keys before it.
    assert found(two, [*keys, *hashes("other", 2)]) == 5
    assert found(two, keys[3:], after(UNKNOWN)) == 2
    assert controller(host, two)._page_get_zero_copy(None, keys, slots(host, TO)) == 5
    assert [page_bytes(host, page) for page in TO] == expected


def test_pages_without_place_are_not_shared(machine: Any) -> None:
    host = mha("page_first")
    keys = hashes("no place")
    one, two = machine("one", host), machine("two", host)
    assert all(one.batch_set_v1(keys, slots(host, FROM), None))
    flush(one)
    assert (found(one, keys), found(two, keys)) == (5, 0)


def test_state_of_other_machine_bounds_prefix(machine: Any) -> None:
    host, states = mha("page_first"), mamba()
    fill(host, 1)
    keys = hashes("states")
    state = PoolTransfer(
        name=PoolName.MAMBA,
        keys=keys[3:4],
        host_indices=slots(states, FROM[:1]),
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )
    one = machine("one", host, ("mamba", states))
    assert all(one.batch_set_v1(keys, slots(host, FROM), after()))
    assert one.batch_set_v2([state], after(*keys[:3])) == {PoolName.MAMBA: [True]}
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(one.batch_exists_v2, keys, [state], after()).result(WAIT)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [4])
    assert one.batch_get_v2([state]) == {PoolName.MAMBA: [True]}


def test_sglang_has_wrapped_methods(machine: Any) -> None:
    machine("one", mha("page_first"), gate="auto")
    assert prompts.watched
    assert prefills.record is not None
    assert prompt_obstacle(UnifiedRadixCache, HybridCacheController) == ""
    assert Prefills().watch(type("Runner", (ModelRunner,), {"forward": ModelRunner.forward})) == ""


def test_host_tier_is_refused(attach: Attach, tmp_path: Path) -> None:
    tiers = ["host 1GiB", f"disk {tmp_path}/disk 640MiB"]
    with pytest.raises(ValueError, match="--hicache-size"):
        attach(mha("page_first"), tiers={"tiers": tiers})
