"""The tiers behind SGLang's storage: pages that another machine computed, over a remote."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread, get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import blank, keys_of, pages_of

import ritornello as rt
from ritornello.sglang.cache_store import SGLangCacheStore
from ritornello.sglang.early_lookups import EarlyLookups
from ritornello.sglang.hits import ALL, SidePool
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.settings import Settings

PAGE, TOKENS, WAIT = 64 << 10, 16, 60.0
SCOPE = rt.Scope.opaque("sglang tiers", PAGE, chained=True)
KEYS = keys_of("prompt", 40)

Machine = Callable[..., SGLangCacheStore]


class Gated:
    """A remote whose `exists` answers only when `opened` is set."""

    values: dict[str, bytes] = {}
    opened, asked = Event(), Event()
    # Set between tests: calls that begin after the end of a test must not wait.
    opened.set()

    def get(self, name: str, start: int, stop: int | None) -> bytes | None:
        value = self.values.get(name)
        return None if value is None else value[start:stop]

    def exists(self, name: str) -> bool:
        self.asked.set()
        self.opened.wait(WAIT)
        return name in self.values

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value


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


def put(store: SGLangCacheStore, keys: Sequence[bytes], first: int | None = 0) -> int:
    """Puts the pages of `keys` except the first `first` keys, which are passed as the keys before
    these pages. If `first` is None, puts the pages of all of `keys`, as SGLang puts pages without
    passing the keys before them.
    """
    before = None if first is None else keys[:first]
    piece = keys[first or 0 :]
    return store.put(SCOPE, piece, pages_of(piece, PAGE), before)


def flush(store: SGLangCacheStore) -> None:
    store._on_cache("flush", lambda cache: cache.flush(), None)


def find(store: SGLangCacheStore, keys: Sequence[bytes], first: int | None = 0) -> int:
    """Looks up the pages that `put` puts with the same arguments, on a separate thread, as SGLang
    does.
    """
    before = None if first is None else keys[:first]
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(store.find, [SCOPE], keys[first or 0 :], before, TOKENS)
        return asked.result(WAIT)


def load(store: SGLangCacheStore, keys: Sequence[bytes]) -> int:
    out = blank(len(keys), PAGE)
    pages = store.get(SCOPE, keys, out)
    assert np.array_equal(out[:pages], pages_of(keys, PAGE)[:pages])
    return pages


def started(store: SGLangCacheStore) -> int:
    return int(store._on_cache("stats", lambda cache: cache.stats()["prefetch"]["started"], -1))


def ended_prefetches(store: SGLangCacheStore) -> int:
    """Returns how many fetches have ended, whatever their outcome, by the store's last report."""
    counts = store._meter.counts()
    return int(sum(n for name, n in counts.items() if name.startswith("prefetches:")))


