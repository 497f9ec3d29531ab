"""A cache over tiers: pages that one process puts are found by other processes, on any tier."""

import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support import blank, keys_of, pages_of

import ritornello as rt

PAGE = 20_000
WAIT = 60.0


@pytest.fixture
def scope() -> rt.Scope:
    return rt.Scope.opaque("tiers", PAGE, chained=True)


def open_cache(place: Path, *below: str, prefetch: str = "wait_complete") -> rt.Cache:
    return rt.Cache.open([f"host 64MiB {place}/host", *below], prefetch=prefetch)


def put(cache: rt.Cache, scope: rt.Scope, keys: Sequence[bytes], first: int = 0) -> int:
    ticket = cache.submit_put(scope, keys, pages_of(keys[first:], PAGE), first=first)
    outcome = ticket.wait(WAIT)
    assert outcome is not None
    return outcome.pages


def find(cache: rt.Cache, scope: rt.Scope, keys: Sequence[bytes]) -> rt.Lookup:
    until = time.monotonic() + WAIT
    while (found := cache.lookup(scope, keys)).state != "ready":
        assert time.monotonic() < until
        time.sleep(0.002)
    return found


def load(cache: rt.Cache, scope: rt.Scope, keys: Sequence[bytes]) -> int:
    out = blank(len(keys), PAGE)
    outcome = cache.submit_get(scope, keys, out).wait(WAIT)
    assert outcome is not None
    right = pages_of(keys, PAGE)
    for page, ok in enumerate(outcome.ok):
        assert not ok or np.array_equal(out[page], right[page])
    return outcome.pages


def test_put_pages_are_found_and_loaded(tmp_path: Path, scope: rt.Scope) -> None:
    keys = keys_of("a", 10)
    with open_cache(tmp_path, f"disk {tmp_path}/disk 64MiB") as cache:
        assert put(cache, scope, keys[:6]) == 6
        assert put(cache, scope, keys, first=6) == 4
        found = find(cache, scope, [*keys, *keys_of("b", 2)])
        assert (found.spans, found.local, found.load) == ([("host", 10)], 10, 10)
        assert len(found.leases) == 1
        cache.release(found.leases[0])
        assert cache.exists(scope, keys[8:]) == [True, True]
        assert load(cache, scope, keys) == 10
        cache.flush()
        disk = cache.stats()["tiers"][1]
        assert (disk["tier"], disk["written_pages"], disk["dropped_pages"]) == ("disk", 10, 0)
    assert cache.closed
    with pytest.raises(rt.errors.ClosedError):
        cache.lookup(scope, keys)


