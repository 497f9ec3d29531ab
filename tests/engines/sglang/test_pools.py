"""Pages of SGLang's real host pools (its KV buffers in host memory) come back from the store bit
for bit, through functions of SGLang's cache controller.
"""

import logging
from threading import Event
from typing import Any

import pytest
import torch
from conftest import Attach
from hosts import (
    PAGE,
    buffers,
    controller,
    fill,
    hashes,
    mamba,
    mha,
    mla,
    operation,
    page_bytes,
    slots,
)
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from ritornello.sglang.updates import updates as known

MHA = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA = ("layer_first", "page_first", "page_first_direct")
# Positions in a host pool: a put stores the pages at `FROM`, and a get loads them to `TO`.
FROM, TO = [3, 1, 4, 2, 0], [5, 11, 6, 8, 7]


def contents(host: Any, pages: list[int]) -> list[bytes]:
    return [page_bytes(host, page) for page in pages]


@pytest.mark.parametrize("make", [*((mha, name) for name in MHA), *((mla, name) for name in MLA)])
@pytest.mark.parametrize("v1", [True, False], ids=["zero_copy", "generic"])
def test_pages_are_returned_unchanged(attach: Attach, make: Any, v1: bool) -> None:
    kind, layout = make
    host = kind(layout)
    fill(host, 1)
    storage = attach(host, v1=v1, is_mla_model=kind is mla)
    control = controller(host, storage)
    put = control._page_set_zero_copy if v1 else control._generic_page_set
    get = control._page_get_zero_copy if v1 else control._generic_page_get
    keys, expected = hashes("come back"), contents(host, FROM)
    assert storage.batch_exists(keys) == 0
    assert put(keys, slots(host, FROM), HiCacheStorageExtraInfo())
    assert storage.batch_exists([*keys, *hashes("other")]) == len(keys)
    fill(host, 2)
    kept = [page for page in range(host.page_num) if page not in TO]
    before = contents(host, kept)
    assert get(operation(), keys, slots(host, TO)) == len(keys)
    assert contents(host, TO) == expected
    assert contents(host, kept) == before


@pytest.mark.parametrize("layout", MHA[1:])
def test_generic_get_reads_pages_of_zero_copy_put(attach: Attach, layout: str) -> None:
    host = mha(layout)
    fill(host, 1)
    keys, expected = hashes("both"), contents(host, FROM)
    storage = attach(host)
    assert controller(host, storage)._page_set_zero_copy(keys, slots(host, FROM))
    storage.close()
    storage = attach(host, v1=False)
    fill(host, 2)
    control = controller(host, storage)
    assert control._generic_page_get(operation(), keys, slots(host, TO)) == len(keys)
    assert contents(host, TO) == expected


def test_layer_first_zero_copy_and_generic_pages_have_separate_scopes(attach: Attach) -> None:
    host = mha("layer_first")
    keys = hashes("orders")
    assert controller(host, attach(host))._page_set_zero_copy(keys, slots(host, FROM))
    assert attach(host, v1=False).batch_exists(keys) == 0


def test_second_backend_reads_stored_pages(attach: Attach) -> None:
    host, other = mha("page_first"), mha("page_first", pages=40)
    fill(host, 3)
    keys = hashes("restart")
    first = attach(host)
    assert all(first.batch_set_v1(keys, slots(host, FROM)))
    first.close()
    assert first.batch_exists(keys) == 0
    assert first.batch_set_v1(keys, slots(host, FROM)) == [False] * len(keys)
    assert all(attach(other).batch_get_v1(keys, slots(other, [30, 31, 32, 33, 34])))
    assert contents(other, [30, 31, 32, 33, 34]) == contents(host, FROM)


@pytest.mark.parametrize(
    "other",
    [
        {"layout": "page_first"},
        {"page": 2 * PAGE},
        {"heads": 1},
        {"head_dim": 32},
        {"layers": (4, 8)},
        {"layers": (0, 3)},
        {"dtype": torch.float16},
    ],
)
def test_other_shape_misses(attach: Attach, other: dict[str, Any]) -> None:
    host, different = mha("page_first_direct"), mha(**{"layout": "page_first_direct", **other})
    keys = hashes("shape")
    assert all(attach(host).batch_set_v1(keys, slots(host, FROM)))
    storage = attach(different)
    before = contents(different, TO)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, slots(different, TO)) == [False] * len(keys)
    assert contents(different, TO) == before


