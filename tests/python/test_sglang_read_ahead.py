"""The read of the next batch of a prefetch begins before SGLang has the current batch: tested with
stand-ins for SGLang's controller and for our storage.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from threading import Event, Timer
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from sglang_host import ENGINE, TOKENS, Host, keys, pool_of, slots

from ritornello.sglang.cache_store import SGLangCacheStore
from ritornello.sglang.interface import TESTED
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.pools import LogicalPool, Pool
from ritornello.sglang.read_ahead import Paces, ReadAhead
from ritornello.sglang.settings import Settings
from ritornello.sglang.store import Read, SGLangStore
from ritornello.sglang.transfers import READ_IN, Transfer, Transfers, transfer_obstacle

BATCH, PAGES, WAIT = 4, 10, 60.0
# Positions in a host pool: a put stores the pages at `FROM`, and a transfer loads them to `TO`.
# `ALL` is the number of positions.
FROM, TO, ALL = range(PAGES), range(PAGES, 2 * PAGES), 2 * PAGES
KEYS = keys(PAGES)


class Controller:
    """Stand-in for SGLang's controller: the method that reads the batches of an operation."""

    page_size = TOKENS

    def __init__(self, storage: Any) -> None:
        self.storage_backend = storage

    def _page_transfer(self, operation: Any) -> list[int]:
        """Reads the batches. Returns, for each batch, the number of pages of the operation that
        were completed after it.
        """
        complete, completed = True, [0]
        for first in range(0, len(operation.hash_value), BATCH):
            complete = complete and not operation.is_terminated()
            read = 0
            if complete:
                batch = operation.hash_value[first : first + BATCH]
                past = first + len(batch)
                indices = operation.host_indices[first * TOKENS : past * TOKENS]
                read = self.storage_backend.read(operation, batch, indices)
                complete = read == len(batch)
            completed.append(completed[-1] + read)
        return completed[1:]


@dataclass
class Operation:
    """Stand-in for SGLang's operation that loads the prompt to the positions `TO`."""

    hash_value: list[str] = field(default_factory=lambda: [key.hex() for key in KEYS])
    host_indices: Any = field(default_factory=lambda: slots(*TO))
    pool_transfers: list[Any] | None = None
    terminated: bool = False

    def is_terminated(self) -> bool:
        return self.terminated


class Recorded(SGLangStore):
    """A store that records the beginning and the end of each get, with the index in the prompt of
    the get's first page. `tickets`, by this index: tickets that replace the tickets of gets.
    `limits`: for each get, the number of pages of earlier gets that may delay it. `on_end` is
    called at the end of each get.
    """

    def __init__(self, path: Path, meter: RateMeter) -> None:
        super().__init__(Settings(str(path), "640MiB"), meter, lambda: self.is_stale)
        self.is_stale = False
        self.events: list[tuple[str, int]] = []
        self.tickets: dict[int, Any] = {}
        self.limits: list[int] = []
        self.on_end: Callable[[], object] = lambda: None

    def begin_get(self, scope: Any, keys: Sequence[bytes], out: Any, behind: int = 0) -> Read:
        place = KEYS.index(keys[0])
        self.events.append(("begin", place))
        self.limits.append(behind)
        read = super().begin_get(scope, keys, out, behind)
        if place in self.tickets and read.ticket is not None:
            read.ticket.wait()
            read.ticket = self.tickets[place]
        return read

    def finish_get(self, read: Read, since: float = 0.0) -> int:
        self.events.append(("end", KEYS.index(read.keys[0])))
        self.on_end()
        return super().finish_get(read, since)

    def abandon_get(self, read: Read) -> None:
        self.events.append(("abandon", KEYS.index(read.keys[0])))
        super().abandon_get(read)


