"""Moves between stores and the memory of an emulated device.

`make test-device` runs these tests with a package that has an emulated device, and sets
RITORNELLO_TEST_DEVICE=emulated. Without this variable the tests are skipped.
"""

import ctypes
import gc
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support import Bytes, blank, keys_of, open_small, pages_of
from test_hostile_kernel import inject

import ritornello as rt

if os.environ.get("RITORNELLO_TEST_DEVICE") != "emulated":
    pytest.skip("these tests need an emulated device: `make test-device`", allow_module_level=True)

# Bytes of pinned memory. A save moves its pages in windows of at most an eighth of this memory, a
# load in windows of at most a twentieth; a page that is longer is a window alone.
STAGING = 8 << 20
# Maximum bytes of a save's window.
WINDOW = STAGING // 8
BLOCKS = 29
LAYERS = 3
# A filler: a test fills memory with this byte, to find out which bytes a move has written.
UNTOUCHED = 0x3C


@dataclass
class Tensors:
    """KV memory in NumPy arrays. A page is in one block, and consists of spans, parts that are each
    contiguous in memory. `views`: for each span, an array of shape (blocks, bytes of the span).
    """

    arrays: list[Bytes]
    views: list[Bytes]

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        return [(view.ctypes.data, view.shape[1], view.strides[0]) for view in self.views]

    @property
    def page_bytes(self) -> int:
        return sum(view.shape[1] for view in self.views)

    def pool(self, device: rt.Device, way: str = "length") -> rt.DevicePool:
        return device.pool(self.spans, len(self.views[0]), owner=self.arrays, way=way)

    def read(self, blocks: Sequence[int]) -> Bytes:
        """Returns the pages in `blocks`, of shape (len(blocks), page_bytes)."""
        return np.concatenate([view[list(blocks)] for view in self.views], axis=1)

    def write(self, blocks: Sequence[int], pages: Bytes) -> None:
        first = 0
        for view in self.views:
            view[list(blocks)] = pages[:, first : first + view.shape[1]]
            first += view.shape[1]

    def fill(self, byte: int) -> None:
        for array in self.arrays:
            array[:] = byte

    def copies(self) -> list[Bytes]:
        return [array.copy() for array in self.arrays]

    def is_equal(self, copies: Sequence[Bytes]) -> bool:
        return all(map(np.array_equal, self.arrays, copies))


def separate(piece: int, blocks: int = BLOCKS) -> Tensors:
    """One tensor for each layer, with `piece` bytes for each block."""
    arrays = [_random((blocks, piece), layer) for layer in range(LAYERS)]
    return Tensors(arrays, arrays)


def planes(piece: int, blocks: int = BLOCKS) -> Tensors:
    """One tensor for each layer, with the keys of all blocks before the values of all blocks. Each
    block has `piece` bytes of keys and `piece` bytes of values.
    """
    arrays = [_random((2, blocks, piece), layer) for layer in range(LAYERS)]
    return Tensors(arrays, [plane for array in arrays for plane in array])


def block_first(piece: int, blocks: int = BLOCKS) -> Tensors:
    """One tensor whose blocks have all layers, of `piece` bytes each, and a gap that belongs to no
    page.
    """
    array = _random((blocks, LAYERS * piece + 96), 0)
    views = [array[:, layer * piece : (layer + 1) * piece] for layer in range(LAYERS)]
    return Tensors([array], views)