def test_pool_rows_are_put_and_loaded(tmp_path: Path, scope: rt.Scope) -> None:
    """The first tier is a disk. Pages are put from, and loaded to, the rows of an engine's pool;
    each row is split over two buffers.
    """
    keys = keys_of("a", 6)
    rows, far = blank(8, PAGE), tmp_path / "far"
    far.mkdir()
    rows[2:] = pages_of(keys, PAGE)
    halves = [rows[:, : PAGE // 2].copy(), rows[:, PAGE // 2 :].copy()]
    pool = rt.PagePool(halves, [PAGE // 2, PAGE - PAGE // 2])
    with rt.Cache.open([f"disk {tmp_path}/disk 64MiB", f"file://{far}"]) as cache:
        assert cache.time_limit(PAGE, 7.0, put=True) >= 7.0
        put = cache.submit_put(scope, keys, pool.pages(range(2, 8)), copy=False)
        assert (stored := put.wait(WAIT)) is not None
        assert stored.pages == 6
        assert cache.stats()["tiers"][0]["queued_bytes"] == 0
        assert cache.touch(scope, [*keys, *keys_of("b", 1)]) == 6
        for staged in (False, True):
            for half in halves:
                half[:] = 0
            # The rows are in reverse order, so that only one page is loaded to the row that it was
            # put from.
            out = pool.pages(range(6, 0, -1))
            got = cache.submit_get(scope, keys, out, staged=staged).wait(WAIT)
            assert got is not None
            assert got.pages == 6
            loaded = np.hstack(halves)[6:0:-1]
            assert np.array_equal(loaded, pages_of(keys, PAGE))
        cache.flush()
        assert cache.stats()["tiers"][1]["written_pages"] == 6


def test_put_without_copy_spills_to_lower_tier(tmp_path: Path, scope: rt.Scope) -> None:
    keys = keys_of("a", 200)
    tiers = [f"host 4MiB {tmp_path}/host", f"disk {tmp_path}/disk 64MiB"]
    with rt.Cache.open(tiers) as cache:
        pages = pages_of(keys, PAGE)
        put = cache.submit_put(scope, keys, pages, copy=False).wait(WAIT)
        assert put is not None
        assert put.pages < 200, "the first tier must be too small for all pages"
        cache.flush()
    with rt.Store.open(tmp_path / "disk") as disk:
        assert disk.probe(scope, keys) == 200


def test_sections_from_two_tiers_arrive_complete(tmp_path: Path) -> None:
    page = 384 << 10
    scope = rt.Scope.opaque("sections", page, chained=True)
    keys, ends = keys_of("a", 8), (page // 3, page // 2, page)
    right = pages_of(keys, page)
    disk = f"disk {tmp_path}/disk 64MiB"
    with rt.Cache.open([disk]) as cache:
        stored = cache.submit_put(scope, keys, right).wait(WAIT)
        assert stored is not None
        assert stored.pages == 8
    with open_cache(tmp_path, disk) as cache:
        assert cache.submit_put(scope, keys[:3], right[:3]).wait(WAIT) is not None
        for _ in range(2):
            out = blank(8, page)
            ticket = cache.submit_get(scope, keys, out, sections=ends)
            for number, end in enumerate(ends):
                assert ticket.wait_section(number, WAIT)
                assert np.array_equal(out[:, :end], right[:, :end])
            outcome = ticket.wait(WAIT)
            assert outcome is not None
            assert outcome.pages == 8
        host, below = cache.stats()["tiers"]
        assert min(host["promoted_pages"], below["loaded_pages"]) >= 5
        with pytest.raises(rt.errors.InvalidError):
            cache.submit_get(scope, keys, blank(8, page), sections=(page // 2,))


def test_other_machine_finds_pages_through_remote(tmp_path: Path, scope: rt.Scope) -> None:
    far = tmp_path / "far"
    far.mkdir()
    keys = keys_of("a", 50)
    with open_cache(tmp_path / "one", f"file://{far}") as cache:
        assert put(cache, scope, keys) == 50
        cache.flush()
    with open_cache(tmp_path / "two", f"file://{far}") as cache:
        assert cache.lookup(scope, keys).state in ("querying", "loading")
        found = find(cache, scope, keys)
        assert (found.spans, found.fetched) == ([("host", 50)], 50)
        assert load(cache, scope, keys) == 50
        assert cache.stats()["prefetch"]["pages"] == 50


def test_other_machine_finds_unchained_pages(tmp_path: Path) -> None:
    """In an unchained scope, as of LMCache's objects and of attention windows, a page is found even
    if the pages before it are missing.
    """
    far, scope = tmp_path / "far", rt.Scope.opaque("objects", PAGE, chained=False)
    far.mkdir()
    keys = keys_of("a", 8)
    with open_cache(tmp_path / "one", f"file://{far}") as cache:
        assert put(cache, scope, [keys[1], keys[4]]) == 2
        parent = cache.submit_put(scope, keys[6:7], pages_of(keys[6:7], PAGE), parent=keys[5])
        assert (stored := parent.wait(WAIT)) is not None
        assert stored.pages == 1
        cache.flush()
        assert cache.stats()["tiers"][1]["written_pages"] == 3
    with rt.Cache.open([f"disk {tmp_path}/two 64MiB", f"file://{far}"]) as cache:
        assert cache.lookup(scope, keys).state in ("querying", "loading")
        found = find(cache, scope, keys)
        assert (found.spans, found.local, found.load) == ([("disk", 3)], 3, 3)
        assert cache.exists(scope, keys) == [page in (1, 4, 6) for page in range(8)]
        out = blank(3, PAGE)
        wanted = [keys[1], keys[4], keys[6]]
        loaded = cache.submit_get(scope, wanted, out).wait(WAIT)
        assert loaded is not None
        assert loaded.ok == [True] * 3
        assert np.array_equal(out, pages_of(wanted, PAGE))


def test_gate_uses_recorded_load_and_prefill_times(tmp_path: Path, scope: rt.Scope) -> None:
    keys = keys_of("a", 20)
    with open_cache(tmp_path) as cache:
        put(cache, scope, keys)
        assert cache.lookup(scope, keys, page_tokens=16, tokens=400).estimate is None
        for _ in range(40):
            cache.record_prefill(0, 320, 1e-4)
            cache.record_load("host", 20 * PAGE, 10.0)
        found = cache.lookup(scope, keys, page_tokens=16, tokens=400)
        assert (found.local, found.load, found.leases) == (20, 0, [])
        for _ in range(40):
            cache.record_prefill(0, 320, 1e3)
        found = cache.lookup(scope, keys, page_tokens=16, computed=32, tokens=400)
        assert found.load == 20
        assert found.estimate is not None
        cache.record_outcome(found, 0.5)
        gate = cache.stats()["gate"]
        assert (gate["none"], gate["all"], gate["judged"]) == (1, 1, 1)
        load(cache, scope, keys)
        ((tier, moved, seconds),) = cache.take_loads()
        assert (tier, moved) == ("host", 20 * PAGE)
        assert seconds > 0
        assert cache.take_loads() == []


def test_listing_and_deletion_act_on_local_tiers(tmp_path: Path, scope: rt.Scope) -> None:
    far, keys = tmp_path / "far", keys_of("a", 20)
    far.mkdir()
    other = rt.Scope.opaque("other", PAGE, chained=True)
    with open_cache(tmp_path, f"disk {tmp_path}/disk 64MiB", f"file://{far}") as cache:
        assert (cache.role, cache.problem, cache.capacity_bytes) == ("owner", "", 64 << 20)
        put(cache, scope, keys)
        put(cache, other, keys[:3])
        cache.flush()
        assert cache.probe(scope, [*keys, *keys_of("b", 1)]) == 20
        listed = [(listed.id, pages) for listed, pages, _ in cache.scopes()]
        assert listed == [(scope.id, 20), (other.id, 3)]
        first, after = cache.keys(scope, limit=1)
        rest, end = cache.keys(scope, after=after) if after else ([], 0)
        assert (sorted([*first, *rest]), end) == (sorted(keys), 0)
        assert cache.delete(scope, [*keys[18:], *keys_of("b", 1)]) == 2
        assert cache.probe(scope, keys) == 18
        cache.drop_scope(scope)
        assert cache.probe(scope, keys) == 0
        assert cache.probe(other, keys) == 3
        assert find(cache, scope, keys).local == 20, "deletions must not reach the remote"


def test_disk_tier_has_several_directories(tmp_path: Path, scope: rt.Scope) -> None:
    keys = keys_of("spread", 20)
    with rt.Cache.open([f"disk {tmp_path}/a {tmp_path}/b {tmp_path}/c 64MiB"]) as cache:
        assert put(cache, scope, keys) == 20
    with rt.Store.open(tmp_path / "a") as store:
        assert len(store.stats()["paths"]) == 3
        assert store.probe(scope, keys) == 20


def test_invalid_tiers_error_shows_valid_list(tmp_path: Path) -> None:
    for tiers in (
        [],
        ["disk /nowhere/a", "host 1GiB"],
        ["host 1GiB", "host 1GiB"],
        ["s3://bucket/prefix"],
        ["tape"],
        [f"host 64MiB {tmp_path}/host", "s4://bucket"],
    ):
        with pytest.raises(rt.errors.InvalidError, match=r"host 8GiB|file:///DIR"):
            rt.Cache.open(tiers)
    with pytest.raises(rt.errors.InvalidError, match="wait_complete"):
        rt.Cache.open(["host 64MiB"], prefetch="sometimes")


def _other(place: Path, scope: rt.Scope, keys: list[bytes], put_first: bool) -> None:
    with open_cache(place, f"disk {place}/disk 64MiB") as cache:
        if put_first:
            assert put(cache, scope, keys) == len(keys)
        else:
            assert load(cache, scope, keys) == len(keys)


def test_processes_share_both_tiers(tmp_path: Path, scope: rt.Scope) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = keys_of("ours", 8), keys_of("theirs", 8)
    with open_cache(tmp_path, f"disk {tmp_path}/disk 64MiB") as cache:
        put(cache, scope, ours)
        for keys, put_first in ((theirs, True), (ours, False)):
            other = spawn.Process(target=_other, args=(tmp_path, scope, keys, put_first))
            other.start()
            other.join(WAIT)
            assert other.exitcode == 0
        assert find(cache, scope, theirs).local == 8
        assert load(cache, scope, theirs) == 8


def test_forked_child_must_open_its_own_cache(tmp_path: Path, scope: rt.Scope) -> None:
    keys = keys_of("a", 4)
    with open_cache(tmp_path) as cache:
        put(cache, scope, keys)
        answers = multiprocessing.get_context("fork").SimpleQueue()

        def child() -> None:
            try:
                cache.lookup(scope, keys)
                answers.put("found")
            except rt.errors.ClosedError as error:
                answers.put(str(error))

        other = multiprocessing.get_context("fork").Process(target=child)
        other.start()
        other.join(WAIT)
        assert other.exitcode == 0
        assert "fork" in answers.get()
        assert load(cache, scope, keys) == 4
