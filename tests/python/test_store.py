"""One process, one store: put pages are found until they are removed, also after reopening."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from support import blank, keys_of, open_small, pages_of

import ritornello as rt
from ritornello.errors import ClosedError, InvalidError

PAGE = 5000
CHAIN = rt.Scope.opaque("chain", PAGE, chained=True)
LOOSE = rt.Scope.opaque("loose", PAGE)
KEYS = keys_of("store", 6)


def put(store: rt.Store, scope: rt.Scope, keys: list[bytes], parent: bytes | None = None) -> int:
    return store.put_batch(scope, keys, pages_of(keys, PAGE), parent=parent)


def check(store: rt.Store, scope: rt.Scope, keys: list[bytes]) -> None:
    out = blank(len(keys), PAGE)
    assert store.get_batch(scope, keys, out) == len(keys)
    assert (out == pages_of(keys, PAGE)).all()


def test_sequence_is_found_to_its_end(store: rt.Store) -> None:
    assert store.probe(CHAIN, KEYS) == 0
    assert put(store, CHAIN, KEYS[:4]) == 4
    assert store.probe(CHAIN, KEYS) == 4
    assert put(store, CHAIN, KEYS) == 6
    assert store.probe(CHAIN, KEYS) == 6
    assert put(store, CHAIN, KEYS[:2]) == 2
    check(store, CHAIN, KEYS)


def test_continuation_is_found_only_with_its_parent(store: rt.Store) -> None:
    put(store, CHAIN, KEYS[:2])
    assert put(store, CHAIN, KEYS[2:], parent=KEYS[1]) == 4
    assert store.probe(CHAIN, KEYS) == 6
    assert store.delete(CHAIN, KEYS[1:2]) == 1
    assert store.probe(CHAIN, KEYS) == 1


def test_unchained_pages_are_independent(store: rt.Store) -> None:
    put(store, LOOSE, KEYS)
    assert store.delete(LOOSE, [KEYS[1], KEYS[4]]) == 2
    assert store.exists(LOOSE, KEYS) == [True, False, True, True, False, True]
    assert store.probe(LOOSE, KEYS) == 1
    assert store.touch(LOOSE, KEYS) == 1
    check(store, LOOSE, [KEYS[5], KEYS[0]])


def test_scopes_are_separate(store: rt.Store) -> None:
    other = rt.Scope.opaque("other tenant", PAGE, chained=True)
    put(store, CHAIN, KEYS)
    assert store.probe(other, KEYS) == 0
    put(store, other, KEYS)
    store.drop_scope(CHAIN)
    assert (store.probe(CHAIN, KEYS), store.probe(other, KEYS)) == (0, 6)
    put(store, CHAIN, KEYS)
    check(store, CHAIN, KEYS)
    store.clear()
    assert (store.probe(CHAIN, KEYS), store.probe(other, KEYS)) == (0, 0)


def test_leased_prefix_is_leased_until_released(store: rt.Store) -> None:
    put(store, CHAIN, KEYS[:4])
    with store.lease_prefix(CHAIN, KEYS, ttl=30) as match:
        assert match.pages == 4
        assert match.lease > 0
        assert store.stats()["leases"] == 1
        check(store, CHAIN, KEYS[:4])
    assert store.stats()["leases"] == 0
    match.release()
    again = store.lease_prefix(CHAIN, KEYS)
    store.release(again.lease)
    store.release(again.lease)
    assert store.stats()["leases"] == 0
    nothing = store.lease_prefix(LOOSE, KEYS)
    assert (nothing.pages, nothing.lease) == (0, 0)
    nothing.release()


def test_leased_prefix_is_present_in_all_scopes(store: rt.Store) -> None:
    other = rt.Scope.opaque("other", CHAIN.page_bytes, chained=True)
    put(store, CHAIN, KEYS)
    assert store.lease_prefix((CHAIN, other), KEYS).lease == 0
    put(store, other, KEYS[:4])
    with store.lease_prefix([CHAIN, other], KEYS) as match:
        assert match.pages == 4
        assert store.stats()["leases"] == 1
    assert store.stats()["leases"] == 0
    assert store.lease_prefix([], KEYS).pages == 0
    wrong: Any
    for wrong in (None, "scope", [CHAIN, None], 7):
        with pytest.raises(InvalidError, match="a Scope, or a sequence of scopes"):
            store.lease_prefix(wrong, KEYS)


def test_stats_count_operations(store: rt.Store) -> None:
    put(store, CHAIN, KEYS)
    check(store, CHAIN, KEYS)
    stats = store.stats()
    assert stats["pages"] == 6
    assert stats["io"]["mode"] in ("uring", "pool", "buffered")
    assert stats["allocated_bytes"] <= stats["capacity_bytes"] == 64 << 20
    assert stats["transfer"]["put_bytes"] == stats["transfer"]["get_bytes"] == 6 * PAGE


@pytest.mark.parametrize("page_bytes", [5_000, 64 << 10, 256 << 10, 512 << 10])
@pytest.mark.parametrize("chained", [True, False])
def test_full_store_evicts_oldest_pages(store: rt.Store, page_bytes: int, chained: bool) -> None:
    """Puts about twice the capacity, in sequences of at most 2 MiB. With different page sizes,
    different parts of a segment stay unused.
    """
    scope = rt.Scope.opaque("flood", page_bytes, chained=chained)
    length, capacity = (2 << 20) // page_bytes, store.stats()["capacity_bytes"]
    pages = pages_of(keys_of("flood", length), page_bytes)
    sequences = [keys_of(f"flood {turn}", length) for turn in range(2 * capacity // pages.nbytes)]
    for keys in sequences:
        assert store.put_batch(scope, keys, pages) == length
    assert store.probe(scope, sequences[-1]) == length
    assert store.probe(scope, sequences[0]) == 0
    stats = store.stats()
    assert stats["allocated_bytes"] <= capacity
    assert stats["counters"]["evicted_pages"] > 0


@pytest.mark.parametrize("durability", ["cache", "durable"])
@pytest.mark.parametrize("io", ["auto", "pool", "buffered"])
def test_reopened_store_has_all_pages(where: Path, durability: str, io: str) -> None:
    with open_small(where, durability=durability, io=io) as store:
        put(store, CHAIN, KEYS)
        put(store, LOOSE, KEYS[::2])
        store.delete(LOOSE, KEYS[:1])
    with rt.Store.open(where) as store:
        assert (store.role, store.answers_at_once) == ("owner", True)
        check(store, CHAIN, KEYS)
        assert store.exists(LOOSE, KEYS) == [False, False, True, False, True, False]


def test_segments_spread_over_directories(where: Path, tmp_path: Path) -> None:
    disks = [tmp_path / "disk0", tmp_path / "disk1"]
    for disk in disks:
        disk.mkdir()
    scope = rt.Scope.opaque("disks", 1 << 18)
    keys = keys_of("disks", 16)
    with open_small(where, paths=disks) as store:
        store.put_batch(scope, keys, pages_of(keys, 1 << 18))
    with rt.Store.open(where) as store:
        assert store.probe(scope, keys) == 16
    assert all(any(disk.iterdir()) for disk in disks)


def test_close_is_final_and_idempotent(where: Path) -> None:
    store = open_small(where)
    put(store, CHAIN, KEYS)
    match = store.lease_prefix(CHAIN, KEYS)
    assert "owner" in repr(store)
    store.close()
    store.close()
    match.release()
    assert store.closed
    assert "closed" in repr(store)
    with pytest.raises(ClosedError, match="open it again"):
        store.probe(CHAIN, KEYS)
    with pytest.raises(ClosedError):
        put(store, CHAIN, KEYS)


def test_two_opens_share_one_store(where: Path) -> None:
    with open_small(where) as first, open_small(where) as second:
        put(first, CHAIN, KEYS)
        assert second.probe(CHAIN, KEYS) == 6
        second.close()
        check(first, CHAIN, KEYS)


def test_scopes_are_hashable_values() -> None:
    scope = rt.Scope(
        model="m",
        dtype="bfloat16",
        page_tokens=64,
        layers=(0, 32),
        kv_heads=(0, 8),
        head_dim=128,
        extra={"isa": "amx"},
    )
    assert scope.page_bytes == 2 * 32 * 8 * 64 * 128 * 2
    assert scope.chained
    assert len(scope.id) == 16
    assert rt.Scope(**scope.describe()) == scope == copy.deepcopy(scope)
    assert pickle.loads(pickle.dumps(CHAIN)) == CHAIN
    assert len({scope, rt.Scope(**scope.describe()), CHAIN}) == 2
    assert rt.Scope(**{**scope.describe(), "salt": b"tenant"}).id != scope.id