class Storage:
    """Stand-in for our storage: the part that reads. `flat`: pages are read to new memory, and then
    copied to the host pool. `hook` is called before each batch is read.
    """

    def __init__(self, store: SGLangStore, *pools: Any, flat: bool = False) -> None:
        self.store, self.pools, self.flat = store, pools, flat
        self.hook: Callable[[Any], object] = lambda operation: None
        self.reads: ReadAhead | None = None
        self.paces = Paces()

    def on_transfer_begin(self, transfer: Transfer | None) -> None:
        self.reads = ReadAhead(transfer, self.store, self.paces) if transfer is not None else None

    def on_transfer_end(self) -> None:
        reads, self.reads = self.reads, None
        if reads is not None:
            reads.close()

    def read(self, operation: Any, hashes: list[str], indices: Any) -> int:
        self.hook(operation)
        batch = [bytes.fromhex(each) for each in hashes]
        if self.flat:
            return self._read_flat(batch, indices)
        filled = []
        for pool in self.pools:
            if self.reads is None or isinstance(pool, LogicalPool):
                filled.append(int(pool.get(batch, indices)))
            else:
                filled.append(self.reads.get(pool, batch, indices))
        return min(filled)

    def _read_flat(self, batch: list[bytes], indices: Any) -> int:
        (pool,) = self.pools
        assert self.reads is not None
        pages = self.reads.get_flat(pool, batch, [pool.new_page() for _ in batch])
        for slot, page in zip(indices[::TOKENS], pages, strict=False):
            pool._host.set_from_flat_data_page(slot, page)
        return len(pages)


@pytest.fixture
def meter() -> RateMeter:
    return RateMeter()


@pytest.fixture
def store(tmp_path: Path, meter: RateMeter) -> Iterator[Recorded]:
    store = Recorded(tmp_path / "store", meter)
    assert store.open()
    yield store
    store.close()


def stored(store: SGLangStore, meter: RateMeter, name: str = "kv", **given: Any) -> Pool:
    """Returns a pool. The pages at its positions `FROM` are stored as the pages of the prompt, and
    its positions `TO` are zero.
    """
    pool = pool_of(Host(pages=ALL, **given), store, meter, name)
    assert pool.put(KEYS, slots(*FROM), None) == PAGES
    pool._host.memory[:, TO] = 0
    return pool


def transfer(storage: Any, operation: Any) -> list[int]:
    """Runs an operation on a controller whose method `_page_transfer` is wrapped. Returns the
    number of pages that were completed after each batch.
    """
    wrapped = type("Wrapped", (Controller,), {})
    assert Transfers().watch(wrapped, READ_IN[0]) == ""
    with ThreadPoolExecutor(1) as thread:
        return list(thread.submit(wrapped(storage)._page_transfer, operation).result(WAIT))


def loaded(pool: Any, pages: int = PAGES) -> bool:
    """Returns whether the positions `TO` hold the first `pages` pages, and no other page."""
    memory = pool._host.memory
    same = np.array_equal(memory[:, TO[:pages]], memory[:, FROM[:pages]])
    return same and not memory[:, TO[pages:]].any()


@pytest.mark.parametrize(
    ("named", "flat"),
    [(True, False), (False, False), (False, True)],
    ids=["in place", "copied", "by SGLang"],
)
def test_next_batch_begins_before_batch_ends(
    store: Recorded, meter: RateMeter, named: bool, flat: bool
) -> None:
    pool = stored(store, meter, named=named)
    storage = Storage(store, pool, flat=flat)
    for _ in range(2):
        pool._host.memory[:, TO] = 0
        store.events.clear()
        assert transfer(storage, Operation()) == [4, 8, 10]
        assert loaded(pool)
        order = ["begin 0", "begin 4", "end 0", "begin 8", "end 4", "end 8"]
        assert [f"{event} {place}" for event, place in store.events] == order
    assert store.limits == [0, 4, 4] * 2
    assert meter.counts()["loaded_pages"] == 2 * PAGES
    assert not [name for name in meter.counts() if name.startswith(("missed", "errors"))]
    assert storage.paces.expected("kv", BATCH) < inf


