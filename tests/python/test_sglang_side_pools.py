"""Side pools of SGLang (host pools besides the main pool, for windows, states and indexers) behind
tiers: pages that another machine stored.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from support import blank, keys_of, pages_of

import ritornello as rt
from ritornello.sglang import piece_lookup
from ritornello.sglang.cache_store import SGLangCacheStore
from ritornello.sglang.hits import ALL, GROUPS, TRAILING, RestorablePrefixes, SidePool
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.settings import Settings

PAGE, TOKENS, WAIT = 64 << 10, 16, 60.0
MAIN = rt.Scope.opaque("sglang main pool", PAGE, chained=True)
SIDE = rt.Scope.opaque("sglang side pool", PAGE, chained=False)
OTHER = rt.Scope.opaque("sglang other side pool", PAGE, chained=False)
KEYS = keys_of("prompt", 40)
STATE = SidePool("mamba", TRAILING, 1, [SIDE])
WINDOW = SidePool("swa", TRAILING, 3, [SIDE])
INDEXER = SidePool("indexer", ALL, 0, [OTHER])

Machine = Callable[..., SGLangCacheStore]


class Counted:
    """A remote whose `exists` records the names of objects, and answers only when `opened` is
    set.
    """

    values: dict[str, bytes] = {}
    asked: list[str] = []
    opened = Event()
    opened.set()

    def get(self, name: str, start: int, stop: int | None) -> bytes | None:
        value = self.values.get(name)
        return None if value is None else value[start:stop]

    def exists(self, name: str) -> bool:
        self.asked.append(name)
        self.opened.wait(WAIT)
        return name in self.values

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the time limit after which a lookup searches no further windows and states, because a
    slow machine could exceed it.
    """
    monkeypatch.setattr(piece_lookup, "WINDOWS_SECONDS", WAIT)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the remote `Counted`, which is empty at the beginning of the test."""
    monkeypatch.setitem(sys.modules, "counted_remote", sys.modules[__name__])
    monkeypatch.setattr(Counted, "values", {})
    monkeypatch.setattr(Counted, "asked", [])
    return "counted_remote:Counted"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Returns a function that opens the tiers of the machine `name`: its own disk and a remote, by
    default a directory that all machines share.
    """
    opened: list[SGLangCacheStore] = []
    (tmp_path / "far").mkdir()

    def machine(name: str, remote: str = f"file://{tmp_path}/far", **given: Any) -> Any:
        said = {"prefetch": "wait_complete", "gate": "always", **given}
        tiers = [f"disk {tmp_path}/{name} 64MiB", remote]
        opened.append(SGLangCacheStore(Settings.parse({"tiers": tiers, **said}), RateMeter()))
        return opened[-1]

    yield machine
    for store in opened:
        store.close()


def put(store: SGLangCacheStore, scope: rt.Scope, places: Sequence[int]) -> None:
    """Puts the prompt's pages with the indices `places`. The main pool accepts only the prompt's
    leading pages.
    """
    keys = [KEYS[place] for place in places]
    assert store.put(scope, keys, pages_of(keys, PAGE), []) == len(keys)


def fill(store: SGLangCacheStore, side: Sequence[int], other: Sequence[int] = ()) -> None:
    """Stores the prompt's 40 pages in the main pool, and its pages with the indices `side` and
    `other` in the two side pools. Waits until all tiers have the pages.
    """
    for scope, places in ((MAIN, range(40)), (SIDE, side), (OTHER, other)):
        if places:
            put(store, scope, places)
    store._on_cache("flush", lambda cache: cache.flush(), None)


def find(
    store: SGLangCacheStore,
    *sides: SidePool,
    scopes: Sequence[rt.Scope] = (MAIN,),
    pages: int = 40,
    before: int = 0,
) -> RestorablePrefixes:
    """Looks up the first `pages` pages of the prompt, except the first `before` pages, which SGLang
    has in memory. Runs on a separate thread, as SGLang's lookups do.
    """
    keys = KEYS[before:pages]
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(store.find_prefixes, scopes, keys, KEYS[:before], TOKENS, sides)
        return asked.result(WAIT)


def load(store: SGLangCacheStore, scope: rt.Scope, places: Sequence[int]) -> int:
    """Loads the prompt's pages with the indices `places`, and checks their bytes. Returns the
    number of leading pages that were loaded.
    """
    keys = [KEYS[place] for place in places]
    out = blank(len(keys), PAGE)
    pages = store.get(scope, keys, out)
    assert np.array_equal(out[:pages], pages_of(keys, PAGE)[:pages])
    return pages