def test_same_heads_hit_other_heads_miss(attach: Attach) -> None:
    whole, half = mha("page_first", heads=2), mha("page_first", heads=1)
    keys = hashes("degree")
    fill(half, 4)
    first = attach(half, tp_size=2, tp_rank=0)
    assert all(first.batch_set_v1(keys, slots(half, FROM)))
    assert attach(whole).batch_exists(keys) == 0
    assert attach(half, tp_size=2, tp_rank=1).batch_exists(keys) == 0
    # Four ranks of a model with two heads hold each head twice.
    assert attach(half, tp_size=4, tp_rank=1).batch_exists(keys) == len(keys)
    assert attach(half, tp_size=4, tp_rank=2).batch_exists(keys) == 0


def test_split_heads_are_read_by_more_ranks(attach: Attach) -> None:
    whole, half = mha("page_head", heads=2), mha("page_head", heads=1)
    fill(whole, 5)
    keys = hashes("split")
    one = attach(whole, tp_lcm_size=2, should_split_heads=True)
    assert all(one.batch_set_v1(keys, slots(whole, FROM)))
    assert one.batch_exists(keys) == len(keys)
    expected = contents(whole, FROM)
    fill(whole, 6)
    assert all(one.batch_get_v1(keys, slots(whole, TO)))
    assert contents(whole, TO) == expected
    for rank in range(2):
        two = attach(half, tp_size=2, tp_rank=rank, tp_lcm_size=2)
        assert all(two.batch_get_v1(keys, slots(half, TO)))
        theirs, ours = half.kv_buffer[:, TO, 0], whole.kv_buffer[:, TO, rank]
        assert torch.equal(theirs.view(torch.int16), ours.view(torch.int16))


def test_page_with_missing_heads_is_miss(attach: Attach) -> None:
    whole, half = mha("page_head", heads=2), mha("page_head", heads=1)
    keys = hashes("half there")
    two = attach(half, tp_size=2, tp_rank=1, tp_lcm_size=2)
    assert all(two.batch_set_v1(keys, slots(half, FROM)))
    one = attach(whole, tp_lcm_size=2, should_split_heads=True)
    assert one.batch_exists(keys) == 0
    assert one.batch_get_v1(keys, slots(whole, TO)) == [False] * len(keys)


def test_mla_is_written_once_read_by_all(attach: Attach) -> None:
    host = mla("page_first")
    fill(host, 7)
    keys, expected = hashes("mla"), contents(host, FROM)
    writer = attach(host, is_mla_model=True, tp_size=2, tp_rank=0)
    other = attach(host, is_mla_model=True, tp_size=2, tp_rank=1)
    assert all(other.batch_set_v1(keys, slots(host, TO)))
    assert writer.batch_exists(keys) == 0, "only one rank may write"
    assert all(writer.batch_set_v1(keys, slots(host, FROM)))
    assert other.batch_exists(keys) == len(keys)
    assert all(other.batch_get_v1(keys, slots(host, TO)))
    assert contents(host, TO) == expected
    one = attach(host, is_mla_model=True)
    assert one.batch_exists(keys) == len(keys)


def test_page_of_different_size_is_refused(attach: Attach) -> None:
    host, smaller = mha("page_first"), mha("page_first", layers=(0, 3))
    storage = attach(host, v1=False)
    key = hashes("size")[0]
    assert not storage.set(key, smaller.get_data_page(0).contiguous())
    assert storage.set(key, host.get_data_page(0))
    target = smaller.get_dummy_flat_data_page().fill_(1)
    assert storage.get(key, target) is None
    assert bool((target == 1).all())
    page = storage.get(key)
    assert page is not None and torch.equal(page, host.get_data_page(0).flatten())
    assert storage.exists(key) and storage.get(hashes("absent")[0]) is None


def test_partial_pages_are_refused(attach: Attach) -> None:
    host = mha("page_first")
    storage = attach(host)
    keys = hashes("slots")
    good = slots(host, FROM)
    for bad in (good[:-1], good[:-PAGE], good + 1):
        assert storage.batch_set_v1(keys, bad) == [False] * len(keys)
        assert storage.batch_get_v1(keys, bad) == [False] * len(keys)
    assert storage.counts()["refused_pages:indices"] == 6 * len(keys)


@pytest.mark.parametrize("known", [True, False], ids=["prefix_keys", "no_prefix_keys"])
def test_sequence_stored_in_parts_is_found_whole(attach: Attach, known: bool) -> None:
    host = mha("page_first", pages=12)
    storage = attach(host)
    keys = hashes("pieces", 12)
    for at in range(0, 12, 4):
        before = HiCacheStorageExtraInfo(prefix_keys=keys[:at] if known else None)
        pages = slots(host, list(range(at, at + 4)))
        assert all(storage.batch_set_v1(keys[at : at + 4], pages, before))
    assert storage.batch_exists(keys) == 12
    # SGLang looks up only the pages after the pages that it has in memory.
    assert storage.batch_exists(keys[6:]) == 6