def test_pools_with_positions_of_main_pool_are_read_ahead(
    store: Recorded, meter: RateMeter
) -> None:
    main, derived, other = (stored(store, meter, name) for name in ("kv", "indexer", "swa"))
    sides = [SimpleNamespace(name="indexer", indices_from_pool="kv")]
    sides += [SimpleNamespace(name="swa", indices_from_pool=None)]
    storage = Storage(store, main, derived, other)
    assert transfer(storage, Operation(pool_transfers=sides)) == [4, 8, 10]
    assert all(map(loaded, (main, derived, other)))
    begun = [place for event, place in store.events if event == "begin"]
    assert begun == [0, 4, 0, 4, 0, 8, 8, 4, 8]


def test_main_pool_without_bytes_reads_other_pools_ahead(store: Recorded, meter: RateMeter) -> None:
    derived = stored(store, meter, "indexer")
    sides = [SimpleNamespace(name="indexer", indices_from_pool="kv")]
    storage = Storage(store, LogicalPool(store), derived)
    assert transfer(storage, Operation(pool_transfers=sides)) == [4, 8, 10]
    assert loaded(derived)
    assert [place for event, place in store.events if event == "begin"] == [0, 4, 8]


class Pending:
    """A ticket whose I/O is in flight: after 0.2 seconds it writes to `memory`, also if it was
    cancelled.
    """

    def __init__(self, memory: Any) -> None:
        self.cancelled, self.done, self._memory = False, Event(), memory
        self._timer = Timer(0.2, self._write)
        self._timer.start()

    def _write(self) -> None:
        self._memory[:] = 0xA5
        self.done.set()

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self, timeout: float | None = None) -> Any:
        assert self.done.wait(WAIT if timeout is None else timeout)
        return SimpleNamespace(pages=0, reason="cancelled")


@pytest.mark.parametrize(
    ("cause", "pages"), [("terminated", 4), ("missing page", 3), ("damaged page", 0)]
)
def test_memory_is_not_written_after_transfer(
    store: Recorded, meter: RateMeter, cause: str, pages: int
) -> None:
    """No read may write to the memory of incomplete pages after the transfer has ended, because
    SGLang then reuses this memory.
    """
    pool = stored(store, meter)
    storage, operation = Storage(store, pool), Operation()
    store.tickets[4] = pending = Pending(pool._host.memory[:, TO[4] : TO[8]])
    if cause == "terminated":
        store.on_end = lambda: setattr(operation, "terminated", True)
    elif cause == "missing page":
        store.call("delete", lambda core: core.delete(pool.scopes[0], KEYS[3:]), None)
    else:
        damaged = SimpleNamespace(pages=0, reason="checksum")
        store.tickets[0] = SimpleNamespace(wait=lambda timeout=None: damaged)
    assert transfer(storage, operation) == [pages] * 3
    assert pending.cancelled
    assert pending.done.is_set()
    assert ("abandon", 4) in store.events
    assert ("begin", 8) not in store.events
    # The pages that were read ahead, and that SGLang did not ask for, are not counted.
    counts = meter.counts()
    missed = sum(count for name, count in counts.items() if name.startswith("missed_pages"))
    assert (counts.get("loaded_pages", 0), missed) == (
        pages,
        0 if pages == BATCH else BATCH - pages,
    )