def test_state_of_other_machine_is_found(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    fill(one, [9, 39])
    found = find(two, STATE)
    assert (found.pages, found.pools) == (40, {"kv": 40, "mamba": 40})
    assert len(two._leased) == 1
    assert load(two, MAIN, range(40)) == 40
    assert len(two._leased) == 1
    assert load(two, SIDE, [39]) == 1
    assert not two._leased


def test_last_window_alone_is_fetched(machine: Machine, counted: str) -> None:
    one, two = machine("one", counted), machine("two", counted)
    fill(one, range(40))
    assert find(two, WINDOW).pages == 40
    assert load(two, SIDE, [37, 38, 39]) == 3
    assert two._on_cache("exists", lambda cache: sum(cache.exists(SIDE, KEYS)), -1) == 3


@pytest.mark.parametrize(
    ("stored", "restorable"),
    [
        ([0, 1, 2, 37, 38, 39], [40]),
        ([35, 36, 37, 39], [38]),
        ([2, 3, 4, 38, 39], [5]),
        ([0, 38, 39], [1]),
        ([38, 39], []),
    ],
    ids=["last", "second last", "early", "first page", "none"],
)
def test_longest_complete_window_is_found(
    machine: Machine, stored: list[int], restorable: list[int]
) -> None:
    one, two = machine("one"), machine("two")
    fill(one, stored)
    found = find(two, WINDOW)
    assert found.restorable[-1:] == restorable
    pages = found.pages
    assert bool(two._leased) is bool(pages)
    if pages:
        assert load(two, SIDE, range(max(pages - 3, 0), pages)) == min(pages, 3)


def test_windows_of_this_machine_need_no_remote(machine: Machine, counted: str) -> None:
    one = machine("one", counted)
    fill(one, [9, 20])
    Counted.asked.clear()
    assert find(one, STATE, pages=21).pages == 21
    assert find(one, STATE, pages=21, before=5).restorable == [5, 16]
    assert Counted.asked == []


def test_missing_page_of_indexer_bounds_prefix(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    fill(one, [9, 22, 39], [*range(25), *range(26, 40)])
    found = find(two, STATE, INDEXER)
    assert found.pages == 23
    assert found.pools["indexer"] == 25
    assert load(two, OTHER, range(25)) == 25
    assert load(two, SIDE, [22]) == 1


def test_main_pool_without_bytes_is_served(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    fill(one, range(30))
    assert find(two, WINDOW, scopes=()).pages == 30
    assert len(two._leased) == 1
    assert load(two, SIDE, [27, 28, 29]) == 3
    assert not two._leased


def test_unserved_side_pool_makes_lookup_miss(machine: Machine, counted: str) -> None:
    one, two = machine("one", counted), machine("two", counted)
    fill(one, range(40))
    Counted.asked.clear()
    for side in (SidePool("draft", ALL, 0), SidePool("new", "unknown_policy", 1, [SIDE])):
        assert find(two, STATE, side).pages == 0
    assert not two._leased
    assert Counted.asked == []
    assert not any(two._on_cache("exists", lambda cache: cache.exists(MAIN, KEYS), [True]))
    assert not any(two._on_cache("exists", lambda cache: cache.exists(SIDE, KEYS), [True]))
    assert find(two, STATE, SidePool("c4", GROUPS, 0)).pages == 40


def test_lookup_finds_nothing_if_gate_is_never(machine: Machine, counted: str) -> None:
    fill(machine("one", counted), range(40))
    two = machine("two", counted, gate="never")
    Counted.asked.clear()
    assert find(two, WINDOW).pages == 0
    assert Counted.asked == []


def test_scheduler_finds_local_windows_only(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    fill(one, range(40))
    assert two.find_prefixes([MAIN], KEYS, [], TOKENS, [WINDOW]).pages == 0
    assert one.find_prefixes([MAIN], KEYS, [], TOKENS, [WINDOW]).pages == 40


def test_search_for_windows_has_time_limit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(machine("one"), [9])
    with monkeypatch.context() as patch:
        patch.setattr(piece_lookup, "WINDOWS_SECONDS", 0.0)
        assert find(machine("two"), STATE).pages == 0
    assert find(machine("three"), STATE).pages == 10


def test_cancelled_lookup_stops_waiting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, counted: str
) -> None:
    one, opened = machine("one", counted), Event()
    put(one, SIDE, range(30))
    one._on_cache("flush", lambda cache: cache.flush(), None)
    Counted.asked.clear()
    monkeypatch.setattr(Counted, "opened", opened)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(one.find_prefixes, (), KEYS, [], TOKENS, [WINDOW])
        until = time.monotonic() + WAIT
        while not Counted.asked:
            assert time.monotonic() < until
            time.sleep(0.002)
        assert not asked.done()
        one.cancel_lookup(KEYS[-1:])
        assert asked.result(WAIT).pages == 30
    assert not one._waiting
    opened.set()


def prefetches(store: SGLangCacheStore) -> dict[str, int]:
    return dict(store._on_cache("stats", lambda cache: cache.stats()["prefetch"], {}))


def test_ended_prefetch_begins_no_lookup(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, counted: str
) -> None:
    one, two, opened = machine("one", counted), machine("two", counted), Event()
    fill(one, range(40), range(40))
    put(two, MAIN, range(10))
    two._on_cache("flush", lambda cache: cache.flush(), None)
    Counted.asked.clear()
    monkeypatch.setattr(Counted, "opened", opened)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(two.find_prefixes, [MAIN], KEYS, [], TOKENS, [INDEXER, STATE])
        until = time.monotonic() + WAIT
        while not Counted.asked:
            assert time.monotonic() < until
            time.sleep(0.002)
        two.cancel_lookup(KEYS[-1:])
        assert asked.result(WAIT).pages == 0
    opened.set()
    while prefetches(two)["running"]:
        assert time.monotonic() < until
        time.sleep(0.002)
    assert (prefetches(two)["started"], prefetches(two)["cancelled"]) == (1, 1)
    assert len({name.split("/")[2] for name in Counted.asked}) == 1


class Failing:
    """A cache whose lookups in the scopes `refused` raise an error. `leased`: the leases that
    lookups returned and that were not released; `times`: the durations of the leases, in seconds.
    """

    def __init__(self, cache: Any, refused: Sequence[rt.Scope]) -> None:
        self._cache = cache
        self._refused = refused
        self.leased: list[Any] = []
        self.times: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def lookup(self, scope: rt.Scope, keys: Any, **options: Any) -> Any:
        if scope in self._refused:
            raise RuntimeError("a lookup that fails")
        found = self._cache.lookup(scope, keys, **options)
        if "ttl" in options:
            self.times.append(options["ttl"])
        self.leased += found.leases
        return found

    def release(self, lease: Any) -> None:
        self._cache.release(lease)
        self.leased.remove(lease)


def test_found_window_alone_stays_leased(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine("one")
    fill(one, [2, 3, 4, 20, 38, 39])
    failing = Failing(one._store, [])
    with monkeypatch.context() as patch:
        patch.setattr(one, "_store", failing)
        assert find(one, WINDOW).pages == 5
        # One lease is on the pages in the main pool, and one on the window's pages.
        assert len(failing.leased) == 2
        one.forget()


def test_leases_last_until_all_pools_are_looked_up(machine: Machine) -> None:
    one = machine("one")
    fill(one, range(40), range(40))
    failing = Failing(one._store, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "_store", failing)
        for sides, lookups, wait in (
            ([], 1, 0.0),
            ([INDEXER, STATE], 3, piece_lookup.WAIT_SECONDS),
        ):
            failing.times.clear()
            assert find(one, *sides).pages == 40
            assert failing.times == [piece_lookup.LEASE_SECONDS + wait] * lookups
        one.forget()


@pytest.mark.parametrize(
    ("scopes", "sides", "refused"),
    [
        ([MAIN, OTHER], [], OTHER),
        ([MAIN], [STATE], SIDE),
        ([MAIN], [STATE, INDEXER], SIDE),
    ],
    ids=["second part", "state", "state after indexer"],
)
def test_failed_lookup_releases_leases(
    machine: Machine,
    scopes: list[rt.Scope],
    sides: list[SidePool],
    refused: rt.Scope,
) -> None:
    one = machine("one")
    fill(one, range(40), range(40))
    failing = Failing(one._store, [refused])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "_store", failing)
        assert find(one, *sides, scopes=scopes).pages == 0
        assert failing.leased == []
        failing._refused = []
        assert find(one, *sides, scopes=scopes).pages == 40
        assert failing.leased
        one.forget()
        assert failing.leased == []
    assert one._meter.counts()["errors"] == 1