def test_pages_of_other_machine_are_loaded(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    # SGLang stores a prompt in pieces.
    assert put(one, KEYS[:17]) == 17
    assert put(one, KEYS, first=17) == 23
    flush(one)
    assert find(two, [*KEYS, *keys_of("new", 2)]) == 40
    assert len(two._leased) == 1
    for first in range(0, 40, 16):
        assert load(two, KEYS[first : first + 16]) == len(KEYS[first : first + 16])
    assert not two._leased
    two.report(last=True)
    counts = two._meter.counts()
    assert counts["prefetches:completed"] == 1
    assert counts["remote_calls:calls"] > 0
    # The tier packs pages into objects, which have headers.
    assert 40 * PAGE < counts["remote_read_bytes"] < 41 * PAGE
    assert "remote_written_bytes" not in counts
    one.report(last=True)
    # The tier writes more than 40 pages if the second put added pages to an object that was written
    # already, because this object is then written again.
    counts = one._meter.counts()
    assert counts["tier_written_pages:remote"] >= 40
    assert counts["remote_written_bytes"] > 40 * PAGE
    assert "remote_read_bytes" not in counts


def test_lookup_begins_after_pages_that_sglang_has(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    assert put(one, KEYS) == 40
    flush(one)
    assert find(two, KEYS, first=24) == 16
    # A lookup finds pages on this machine's disk even if the keys before them are unknown.
    assert find(two, KEYS[24:], first=None) == 16


def test_pages_whose_predecessors_are_unknown_stay_on_this_machine(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    assert put(one, KEYS[24:], first=None) == 16
    flush(one)
    assert find(one, KEYS[24:], first=None) == 16
    # SGLang has the 24 pages before the piece in memory; the tiers do not have them.
    assert find(one, KEYS, first=24) == 16
    assert find(two, KEYS[24:], first=None) == 0
    assert started(two) == 0
    # The piece was not written to the remote: neither a lookup after the pages before it nor a
    # lookup of the piece as the beginning of a prompt finds it.
    assert find(two, KEYS, first=24) == find(two, KEYS[24:]) == 0


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the remote `Gated`, which answers no call of `exists` until `Gated.opened` is
    set.
    """
    monkeypatch.setitem(sys.modules, "gated_remote", sys.modules[__name__])
    monkeypatch.setattr(Gated, "values", {})
    monkeypatch.setattr(Gated, "opened", Event())
    monkeypatch.setattr(Gated, "asked", Event())
    return "gated_remote:Gated"


@pytest.fixture
def lookup_waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each wait of a lookup for the remote adds the waiting thread. Such a
    wait ends immediately, as if SGLang had ended the prefetch.
    """
    waits: list[int] = []

    class Observed(Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(get_ident())
            return True

    monkeypatch.setattr("ritornello.sglang.cache_store.Event", Observed)
    return waits


def test_prefetch_thread_waits_for_remote_and_scheduler_does_not(
    machine: Machine, gated: str, lookup_waits: list[int]
) -> None:
    one = machine("one", gated)
    assert put(one, KEYS[:8]) == 8
    # This thread counts as SGLang's scheduler thread, because it created the store.
    assert one.find([SCOPE], KEYS, [], TOKENS) == 8
    assert Gated.asked.wait(WAIT)
    assert lookup_waits == []
    # The fetch that the lookup began has neither ended nor been given up.
    one.report(last=True)
    assert ended_prefetches(one) == 0
    assert find(one, KEYS) == 8
    assert lookup_waits and get_ident() not in lookup_waits
    # The second lookup has given the fetch up.
    Gated.opened.set()
    until = time.monotonic() + WAIT
    while not ended_prefetches(one):
        assert time.monotonic() < until
        time.sleep(0.002)
        one.report(last=True)


def test_cancelled_lookup_stops_waiting(machine: Machine, gated: str) -> None:
    one = machine("one", gated)
    assert put(one, KEYS[:8]) == 8
    told: list[int] = []
    lookup = Thread(target=lambda: told.append(one.find([SCOPE], KEYS, [], TOKENS)))
    lookup.start()
    assert Gated.asked.wait(WAIT)
    one.cancel_lookup(keys_of("other", 2))
    assert lookup.is_alive()
    while lookup.is_alive():
        one.cancel_lookup(KEYS[-1:])
        lookup.join(0.01)
    assert told == [8]
    assert not one._waiting
    Gated.opened.set()


def test_weights_updated_during_lookup_hide_pages(machine: Machine, gated: str) -> None:
    one = machine("one", gated)
    assert put(one, KEYS[:8]) == 8
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(one.find, [SCOPE], KEYS, [], TOKENS)
        assert Gated.asked.wait(WAIT)
        one._stale = lambda: True
        Gated.opened.set()
        assert asked.result(WAIT) == 0
    assert not one._leased


def test_closing_ends_waiting(machine: Machine, gated: str) -> None:
    one = machine("one", gated)
    told: list[int] = []
    lookup = Thread(target=lambda: told.append(one.find([SCOPE], KEYS, [], TOKENS)))
    lookup.start()
    assert Gated.asked.wait(WAIT)
    closing = Thread(target=one.close)
    closing.start()
    lookup.join(WAIT)
    Gated.opened.set()
    closing.join(WAIT)
    assert told == [0]


def test_unreachable_remote_keeps_local_hits(machine: Machine) -> None:
    one = machine("one", "file:///nowhere/at/all")
    assert put(one, KEYS[:8]) == 8
    assert find(one, KEYS) == 8
    assert load(one, KEYS[:8]) == 8


def test_lookup_finds_nothing_if_gate_is_never(machine: Machine) -> None:
    one = machine("one")
    assert put(one, KEYS) == 40
    flush(one)
    two = machine("two", gate="never")
    assert find(two, KEYS) == 0
    assert put(two, KEYS[:8]) == 8
    assert find(two, KEYS[:8]) == find(two, KEYS[:8], first=None) == 0
    assert started(two) == 0


def test_gate_loads_only_if_loading_is_faster(machine: Machine) -> None:
    one = machine("one", gate="auto")
    assert put(one, KEYS) == 40
    assert find(one, KEYS) == 40
    for _ in range(20):
        one.record_prefill(0, 4096, 1e-6)
    assert find(one, KEYS) == 0
    for _ in range(200):
        one.record_prefill(0, 4096, 100.0)
    assert find(one, KEYS, first=8) == 32
    one.report(last=True)
    counts = one._meter.counts()
    assert counts["gate_decisions:none"] == counts["gate_decisions:all"] == 1
    assert load(one, KEYS[8:]) == 32
    one.report(last=True)
    assert one._meter.counts()["gate_load_seconds"] > 0


def test_leases_of_unread_pieces_are_bounded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ritornello.sglang.cache_store.LEASED_MAX", 2)
    one = machine("one")
    released: list[Any] = []
    release = one._release

    def observed(leases: Any) -> None:
        released.append(leases)
        release(leases)

    monkeypatch.setattr(one, "_release", observed)
    prompts = [keys_of(f"prompt {number}", 2) for number in range(4)]
    for keys in prompts:
        assert put(one, keys) == 2
        assert find(one, keys) == 2
    assert [*one._leased] == [keys[0] for keys in prompts[2:]]
    assert len(released) == 2
    one.forget()
    assert len(released) == 4


@pytest.fixture
def early() -> Iterator[Callable[..., EarlyLookups]]:
    """Returns a function that makes the `EarlyLookups` of a store with one scope. They read the
    hashes of an operation from its attribute `hashes` instead of computing them.
    """
    opened: list[EarlyLookups] = []

    def made(store: SGLangCacheStore) -> EarlyLookups:
        pool: Any = SimpleNamespace(scopes=[SCOPE], page_tokens=TOKENS)
        opened.append(
            EarlyLookups(
                store, lambda: pool, lambda operation, tokens: operation.hashes, lambda sides: sides
            )
        )
        return opened[-1]

    yield made
    for each in opened:
        each.close()


def operation(keys: Sequence[bytes], first: int = 0, sides: Sequence[SidePool] = ()) -> Any:
    """Returns a stand-in for a prefetch operation of SGLang; it ends when `ended` is set."""
    hashes = [key.hex() for key in keys]
    made = SimpleNamespace(
        hashes=hashes[first:], prefix_keys=hashes[:first], pool_transfers=sides, ended=False
    )
    made.is_terminated = lambda: made.ended
    return made


def test_operation_with_unserved_pool_begins_no_lookup(machine: Machine, early: Any) -> None:
    one = machine("one")
    begun = early(one)
    begun._act(operation(KEYS, sides=[SidePool("draft", ALL, 0)]), ended=False)
    assert started(one) == 0
    begun._act(operation(KEYS), ended=False)
    assert started(one) == 1


def test_early_lookups_survive_failed_thread_start(
    machine: Machine, early: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = machine("one")
    begun, never = early(one), early(one)
    with monkeypatch.context() as limited:
        limited.setattr(Thread, "start", fail)
        begun.begin(operation(KEYS))
        never.begin(operation(KEYS))
    never.close()
    begun.begin(operation(KEYS))
    until = time.monotonic() + WAIT
    while not started(one):
        assert time.monotonic() < until, "the next operation must start the thread"
        time.sleep(0.002)


def test_early_lookups_wait_for_no_other_lookup(machine: Machine, gated: str, early: Any) -> None:
    one = machine("one", gated)
    begun = early(one)
    # The cache fetches pages of at most four prompts at a time: the last two of these six fetches
    # wait in the cache's queue.
    queued = [operation(keys_of(f"queued {number}", 6), first=2) for number in range(6)]
    for each in queued:
        begun.begin(each)
    until = time.monotonic() + WAIT
    while started(one) < len(queued):
        assert time.monotonic() < until
        time.sleep(0.002)
    queued[-1].ended = True
    begun.end(queued[-1])
    cancelled = "prefetches:cancelled"
    while not one._meter.counts().get(cancelled):
        assert time.monotonic() < until
        time.sleep(0.002)
        one.report(last=True)
    Gated.opened.set()
    assert find(one, keys_of("queued 0", 6), first=2) == 0
    # SGLang's lookup waits for the fetch that the early lookup started, and starts no second fetch.
    assert started(one) == len(queued)


def test_lookups_wait_until_remote_answers(machine: Machine, gated: str) -> None:
    one = machine("one", gated)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(one.find, [SCOPE], KEYS, [], TOKENS)
        assert Gated.asked.wait(WAIT)
        assert not asked.done()
        Gated.opened.set()
        assert asked.result(WAIT) == 0