def test_clear_deletes_only_pages_of_own_layout(attach: Attach) -> None:
    host, other = mha("page_first"), mha("page_head")
    first, second = attach(host), attach(other)
    keys = hashes("clear")
    assert all(first.batch_set_v1(keys, slots(host, FROM)))
    assert all(second.batch_set_v1(keys, slots(other, FROM)))
    first.clear()
    assert first.batch_exists(keys) == 0
    assert second.batch_exists(keys) == len(keys)
    assert all(first.batch_set_v1(keys, slots(host, FROM)))
    assert first.batch_exists(keys) == len(keys)


# Pages with parts in several host pools: the main pool, and side pools.


def states(name: Any, pages: list[str], host: Any, at: list[int]) -> PoolTransfer:
    return PoolTransfer(
        name=name,
        keys=pages,
        host_indices=slots(host, at),
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )


def test_prefix_is_restorable_only_where_state_is_stored(attach: Attach) -> None:
    host, state = mha("page_first"), mamba()
    fill(host, 8)
    fill(state, 9)
    storage = attach(host, ("mamba", state))
    keys = hashes("states", 8)
    expected = contents(state, [4, 7])
    assert all(storage.batch_set_v1(keys, slots(host, list(range(8)))))
    stored = storage.batch_set_v2([states(PoolName.MAMBA, [keys[2], keys[5]], state, [4, 7])])
    assert stored == {PoolName.MAMBA: [True, True]}
    asked = [PoolTransfer(name=PoolName.MAMBA, keys=["?"], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    found = storage.batch_exists_v2(keys, asked)
    assert found.kv_hit_pages == 6
    assert found.restorable_prefix_pages == [3, 6]
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.MAMBA: 6}
    fill(state, 10)
    got = storage.batch_get_v2([states(PoolName.MAMBA, [keys[2], keys[5]], state, [1, 2])])
    assert got == {PoolName.MAMBA: [True, True]}
    assert contents(state, [1, 2]) == expected


def test_window_must_be_complete_at_prefix_end(attach: Attach) -> None:
    host, window = mha("page_first"), mha("page_first", layers=(0, 2))
    storage = attach(host, ("swa", window))
    keys = hashes("window", 8)
    assert all(storage.batch_set_v1(keys, slots(host, list(range(8)))))
    there = [1, 2, 3, 6]
    storage.batch_set_v2([states(PoolName.SWA, [keys[i] for i in there], window, there)])
    asked = PoolTransfer(
        name=PoolName.SWA, keys=["?", "?"], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    found = storage.batch_exists_v2(keys, [asked])
    assert found.restorable_prefix_pages == [3, 4]
    assert found.kv_hit_pages == 4


def test_missing_page_in_indexer_pool_bounds_hit(attach: Attach) -> None:
    host, indexer = mla("page_first"), mla("page_first", layers=1)
    storage = attach(host, ("indexer", indexer), is_mla_model=True)
    keys = hashes("indexer", 6)
    pages = slots(host, list(range(6)))
    assert all(storage.batch_set_v1(keys, pages))
    transfer = PoolTransfer(name=PoolName.INDEXER, keys=keys[:4], host_indices=pages[: 4 * PAGE])
    assert storage.batch_set_v2([transfer]) == {PoolName.INDEXER: [True] * 4}
    found = storage.batch_exists_v2(keys, [PoolTransfer(name=PoolName.INDEXER)])
    assert found.kv_hit_pages == 4
    assert found.restorable_prefix_pages == [1, 2, 3, 4]


def test_block_group_pool_limits_no_hit_and_unknown_pool_misses(attach: Attach) -> None:
    host = mha("page_first")
    storage = attach(host)
    keys = hashes("groups")
    assert all(storage.batch_set_v1(keys, slots(host, FROM)))
    groups = PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    assert storage.batch_exists_v2(keys, [groups]).kv_hit_pages == len(keys)
    never = PoolTransfer(name=PoolName.DRAFT, keys=keys, host_indices=slots(host, FROM))
    assert storage.batch_exists_v2(keys, [never]).kv_hit_pages == 0
    assert storage.batch_set_v2([never]) == {PoolName.DRAFT: [False] * len(keys)}
    assert storage.batch_get_v2([never]) == {PoolName.DRAFT: [False] * len(keys)}


# Failures.


def test_errors_are_contained_and_logged_once_per_operation(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = mha("page_first")
    storage = attach(host)
    keys = hashes("errors")

    def broken(*_: Any) -> Any:
        raise RuntimeError("made by the test")

    for name in ("page_ids", "leading", "prefixes"):
        monkeypatch.setattr(storage._pools["kv"], name, broken)
    for _ in range(3):
        assert storage.batch_set_v1(keys, slots(host, FROM)) == [False] * len(keys)
        assert storage.batch_get_v1(keys, slots(host, TO)) == [False] * len(keys)
        assert storage.batch_exists(keys) == 0
        assert storage.batch_exists_v2(keys).kv_hit_pages == 0
    assert storage.counts()["errors"] == 12
    said = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([r for r in said if "made by the test" in r.getMessage()]) == 3


def test_unservable_pool_always_misses(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    host = mha("page_first")
    storage = attach(host, ("draft", object()))
    keys = hashes("odd pool")
    assert all(storage.batch_set_v1(keys, slots(host, FROM)))
    assert storage.batch_exists(keys) == len(keys)
    draft = PoolTransfer(name=PoolName.DRAFT)
    assert storage.batch_exists_v2(keys, [draft]).kv_hit_pages == 0
    assert len([r for r in caplog.records if "pool draft failed" in r.getMessage()]) == 1


def test_unopenable_store_costs_hits_only(attach: Attach, store_path: Any) -> None:
    store_path.parent.joinpath("file").write_text("not a directory")
    host = mha("page_first")
    storage = attach(host, path=str(store_path.parent / "file"))
    assert storage.batch_set_v1(hashes("x"), slots(host, FROM)) == [False] * len(FROM)
    assert storage.batch_exists(hashes("x")) == 0
    assert storage.counts() == {"errors": 1, "probed_pages": len(FROM)}


def test_stats_have_sglang_type(attach: Attach) -> None:
    host = mha("page_first")
    storage = attach(host)
    keys = hashes("stats")
    storage.batch_set_v1(keys, slots(host, FROM))
    storage.batch_get_v1(keys, slots(host, TO))
    stats = storage.get_stats()
    assert stats is not None
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([5], [5])
    assert len(stats.prefetch_bandwidth) == len(stats.backup_bandwidth) == 1
    assert storage.get_stats().prefetch_pgs == []
    assert attach(host, enable_storage_metrics=False).get_stats() is None


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The record of this process's weight updates: emptied for the test, and restored after it."""
    for name in ("epoch", "flushed"):
        monkeypatch.setattr(known, name, b"")
    return known


def flush(held: Any, host: Any) -> None:
    """Resets a cache controller of SGLang that has the storage `held`, as a flush of the cache
    does.
    """
    made = controller(host, held)
    made.storage_stop_event, made.enable_storage = Event(), False
    for name in ("write_queue", "load_queue", "ack_write_queue", "ack_load_queue"):
        setattr(made, name, [])
    made.reset()


def test_update_of_weights_hides_and_refuses_earlier_pages(attach: Attach, updates: Any) -> None:
    host = mha("page_first")
    held = attach(host)
    keys, later = hashes("weights"), hashes("later")
    assert all(held.batch_set_v1(keys, slots(host, FROM)))
    with pytest.raises(AttributeError):
        # SGLang's method fails, because the object has no attributes. Our wrapper of the method has
        # then recorded the beginning of an update.
        WeightUpdater.update_weights_from_tensor(object(), [])
    assert held.batch_exists(keys) == 0
    assert held.batch_get_v1(keys, slots(host, TO)) == [False] * len(keys)
    # A page that was computed before the flush may have been computed with other weights, so the
    # storage refuses it.
    assert held.batch_set_v1(later, slots(host, FROM)) == [False] * len(later)
    assert held.counts()["skipped_pages:before_reset"] == len(later)
    other = attach(host)
    assert other.batch_exists(keys) == 0
    assert not any(other.batch_set_v1(later, slots(host, FROM)))
    flush(held, host)
    assert held.batch_exists(keys) == held.batch_exists(later) == 0
    assert all(held.batch_set_v1(keys, slots(host, FROM)))
    assert held.batch_exists(keys) == len(keys)
    # A storage that is attached later has the epoch of the update, not the epoch of the model's
    # files.
    assert attach(host).batch_exists(keys) == len(keys)
    updates.epoch = updates.flushed = b""
    assert all(attach(host).batch_get_v1(keys, slots(host, TO)))


def test_closed_backend_touches_no_memory(attach: Attach) -> None:
    host = mha("page_first")
    storage = attach(host)
    keys = hashes("close")
    assert all(storage.batch_set_v1(keys, slots(host, FROM)))
    storage.close()
    storage.close()
    before = [buffer.clone() for buffer in buffers(host)]
    assert storage.batch_get_v1(keys, slots(host, TO)) == [False] * len(keys)
    assert all(torch.equal(a, b) for a, b in zip(before, buffers(host), strict=True))