def _random(shape: tuple[int, ...], seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


Layout = Callable[[int], Tensors]
LAYOUTS: tuple[Layout, ...] = (separate, planes, block_first)
# Bytes of a span: multiples of 16, 8 and 4, and an odd number.
PIECES = (4096, 4104, 2060, 1027)


def open_emulated() -> rt.Device:
    return rt.Device.open(staging=STAGING, emulated=True)


@pytest.fixture
def device() -> rt.Device:
    return open_emulated()


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on the disk or, for the parameter `memory`, in `/dev/shm`."""
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ritornello-test-") as path:
        yield Path(path)


def slots_of(device: rt.Device, page_bytes: int, pages: int) -> rt.DeviceSlots:
    slots = device.slots(page_bytes, pages, timeout=30)
    assert slots is not None
    return slots


def memory_of(slots: rt.DeviceSlots, pages: int) -> Bytes:
    """Returns the memory of the slots, including the gaps between pages, of shape (pages,
    stride).
    """
    first, stride = slots.memory
    array = (ctypes.c_uint8 * (stride * pages)).from_address(first)
    return np.ctypeslib.as_array(array).reshape(pages, stride)


def finished(ticket: rt.Ticket) -> rt.Outcome:
    outcome = ticket.wait(60)
    assert outcome is not None
    return outcome


def complete(ticket: rt.Ticket, pages: int) -> None:
    outcome = finished(ticket)
    assert (outcome.pages, outcome.reason) == (pages, "")
    assert outcome.ok == [True] * pages


def put_all(store: rt.Store, scope: rt.Scope, keys: Sequence[bytes], pages: rt.DevicePages) -> int:
    """Repeats a put until all its pages are stored, because the pinned memory may limit the pages
    of one put. Returns the number of bytes that were written.
    """
    stored = written = 0
    deadline = time.monotonic() + 60
    while stored < len(keys):
        assert time.monotonic() < deadline, f"only {stored} pages were stored"
        outcome = finished(store.submit_put(scope, keys, pages))
        assert outcome.reason == ("" if outcome.pages == len(keys) else "staging_full")
        assert outcome.ok == [True] * outcome.pages + [False] * (len(keys) - outcome.pages)
        assert outcome.pages >= stored
        stored, written = outcome.pages, written + outcome.bytes
    return written


def is_refused(
    submit: Callable[..., rt.Ticket], keys: Sequence[bytes], pages: rt.DevicePages
) -> bool:
    """Returns whether `submit` raises InvalidError, or its ticket ends with reason "invalid"."""
    try:
        outcome = finished(submit(SCOPE, keys, pages))
    except rt.errors.InvalidError:
        return True
    return (outcome.pages, outcome.reason) == (0, "invalid")


# ---- moves


@pytest.mark.parametrize("way", ["kernel:3", "copies"])
@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_change_no_other_bytes(
    device: rt.Device, layout: Layout, piece: int, way: str
) -> None:
    """Moves whole pages, single spans, and all spans after the first, from slots into random blocks
    and back.
    """
    memory = layout(piece)
    pool, draw = memory.pool(device, way), random.Random(piece)
    assert (len(pool), pool.page_bytes) == (BLOCKS, memory.page_bytes)
    spans = len(memory.views)
    sections = [(0, spans), *((at, at + 1) for at in range(spans)), (1, spans)]
    for first, last in sections:
        blocks = draw.sample(range(BLOCKS), draw.randint(1, BLOCKS))
        part = (first * piece, last * piece)
        slots = slots_of(device, pool.page_bytes, len(blocks))
        whole = memory_of(slots, len(blocks))
        content = whole[:, : pool.page_bytes]
        content[:] = _random(content.shape, first)
        before, old = memory.copies(), memory.read(blocks)
        expected = old.copy()
        expected[:, slice(*part)] = content[:, slice(*part)]
        assert pool.pages(blocks).scatter(slots, part=part).wait()
        assert (memory.read(blocks) == expected).all(), (first, last)
        memory.write(blocks, old)
        assert memory.is_equal(before), (first, last)

        content[:] = UNTOUCHED
        filled = whole.copy()
        filled[:, slice(*part)] = old[:, slice(*part)]
        assert pool.pages(blocks).gather(slots, part=part).wait()
        assert (whole == filled).all(), (first, last)
        assert memory.is_equal(before), (first, last)


def test_one_block_fills_several_slots(device: rt.Device) -> None:
    memory = separate(4096)
    slots = slots_of(device, memory.page_bytes, 4)
    assert memory.pool(device).pages([5, 5, 2, 5]).gather(slots).wait()
    assert (memory_of(slots, 4) == memory.read([5, 5, 2, 5])).all()


def test_invalid_moves_are_refused(device: rt.Device) -> None:
    memory = separate(4096)
    pool, size = memory.pool(device), memory.page_bytes
    slots = slots_of(device, size, 2)
    before = memory.copies()
    for blocks, part, message in [
        ([BLOCKS], None, "no such block"),
        ([3, 3], None, "two pages cannot fill one block"),
        ([], None, "needs 1 to"),
        ([1, 2, 3], None, "a slot for each"),
        ([1], (0, 100), "between the tensors"),
        ([1], (4096, 4096), "between the tensors"),
        ([1], (0, size + 4096), "between the tensors"),
    ]:
        with pytest.raises(rt.errors.InvalidError, match=message):
            pool.pages(blocks).scatter(slots, part=part)
    for wrong in (slots_of(device, size + 1, 1), slots_of(open_emulated(), size, 1)):
        with pytest.raises(rt.errors.InvalidError, match="differ in device or page length"):
            pool.pages([1]).gather(wrong)
    with pytest.raises(rt.errors.InvalidError, match="no such stream"):
        pool.pages([1]).gather(slots, after=1 << 40)
    assert not device.broken
    assert memory.is_equal(before)


def test_invalid_pools_are_refused(device: rt.Device) -> None:
    array = _random((8, 4096), 0)
    at = array.ctypes.data
    for spans, blocks, way, message in [
        ([], 8, "auto", "1 to 4,096 spans"),
        ([(at, 4096, 4096)], 0, "auto", "at least one block"),
        ([(0, 4096, 4096)], 8, "auto", "needs an address"),
        ([(at, 0, 4096)], 8, "auto", "1 byte to 1 GiB"),
        ([(at, 4096, 4095)], 8, "auto", "stride"),
        ([(at, 2048, 4096), (at + 1024, 2048, 4096)], 8, "auto", "share bytes"),
        ([(at, 4096, 4096)], 8, "fastest", "way must be"),
        ([(at, 4096, 4096)], 8, "kernel:0", "way must be"),
    ]:
        with pytest.raises(rt.errors.InvalidError, match=message):
            device.pool(spans, blocks, owner=array, way=way)


def test_ways_are_measured_unless_a_way_is_named(device: rt.Device) -> None:
    memory = separate(4096)
    measured = memory.pool(device, "auto").measured
    assert {"scatter", "gather"} == {row[0] for row in measured}
    assert all(number > 0 for row in measured for number in row[1:])
    for way in ("length", "copies", "kernel:4"):
        assert memory.pool(device, way).measured == []


def test_pinned_memory_of_freed_slots_is_reused(device: rt.Device) -> None:
    def in_use() -> int:
        used = device.stats()["staging"]["in_use"]
        assert isinstance(used, int)
        return used

    assert device.stats()["staging"]["capacity"] >= STAGING
    assert device.slots(4096, (64 << 20) // 4096) is None
    half = device.stats()["staging"]["capacity"] // 2
    held = [device.slots(half, 1), device.slots(half, 1)]
    assert None not in held
    assert in_use() == 2 * half
    assert device.slots(4096, 1) is None
    threading.Timer(0.05, held.clear).start()
    assert device.slots(half, 1, timeout=30) is not None
    assert in_use() <= half


def test_memory_may_be_registered_twice(device: rt.Device) -> None:
    """A worker registers its memory again when an epoch begins, while earlier loads may run."""
    memory = separate(4096)
    first, second = memory.pool(device), memory.pool(device)
    slots = slots_of(device, memory.page_bytes, 2)
    memory_of(slots, 2)[:] = UNTOUCHED
    assert first.pages([1]).scatter(slots).wait()
    del first
    gc.collect()
    assert second.pages([2]).scatter(slots).wait()
    assert (memory.read([1, 2]) == UNTOUCHED).all()


def test_memory_lives_while_pages_refer_to_it(device: rt.Device) -> None:
    memory = separate(4096)
    alive = weakref.ref(memory.arrays[0])
    pages = memory.pool(device).pages([1])
    del memory
    gc.collect()
    slots = slots_of(device, 3 * 4096, 1)
    assert alive() is not None
    assert pages.gather(slots).wait()
    del pages
    deadline = time.monotonic() + 60
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
        device.describe()
    assert alive() is None


# ---- stores

PIECE = 20_000
PAGE = LAYERS * PIECE
# The pages fill nine windows of a save, and a tenth window in part.
PAGES = 9 * (WINDOW // PAGE) + 5
KEYS = keys_of("device", PAGES)
SCOPE = rt.Scope.opaque("device", PAGE, chained=True)


def large(layout: Callable[[int, int], Tensors] = separate) -> tuple[Tensors, list[int]]:
    """Returns memory of PAGES + 8 blocks, and PAGES of these blocks in a random order."""
    blocks = list(range(PAGES + 8))
    random.Random(7).shuffle(blocks)
    return layout(PIECE, PAGES + 8), blocks[:PAGES]


def check_stored(store: rt.Store, keys: Sequence[bytes], least: int, content: Bytes) -> None:
    """Asserts that at least `least` leading pages of `keys` are stored, and that all leading pages
    that are stored have the bytes `content`.
    """
    out = blank(len(keys), PAGE)
    got = store.get_batch(SCOPE, keys, out)
    assert got >= least
    assert (out[:got] == content[:got]).all()


def test_put_and_get_move_every_byte(device: rt.Device, folder: Path) -> None:
    """Puts pages from blocks of one layout, and gets them into blocks of another layout."""
    memory, blocks = large()
    content = memory.read(blocks)
    before = memory.copies()
    target, places = large(block_first)
    places.reverse()
    target.fill(UNTOUCHED)
    with open_small(folder / "kv") as store:
        pages = memory.pool(device).pages(blocks)
        assert put_all(store, SCOPE, KEYS, pages) == PAGES * PAGE
        again = finished(store.submit_put(SCOPE, KEYS, pages))
        assert (again.pages, again.bytes, again.reason) == (PAGES, 0, "")
        assert memory.is_equal(before)
        out = blank(PAGES, PAGE)
        assert store.get_batch(SCOPE, KEYS, out) == PAGES
        assert (out == content).all()
        got = finished(store.submit_get(SCOPE, KEYS, target.pool(device).pages(places)))
        assert (got.pages, got.bytes, got.reason) == (PAGES, PAGES * PAGE, "")
        assert got.ok == [True] * PAGES
    assert (target.read(places) == content).all()
    target.write(places, np.full_like(content, UNTOUCHED))
    assert all((array == UNTOUCHED).all() for array in target.arrays)


def test_pages_of_host_memory_load_into_blocks(device: rt.Device, store: rt.Store) -> None:
    memory, blocks = large(lambda piece, blocks: planes(piece // 2, blocks))
    content = pages_of(KEYS, PAGE)
    assert store.put_batch(SCOPE, KEYS, content) == PAGES
    complete(store.submit_get(SCOPE, KEYS, memory.pool(device, "auto").pages(blocks)), PAGES)
    assert (memory.read(blocks) == content).all()


def test_only_leading_pages_are_delivered(device: rt.Device, store: rt.Store) -> None:
    memory, blocks = large()
    pages = memory.pool(device).pages(blocks)
    # The stored pages end inside a window of the load, a twentieth of the pinned memory.
    stored = 5 * (WINDOW // PAGE) + 4
    for name, chained in (("chained", True), ("single", False)):
        scope = rt.Scope.opaque(name, PAGE, chained=chained)
        keys = keys_of(name, PAGES)
        assert store.put_batch(scope, keys[:stored], pages_of(keys[:stored], PAGE)) == stored
        if not chained:
            assert store.put_batch(scope, keys[stored + 1 :][:4], pages_of(keys[:4], PAGE)) == 4
        memory.fill(UNTOUCHED)
        got = finished(store.submit_get(scope, keys, pages))
        assert (got.pages, got.bytes, got.reason) == (stored, stored * PAGE, "not_found")
        assert got.ok == [True] * stored + [False] * (PAGES - stored)
        assert (memory.read(blocks[:stored]) == pages_of(keys[:stored], PAGE)).all()
        others = sorted(set(range(PAGES + 8)) - set(blocks))
        assert (memory.read(others) == UNTOUCHED).all()
        none = keys_of("never stored", 3)
        got = finished(store.submit_get(scope, none, memory.pool(device).pages([1, 2, 3])))
        assert (got.pages, got.bytes, got.reason) == (0, 0, "not_found")


def test_put_beyond_pinned_memory_stores_leading_pages(device: rt.Device, store: rt.Store) -> None:
    memory, blocks = large()
    content = memory.read(blocks)
    pages = memory.pool(device).pages(blocks)
    put = finished(store.submit_put(SCOPE, KEYS, pages))
    assert put.reason == "staging_full"
    assert 0 < put.pages * PAGE <= STAGING // 2
    assert store.probe(SCOPE, KEYS) == put.pages
    assert put_all(store, SCOPE, KEYS, pages) == (PAGES - put.pages) * PAGE
    check_stored(store, KEYS, PAGES, content)
    assert device.stats()["staging"]["in_use"] == 0


def test_put_continues_a_stored_prefix(device: rt.Device, store: rt.Store) -> None:
    memory, blocks = large()
    content = memory.read(blocks)
    pool, half = memory.pool(device), WINDOW // PAGE
    complete(store.submit_put(SCOPE, KEYS[:half], pool.pages(blocks[:half])), half)
    tail = slice(half, 2 * half)
    ticket = store.submit_put(SCOPE, KEYS[tail], pool.pages(blocks[tail]), parent=KEYS[half - 1])
    complete(ticket, half)
    out = blank(2 * half, PAGE)
    assert store.get_batch(SCOPE, KEYS[: 2 * half], out) == 2 * half
    assert (out == content[: 2 * half]).all()


def test_invalid_gets_and_puts_are_refused(device: rt.Device, store: rt.Store) -> None:
    memory = separate(PIECE)
    pool, keys = memory.pool(device), KEYS[:4]
    right = pool.pages([1, 2, 3, 4])
    complete(store.submit_put(SCOPE, keys, right), 4)
    before = memory.copies()
    for submit in (store.submit_put, store.submit_get):
        for number in (3, 5):
            with pytest.raises(rt.errors.InvalidError, match="one page per key"):
                submit(SCOPE, KEYS[:number], right)
    # A put does not read the blocks of pages that are stored already, so it can refuse only the
    # blocks of other pages.
    assert is_refused(store.submit_put, KEYS[4:8], pool.pages([1, 2, 3, BLOCKS]))
    assert is_refused(store.submit_get, keys, pool.pages([1, 2, 3, BLOCKS]))
    assert is_refused(store.submit_get, keys, pool.pages([1, 2, 2, 3]))
    with pytest.raises(OverflowError):
        pool.pages([-1])
    with pytest.raises(rt.errors.InvalidError, match="no such stream"):
        store.submit_put(SCOPE, keys, right, after=1 << 40)
    complete(store.submit_get(SCOPE, [], pool.pages([])), 0)
    complete(store.submit_put(SCOPE, [], pool.pages([])), 0)
    assert memory.is_equal(before)


def test_page_larger_than_pinned_memory_is_not_moved(device: rt.Device, store: rt.Store) -> None:
    array = _random((2, 12 << 20), 3)
    memory, keys = Tensors([array], [array]), keys_of("large", 2)
    scope = rt.Scope.opaque("large", 12 << 20, chained=True)
    pages, before = memory.pool(device).pages([0, 1]), memory.copies()
    put = finished(store.submit_put(scope, keys, pages))
    assert put.pages == 0
    assert put.reason in ("staging", "staging_full")
    assert store.put_batch(scope, keys[:1], array[:1]) == 1
    got = finished(store.submit_get(scope, keys, pages))
    assert (got.pages, got.reason) == (0, "staging")
    assert memory.is_equal(before)


def test_past_deadline_moves_nothing(device: rt.Device, store: rt.Store) -> None:
    memory, blocks = large()
    pages = memory.pool(device).pages(blocks)
    put = finished(store.submit_put(SCOPE, KEYS, pages, timeout=0))
    assert (put.pages, put.reason) == (0, "deadline")
    assert store.probe(SCOPE, KEYS) == 0
    put_all(store, SCOPE, KEYS, pages)
    memory.fill(UNTOUCHED)
    got = finished(store.submit_get(SCOPE, KEYS, pages, timeout=0))
    assert (got.pages, got.reason) == (0, "deadline")
    assert all((array == UNTOUCHED).all() for array in memory.arrays)


def test_load_ends_at_its_deadline_while_pinned_memory_is_full(
    device: rt.Device, store: rt.Store
) -> None:
    memory = separate(PIECE)
    pages = memory.pool(device).pages([1, 2, 3, 4])
    complete(store.submit_put(SCOPE, KEYS[:4], pages), 4)
    content = memory.read([1, 2, 3, 4])
    memory.fill(UNTOUCHED)
    full = device.slots(device.stats()["staging"]["capacity"], 1, timeout=30)
    assert full is not None
    began = time.monotonic()
    got = finished(store.submit_get(SCOPE, KEYS[:4], pages, timeout=0.2))
    assert (got.pages, got.reason) == (0, "deadline")
    assert 0.1 < time.monotonic() - began < 20
    put = finished(store.submit_put(SCOPE, keys_of("full", 4), pages))
    assert (put.pages, put.reason) == (0, "staging_full")
    del full
    assert all((array == UNTOUCHED).all() for array in memory.arrays)
    complete(store.submit_get(SCOPE, KEYS[:4], pages), 4)
    assert (memory.read([1, 2, 3, 4]) == content).all()


@pytest.mark.parametrize("seconds", [0.0005, 0.001, 0.002, 0.004])
def test_pages_of_load_with_short_deadline_are_right(
    device: rt.Device, where: Path, seconds: float
) -> None:
    memory, blocks = large()
    content = memory.read(blocks)
    pages = memory.pool(device).pages(blocks)
    with open_small(where) as store:
        put_all(store, SCOPE, KEYS, pages)
        memory.fill(UNTOUCHED)
        got = finished(store.submit_get(SCOPE, KEYS, pages, timeout=seconds))
        assert got.reason == ("" if got.pages == PAGES else "deadline")
        assert (memory.read(blocks[: got.pages]) == content[: got.pages]).all()
        # After the end of a get the engine writes to the blocks, because it computes the remaining
        # pages itself. The get must not write to a block any longer.
        memory.fill(UNTOUCHED)
        time.sleep(0.05)
        assert all((array == UNTOUCHED).all() for array in memory.arrays)


# Gets all pages from a disk that answers half a second late, with a deadline before its answer.
LATE_DISK = """
import sys, time
from support import open_small, pages_of
from test_device import KEYS, PAGES, SCOPE, UNTOUCHED, finished, large, open_emulated
memory, blocks = large()
pages = memory.pool(open_emulated()).pages(blocks)
with open_small(sys.argv[1]) as store:
    memory.fill(UNTOUCHED)
    began = time.monotonic()
    got = finished(store.submit_get(SCOPE, KEYS, pages, timeout=0.2))
    seconds = time.monotonic() - began
    assert got.reason == "deadline" and got.pages < PAGES, got
    assert 0.4 < seconds < 10, seconds
    content = pages_of(KEYS, memory.page_bytes)
    assert (memory.read(blocks[: got.pages]) == content[: got.pages]).all()
    # The engine now computes all pages itself, so a late answer of the disk must fill no block.
    memory.fill(UNTOUCHED)
    time.sleep(1.5)
    assert all((array == UNTOUCHED).all() for array in memory.arrays)
    got = finished(store.submit_get(SCOPE, KEYS, pages, timeout=60))
    assert (got.pages, got.reason) == (PAGES, "")
    assert (memory.read(blocks) == content).all()
"""


def test_disk_that_answers_after_the_deadline_fills_no_block(where: Path) -> None:
    with open_small(where) as store:
        assert store.put_batch(SCOPE, KEYS, pages_of(KEYS, PAGE)) == PAGES
    command = [*inject("io_uring_enter:delay_exit=500000"), sys.executable, "-c", LATE_DISK]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, str(where)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_cancelled_ticket_writes_to_no_block_after_its_end(device: rt.Device, where: Path) -> None:
    """Half of the puts and gets are cancelled. The pages that a ticket reports have the right
    bytes, and a get writes to no block after its ticket is done.
    """
    memory, blocks = large()
    content = memory.read(blocks)
    pages = memory.pool(device).pages(blocks)
    names = [keys_of(f"cancelled {n}", PAGES) for n in range(8)]
    with open_small(where, capacity="256MiB") as store:
        puts = [store.submit_put(SCOPE, keys, pages) for keys in names]
        for ticket in puts[4:]:
            ticket.cancel()
        stored = [finished(ticket) for ticket in puts]
        assert all(outcome.reason in ("", "staging_full") for outcome in stored[:4])
        for keys, outcome in zip(names, stored, strict=True):
            assert outcome.reason in ("", "cancelled", "staging_full")
            assert (outcome.pages == PAGES) == (outcome.reason == "")
            check_stored(store, keys, outcome.pages, content)
        put_all(store, SCOPE, names[0], pages)
        for number in range(8):
            memory.fill(UNTOUCHED)
            ticket = store.submit_get(SCOPE, names[0], pages)
            if number % 2:
                ticket.cancel()
            loaded = finished(ticket)
            assert loaded.reason == "" or (number % 2 and loaded.reason == "cancelled")
            count = loaded.pages
            assert (memory.read(blocks[:count]) == content[:count]).all()
            memory.fill(UNTOUCHED)
            slots = slots_of(device, PAGE, 1)
            memory_of(slots, 1)[:, :PAGE] = UNTOUCHED
            assert memory.pool(device).pages([0]).scatter(slots).wait()
            assert all((array == UNTOUCHED).all() for array in memory.arrays)


def test_puts_and_gets_share_pinned_memory(device: rt.Device, where: Path) -> None:
    """Six puts and six gets run concurrently, each with more bytes than the pinned memory has."""
    source, blocks = large()
    content = source.read(blocks)
    targets = [large(block_first) for _ in range(6)]
    pages = source.pool(device).pages(blocks)
    outs = [target.pool(device).pages(places) for target, places in targets]
    with open_small(where, capacity="256MiB") as store:
        put_all(store, SCOPE, KEYS, pages)
        gets, puts = [], []
        for number, out in enumerate(outs):
            targets[number][0].fill(UNTOUCHED)
            keys = keys_of(f"shared {number}", PAGES)
            puts.append((keys, store.submit_put(SCOPE, keys, pages)))
            gets.append(store.submit_get(SCOPE, KEYS, out))
        for ticket in gets:
            complete(ticket, PAGES)
        for keys, ticket in puts:
            put = finished(ticket)
            assert put.reason == ("" if put.pages == PAGES else "staging_full")
            check_stored(store, keys, put.pages, content)
    assert all((target.read(places) == content).all() for target, places in targets)


def test_blocks_may_change_after_ticket_order_returns(device: rt.Device, store: rt.Store) -> None:
    memory, blocks = large()
    content = memory.read(blocks)
    ticket = store.submit_put(SCOPE, KEYS, memory.pool(device).pages(blocks))
    assert ticket.order(None)
    memory.fill(UNTOUCHED)
    put = finished(ticket)
    assert put.pages > 0
    check_stored(store, KEYS, put.pages, content)
    assert ticket.order(None, timeout=0), "`order` of a done ticket must return true immediately"
    assert store.submit_get(SCOPE, KEYS, memory.pool(device).pages(blocks)).order(None)


def test_dropped_device_completes_its_put(store: rt.Store) -> None:
    device = open_emulated()
    memory, blocks = large()
    content = memory.read(blocks)
    ticket = store.submit_put(SCOPE, KEYS, memory.pool(device).pages(blocks))
    del device, memory
    gc.collect()
    put = finished(ticket)
    assert put.pages > 0
    check_stored(store, KEYS, put.pages, content)


# Frees memory right after a put from this memory was refused, or ended at its deadline: copies from
# the memory may still be in flight.
FREEING = """
import sys, numpy as np, ritornello as rt
device = rt.Device.open(staging=256 << 20, emulated=True)
scope = rt.Scope.opaque("freed", 1 << 20, chained=True)
with rt.Store.open(sys.argv[1], "64MiB", segment_bytes=4 << 20) as store:
    for turn in range(20):
        keys = [b"%16d" % (turn * 64 + page) for page in range(64)]
        array = np.ones((64, 1 << 20), np.uint8)
        span = (array.ctypes.data, 1 << 20, 1 << 20)
        pages = device.pool([span], 64, owner=array, way="copies").pages(range(64))
        try:
            store.submit_put(scope, keys[turn % 2 :], pages, timeout=0).wait()
        except rt.errors.InvalidError:
            pass
        del array, pages
        store.submit_get(scope, [], [])
"""


def test_memory_lives_until_gathers_of_ended_puts_end(where: Path) -> None:
    command = [sys.executable, "-c", FREEING, str(where)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_forked_child_is_refused(device: rt.Device) -> None:
    memory = separate(1027)
    pool = memory.pool(device)
    slots = slots_of(device, pool.page_bytes, 1)
    calls: list[Callable[[], object]] = [
        lambda: device.slots(pool.page_bytes, 1),
        lambda: memory.pool(device),
        lambda: pool.pages([1]).scatter(slots),
        lambda: pool.pages([1]).gather(slots),
    ]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in calls:
                with pytest.raises(rt.errors.RitornelloError):
                    call()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_closing_store_ends_tickets(device: rt.Device, where: Path) -> None:
    memory, blocks = large()
    content = memory.read(blocks)
    pages = memory.pool(device).pages(blocks)
    names = [keys_of(f"closing {n}", PAGES) for n in range(6)]
    store = open_small(where, capacity="256MiB")
    tickets = [store.submit_put(SCOPE, keys, pages) for keys in names]
    store.close()
    assert all(ticket.done() for ticket in tickets)
    memory.fill(UNTOUCHED)
    with open_small(where, capacity="256MiB") as store:
        for keys, ticket in zip(names, tickets, strict=True):
            outcome = finished(ticket)
            assert outcome.reason in ("", "closed", "staging_full")
            check_stored(store, keys, outcome.pages, content)