class Slow:
    """A ticket that ends 0.2 seconds after it is cancelled, when its I/O in flight has written to
    `memory`; otherwise it lasts.
    """

    def __init__(self, memory: Any) -> None:
        self.cancelled, self.done, self._memory = False, Event(), memory

    def cancel(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            Timer(0.2, self._write).start()

    def _write(self) -> None:
        self._memory[:] = 0xA5
        self.done.set()

    def wait(self, timeout: float | None = None) -> Any:
        ended = self.done.wait(WAIT if timeout is None else timeout)
        return SimpleNamespace(pages=0, reason="cancelled", ok=[]) if ended else None


@pytest.mark.parametrize("known_pace", [False, True])
def test_termination_cancels_current_batch(
    store: Recorded, meter: RateMeter, known_pace: bool
) -> None:
    """SGLang no longer waits for the operation, and a flush of its cache waits for the thread."""
    pool = stored(store, meter)
    storage, operation = Storage(store, pool), Operation()
    if known_pace:
        storage.paces.record("kv", BATCH, 0.001)
    store.tickets[0] = slow = Slow(pool._host.memory[:, TO[0] : TO[4]])
    Timer(0.3, lambda: setattr(operation, "terminated", True)).start()
    began = perf_counter()
    assert transfer(storage, operation) == [0, 0, 0]
    assert 0.3 < perf_counter() - began < WAIT / 6
    assert slow.done.is_set()
    # The memory is SGLang's again: nothing may write to it.
    pool._host.memory[:, TO] = 0
    sleep(0.3)
    assert not pool._host.memory[:, TO].any()
    assert ("begin", 8) not in store.events


def test_termination_cancels_reads_after_transfer(store: Recorded, meter: RateMeter) -> None:
    """SGLang reads windows and states after the batches of the main pool."""
    states, operation = stored(store, meter, "mamba"), Operation()
    told = Transfer.of(operation, TOKENS)
    assert told is not None
    reads = ReadAhead(told, store, Paces())
    reads.close()
    assert reads.get(states, KEYS[:4], slots(*TO[:4])) == 4
    store.tickets[0] = slow = Slow(states._host.memory[:, TO[0] : TO[4]])
    operation.terminated = True
    assert reads.get(states, KEYS[:4], slots(*TO[:4])) == 0
    assert slow.done.is_set()
    assert [place for event, place in store.events if event == "begin"] == [0, 0]


def test_terminated_operation_is_not_read_ahead(store: Recorded, meter: RateMeter) -> None:
    pool = stored(store, meter)
    storage = Storage(store, pool)
    storage.hook = lambda operation: setattr(operation, "terminated", True)
    assert transfer(storage, Operation()) == [4, 4, 4]
    assert store.events == [("begin", 0), ("end", 0)]
    assert loaded(pool, 4)


def test_unexpected_batch_is_read_when_it_is_asked_for(store: Recorded, meter: RateMeter) -> None:
    pool = stored(store, meter)
    reads = ReadAhead(Transfer.of(Operation(), TOKENS), store, Paces())  # type: ignore[arg-type]
    assert reads.get(pool, KEYS[:4], slots(*TO[:4])) == 4
    # The positions of this batch differ from the positions that the operation has for the batch.
    assert reads.get(pool, KEYS[4:8], slots(*TO[6:10])) == 4
    memory = pool._host.memory
    assert np.array_equal(memory[:, TO[6:10]], memory[:, FROM[4:8]])
    # The keys of this batch do not follow the keys of the previous batch.
    assert reads.get(pool, KEYS[:2], slots(*TO[:2])) == 2
    begun = [event for event in store.events if event[0] != "end"]
    assert begun == [("begin", 0), ("begin", 4), ("abandon", 4), ("begin", 4), ("begin", 0)]
    reads.close()


def test_read_ahead_of_previous_weights_is_abandoned(store: Recorded, meter: RateMeter) -> None:
    pool = stored(store, meter)
    storage = Storage(store, pool)

    def flush(operation: Operation) -> None:
        if ("begin", 4) in store.events:
            pool.describe(ENGINE.at(b"epoch"))

    storage.hook = flush
    assert transfer(storage, Operation()) == [4, 4, 4]
    assert meter.counts()["missed_pages:not_found"] == 4


def test_batch_read_ahead_is_missed_after_update(store: Recorded, meter: RateMeter) -> None:
    pool = stored(store, meter)
    storage = Storage(store, pool)
    storage.hook = lambda operation: setattr(store, "is_stale", ("begin", 4) in store.events)
    assert transfer(storage, Operation()) == [4, 4, 4]
    assert meter.counts()["missed_pages:before_reset"] == 4
    assert meter.counts()["loaded_pages"] == 4


def test_store_that_closes_during_transfer_costs_hits_only(
    store: Recorded, meter: RateMeter
) -> None:
    pool = stored(store, meter)
    storage = Storage(store, pool)
    storage.hook = lambda operation: store.close() if store.events else None
    assert transfer(storage, Operation())[-1] in (4, 8)
    assert "errors" not in meter.counts()


def test_leases_last_until_pages_read_ahead_are_taken(tmp_path: Path, meter: RateMeter) -> None:
    tiers = {"tiers": [f"disk {tmp_path}/store 640MiB"], "gate": "always"}
    cache = SGLangCacheStore(Settings.parse(tiers), meter)
    pool = stored(cache, meter)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(pool.leading, KEYS, []).result(WAIT) == PAGES
    storage, leased = Storage(cache, pool), []
    storage.hook = lambda operation: leased.append(len(cache._leased))
    assert transfer(storage, Operation()) == [4, 8, 10]
    assert loaded(pool)
    assert leased == [1, 1, 1]
    assert not cache._leased
    cache.close()


def test_duration_of_batch_is_estimated_from_measured_paces() -> None:
    paces = Paces()
    assert paces.expected("kv", 128) == inf
    paces.record("kv", 100, 1.0)
    paces.record("kv", 50, 1.5)
    assert paces.expected("kv", 200) == pytest.approx(4.0)
    assert paces.expected("indexer", 1) == inf


@pytest.mark.parametrize("indices", [None, slots(*TO)[1:], slots(*TO) + 1])
def test_operation_without_whole_pages_is_not_read_ahead(
    store: Recorded, meter: RateMeter, indices: Any
) -> None:
    assert Transfer.of(Operation(host_indices=indices), TOKENS) is None
    storage = Storage(store, stored(store, meter))
    storage.on_transfer_begin(None)
    assert storage.reads is None
    storage.on_transfer_end()


def test_storage_learns_of_end_of_failed_transfer() -> None:
    ended: list[bool] = []
    failing = SimpleNamespace(
        on_transfer_begin=lambda told: 1 / 0,
        on_transfer_end=lambda: ended.append(True),
        read=lambda operation, hashes, indices: {}[hashes[0]],
    )
    with pytest.raises(KeyError):
        transfer(failing, Operation())
    assert ended == [True]


def test_transfers_of_other_storage_are_unchanged() -> None:
    other = SimpleNamespace(read=lambda operation, hashes, indices: len(hashes))
    assert transfer(other, Operation()) == [4, 8, 10]


def test_unknown_controller_is_not_wrapped() -> None:
    known = Controller._page_transfer
    assert transfer_obstacle(Controller, READ_IN[-1]) == ""
    assert "0.6.0 is not among 0.5.22" in transfer_obstacle(Controller, "0.6.0")
    assert "0.5.23.post1 is not" in transfer_obstacle(Controller, "0.5.23.post1")
    assert "object has no _page_transfer" in transfer_obstacle(object, READ_IN[0])

    class Changed:
        def _page_transfer(self, operation: Any, batch: int) -> None: ...

    assert "takes ('self', 'operation', 'batch')" in transfer_obstacle(Changed, READ_IN[0])
    assert Transfers().watch(Controller, "0.6.0")
    assert Controller._page_transfer is known


def test_method_is_wrapped_once() -> None:
    transfers, wrapped = Transfers(), cast(Any, type("Wrapped", (Controller,), {}))
    assert transfers.watch(wrapped, READ_IN[0]) == ""
    method = wrapped._page_transfer
    assert transfers.watch(wrapped, READ_IN[0]) == ""
    assert wrapped._page_transfer is method


def test_transfer_sources_were_reviewed_in_every_tested_version() -> None:
    """Before adding a version to `READ_IN`, read its sources: the module
    `ritornello.sglang.transfers` says what must hold in them.
    """
    assert set(TESTED) <= set(READ_IN)
