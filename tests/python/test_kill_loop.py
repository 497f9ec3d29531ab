"""Processes are killed several times per second while several processes work on one store.

`RITORNELLO_KILL_SECONDS=600 make test-python` runs each loop for ten minutes instead of a few
seconds; `RITORNELLO_KILL_SEED` is the seed of the random delays and choices.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_device import or_skip, require_io_uring
from test_sigkill import (
    LONG_PAGE_BYTES,
    LONG_SCOPE,
    PAGE_BYTES,
    SCOPE,
    STRIPED_PAGE_BYTES,
    STRIPED_SCOPE,
    keys_of,
    page_of,
)

import ritornello as rt
from servers.child import owner_of
from servers.loop_device import Disk, Throttle

SECONDS = float(os.environ.get("RITORNELLO_KILL_SECONDS", "4"))
SEED = int(os.environ.get("RITORNELLO_KILL_SEED", "0"))
SEGMENT = 4 << 20
# If this is the last argument of `CHILD` and of `shape_of`, every fifth sequence has long pages,
# and every sixtieth has one striped page.
LONG_PAGES = "long"
# Allocated bytes of a store of 2 GiB at which a loop begins a new store: the loop would fail if the
# store evicted flushed pages.
ALMOST_FULL = 512 << 20
# A program that puts sequences of pages one after another, and reads old sequences. Flushes after
# every third sequence, and then prints this sequence's name and number of stored pages.
CHILD = """
import random, sys
sys.path.insert(0, {here!r})
from test_sigkill import keys_of, page_of
from test_kill_loop import shape_of
import ritornello as rt
from ritornello.errors import RitornelloError
path, capacity, name = sys.argv[1].split(","), sys.argv[2] or None, int(sys.argv[3])
long = sys.argv[4]
rng = random.Random(name)
with rt.Store.open(path, capacity=capacity, segment_bytes=4 << 20) as store:
    print("open", flush=True)
    while True:
        name += 1
        scope, length, pages = shape_of(name, long)
        keys = keys_of(name, pages)
        earlier = rng.randrange(max(0, name - 99), name + 1)
        old_scope, old_length, old_pages = shape_of(earlier, long)
        old = keys_of(earlier, old_pages)
        out = [bytearray(old_length) for _ in old]
        try:
            stored = store.put_batch(scope, keys, [page_of(key, length) for key in keys])
            if name % 3 == 0:
                store.flush()
                print("flushed", name, stored, flush=True)
            got = store.get_batch(old_scope, old, out)
        except RitornelloError as error:
            # If the owner, another process, was killed, one call fails, and later calls succeed.
            if store.stats()["poisoned"]:
                print("poisoned", error, flush=True)
            continue
        for key, page in zip(old[:got], out):
            if bytes(page) != page_of(key, old_length):
                print("wrong", name, flush=True)
"""


def shape_of(name: int, long_pages: str) -> tuple[rt.Scope, int, int]:
    """Returns the scope of sequence `name`, the bytes of each of its pages, and their number."""
    # The numbers of striped pages are multiples of three, so that children flush after each.
    if long_pages == LONG_PAGES and name % 60 == 3:
        return STRIPED_SCOPE, STRIPED_PAGE_BYTES, 1
    if long_pages == LONG_PAGES and name % 5 == 0:
        return LONG_SCOPE, LONG_PAGE_BYTES, 1 + name % 7
    return SCOPE, PAGE_BYTES, 1 + name % 7


class Loop:
    """Two children that work on one store in `volumes` directories, and the pages that children had
    flushed before they were killed. On several volumes some pages are long, and some are striped.
    """

    def __init__(self, path: Path, capacity: str, volumes: int = 1) -> None:
        self.capacity = capacity
        self.volumes = volumes
        self.long_pages = LONG_PAGES if volumes > 1 else ""
        self.next = 0
        self.kills = 0
        # The number of striped pages that children had flushed, in all stores.
        self.striped = 0
        self.begin(path)

    def begin(self, path: Path) -> None:
        """Starts both children on a new store at `path`."""
        self.path = path
        further = range(1, self.volumes)
        self.paths = [path, *(path.with_name(f"{path.name}-{at}") for at in further)]
        # The number of flushed pages, by sequence name.
        self.flushed: dict[int, int] = {}
        self.children = [self.start() for _ in range(2)]
        self.opened = [False, False]

    def end(self) -> None:
        """Kills both children."""
        while self.children:
            self.kill(0)
            del self.children[0]

    def start(self) -> subprocess.Popen[str]:
        """Starts a child with unique sequence names."""
        # A multiple of 60, so that the third sequence of each child may be a striped page.
        self.next += 12_000
        code = CHILD.format(here=str(Path(__file__).parent))
        words = [sys.executable, "-c", code, ",".join(map(str, self.paths))]
        words += [self.capacity, str(self.next), self.long_pages]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def wait(self, at: int, delay: float, *, opened: bool) -> None:
        """Lets child number `at` work for `delay` seconds. With `opened`, first waits until the
        child has opened its store.
        """
        stdout = self.children[at].stdout
        assert stdout is not None
        if opened and not self.opened[at]:
            assert stdout.readline() == "open\n"
            self.opened[at] = True
        time.sleep(delay)

    def kill(self, at: int) -> None:
        """Kills child number `at`, and reads its output."""
        child = self.children[at]
        child.send_signal(signal.SIGKILL)
        assert child.stdout is not None
        with child.stdout:
            lines = child.stdout.read().splitlines(keepends=True)
        child.wait(timeout=30)
        self.kills += 1
        for line in lines:
            words = line.split()
            assert words[:1] not in (["wrong"], ["poisoned"]), line
            if line.startswith("flushed") and line.endswith("\n"):
                name, stored = int(words[1]), int(words[2])
                self.flushed[name] = stored
                if shape_of(name, self.long_pages)[0] == STRIPED_SCOPE:
                    self.striped += stored

    def check(self, names: list[int], *, evicts: bool) -> None:
        """Opens the store and checks the sequences `names`, which were flushed: all bytes that are
        read are right and, unless the store `evicts`, all flushed pages are read.
        """
        with rt.Store.open(self.paths, capacity=self.capacity, segment_bytes=4 << 20) as store:
            for name in names:
                scope, length, pages = shape_of(name, self.long_pages)
                keys = keys_of(name, pages)
                out = [bytearray(length) for _ in keys]
                got = store.get_batch(scope, keys, out)
                assert evicts or got >= self.flushed[name], (
                    f"flushed pages of sequence {name} are missing"
                )
                for key, page in zip(keys[:got], out, strict=False):
                    assert bytes(page) == page_of(key, length), f"wrong bytes in sequence {name}"


def run(loop: Loop, rng: random.Random, *, evicts: bool) -> tuple[int, int]:
    """Kills children for `SECONDS` seconds and, on several volumes, until children have flushed a
    striped page. `evicts`: the store is too small for all flushed pages. Returns the number of
    flushed sequences and of kills.
    """
    until = time.monotonic() + SECONDS
    flushed = 0
    while True:
        at = rng.randrange(2)
        # Sometimes the kill comes while the child opens the store.
        loop.wait(at, rng.uniform(0.0, 0.3), opened=rng.random() < 0.8)
        loop.kill(at)
        loop.children[at], loop.opened[at] = loop.start(), False
        if rng.random() < 0.3:
            names = list(loop.flushed)
            loop.check(rng.sample(names, min(20, len(names))), evicts=evicts)
        over = time.monotonic() >= until and (loop.volumes == 1 or loop.striped > 0)
        used = sum(blocks(path) for path in loop.paths)
        if len(loop.flushed) > 1_500 or used > ALMOST_FULL or over:
            # Begin a new store before the large store is full and evicts.
            loop.end()
            loop.check(list(loop.flushed), evicts=evicts)
            flushed += len(loop.flushed)
            if over:
                return flushed, loop.kills
            for path in loop.paths:
                shutil.rmtree(path)
            loop.begin(loop.path.with_name(str(loop.kills)))


@pytest.mark.timeout(60 + 2 * SECONDS)
@pytest.mark.parametrize(
    ("capacity", "volumes"), [("2GiB", 1), ("48MiB", 1), ("2GiB", 4), ("64MiB", 2)]
)
def test_flushed_pages_survive_repeated_kills(tmp_path: Path, capacity: str, volumes: int) -> None:
    """A large store has all flushed pages; a small store evicts continuously."""
    loop = Loop(tmp_path / "0", capacity, volumes)
    try:
        flushed, kills = run(loop, random.Random(SEED), evicts=capacity != "2GiB")
    finally:
        loop.end()
    print(
        f"{capacity}: {kills} kills, {flushed} sequences flushed before a kill and read after it, "
        f"{loop.striped} of them striped pages"
    )
    assert flushed > 0
    assert kills > 0


@pytest.mark.parametrize(("capacity", "volumes"), [("2GiB", 4), ("64MiB", 2)])
def test_striped_page_is_on_every_volume(tmp_path: Path, capacity: str, volumes: int) -> None:
    """The stores of the loops above divide the page of a striped sequence over all directories."""
    paths = [tmp_path / str(at) for at in range(volumes)]
    scope, length, pages = shape_of(3, LONG_PAGES)
    keys = keys_of(3, pages)
    with rt.Store.open(paths, capacity=capacity, segment_bytes=SEGMENT) as store:
        assert store.put_batch(scope, keys, [page_of(key, length) for key in keys]) == 1
        used = [path["used_bytes"] for path in store.stats()["paths"]]
        assert len(used) == volumes
        assert min(used) >= length // volumes - (1 << 20), used


# Keeps 16 puts in flight, so that a kill finds many writes queued.
AHEAD = """
import sys
from collections import deque
sys.path.insert(0, {here!r})
from test_sigkill import PAGE_BYTES, SCOPE, keys_of, page_of
import ritornello as rt
from ritornello.errors import RitornelloError
path, capacity, name = sys.argv[1], sys.argv[2], int(sys.argv[3])
with rt.Store.open(path, capacity=capacity, io="uring", segment_bytes=4 << 20) as store:
    print("open", flush=True)
    tickets = deque()
    while True:
        name += 1
        keys = keys_of(name, 7)
        try:
            tickets.append(store.submit_put(SCOPE, keys, [page_of(key) for key in keys]))
            if len(tickets) > 16:
                tickets.popleft().wait()
        except RitornelloError as error:
            # The call fails if the owner was killed, or if space is short until writes of a dead
            # process have ended.
            if store.stats()["poisoned"]:
                print("poisoned", error, flush=True)
"""


class SlowLoop(Loop):
    """Two children on a slow device: the first is throttled and keeps puts in flight, the second is
    not throttled and flushes.
    """

    def __init__(self, path: Path, capacity: str, throttle: Throttle) -> None:
        self.throttle = throttle
        super().__init__(path, capacity)

    def begin(self, path: Path) -> None:
        """Starts both children on a new store at `path`."""
        self.path, self.paths = path, [path]
        self.flushed: dict[int, int] = {}
        self.children = [self.start_ahead(), self.start()]
        self.opened = [False, False]

    def start_ahead(self) -> subprocess.Popen[str]:
        """Starts a throttled child with unique sequence names, which flushes no page."""
        self.next += 10_000
        code = AHEAD.format(here=str(Path(__file__).parent))
        words = [sys.executable, "-c", code, str(self.path), self.capacity, str(self.next)]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.throttle.add(child.pid)
        return child

    def end_and_check(self) -> int:
        """Kills both children, waits for the device, and checks all flushed sequences. Returns the
        number of these sequences.
        """
        self.end()
        self.throttle.limit(0)
        time.sleep(1.0)
        self.check(list(self.flushed), evicts=False)
        self.throttle.limit(2 << 20)
        return len(self.flushed)


@pytest.mark.timeout(60 + 2 * SECONDS)
def test_queued_writes_of_killed_process_damage_no_page(slow_disk: Disk) -> None:
    """A killed process leaves writes in the device's queue, and other processes put pages while
    these writes are queued.
    """
    require_io_uring(slow_disk.path / "tried")
    rng = random.Random(SEED + 2)
    with or_skip():
        throttle = Throttle([slow_disk], "loop")
    loop = None
    try:
        throttle.limit(2 << 20)
        loop = SlowLoop(slow_disk.path / "0", "384MiB", throttle)
        flushed = 0
        until = time.monotonic() + SECONDS
        while time.monotonic() < until or not loop.flushed:
            loop.wait(0, rng.uniform(0.1, 0.3), opened=True)
            loop.kill(0)
            loop.children[0], loop.opened[0] = loop.start_ahead(), False
            if rng.random() < 0.3:
                loop.kill(1)
                loop.children[1], loop.opened[1] = loop.start(), False
            # The second child puts pages while writes of the dead child are queued.
            loop.wait(1, rng.uniform(0.0, 0.3), opened=True)
            if len(loop.flushed) > 500:
                flushed += loop.end_and_check()
                shutil.rmtree(loop.path)
                loop.begin(loop.path.with_name(str(loop.kills)))
        flushed += loop.end_and_check()
    finally:
        if loop is not None:
            loop.end()
        throttle.remove()
    print(f"{loop.kills} kills, {flushed} sequences flushed before a kill and read after it")


# Puts 20 sequences, flushes, and lists the pages of the store. Then prints, every 2 ms, how many
# pages the owner has evicted since the listing began.
WITNESS = """
import sys, time
sys.path.insert(0, {here!r})
from test_sigkill import SCOPE, keys_of, page_of
from test_kill_loop import FULL, evicted, stored_keys
import ritornello as rt
path, name = sys.argv[1], int(sys.argv[2])
with rt.Store.open(path, capacity=FULL, segment_bytes=4 << 20) as store:
    for name in range(name, name + 20):
        keys = keys_of(name, 7)
        store.put_batch(SCOPE, keys, [page_of(key) for key in keys])
    store.flush()
    before = evicted(store)
    for key in stored_keys(store):
        print("page", key.hex())
    print("listed", flush=True)
    while True:
        print("evicted", evicted(store) - before, flush=True)
        time.sleep(0.002)
"""
# Capacity of a store that is soon full, and then evicts with its puts.
FULL = "24MiB"


def evicted(store: rt.Store) -> int:
    """Returns the number of pages that the owner has evicted since it became the owner."""
    return int(store.stats()["counters"]["evicted_pages"])


def stored_keys(store: rt.Store) -> list[bytes]:
    """Returns the keys of all pages of the store."""
    found: list[bytes] = []
    after = 0
    while True:
        keys, after = store.keys(SCOPE, after=after)
        found += keys
        if after == 0:
            return found


def check_witness(loop: Loop, rng: random.Random) -> tuple[int, int]:
    """Starts a process, the witness, that flushes pages, lists all pages of the store, and then
    puts no further page; and kills it. Checks that the number of listed pages that are missing
    afterwards does not exceed the evictions that the owners' counters report since the listing
    began. Returns the numbers of listed pages and of pages that were evicted since then.
    """
    loop.next += 10_000
    code = WITNESS.format(here=str(Path(__file__).parent))
    words = [sys.executable, "-c", code, str(loop.path), str(loop.next)]
    # In about half of the calls this process owns the store, and the killed witness is a client; in
    # the other calls the witness is the owner, because no other process uses the store.
    owner = None
    if rng.random() < 0.5:
        owner = rt.Store.open(loop.path, capacity=FULL, segment_bytes=SEGMENT)
    witness = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert witness.stdout is not None
        keys: list[bytes] = []
        while (line := witness.stdout.readline()) != "listed\n":
            assert line.startswith("page "), (
                f"the witness printed {line!r} instead of a page or the end of its list"
            )
            keys.append(bytes.fromhex(line.split()[1]))
        time.sleep(rng.uniform(0.0, 0.05))
        witness.kill()
        rest = witness.stdout.read().splitlines(keepends=True)
        gone = max((int(line.split()[1]) for line in rest if line.endswith("\n")), default=0)
        store = owner or rt.Store.open(loop.path, capacity=FULL, segment_bytes=SEGMENT)
        with store:
            before = 0 if owner is None else evicted(store)
            missing = 0
            out = bytearray(PAGE_BYTES)
            for key in keys:
                if store.get_batch(SCOPE, [key], [out]) == 1:
                    assert bytes(out) == page_of(key), "a listed page has wrong bytes"
                else:
                    missing += 1
            gone += evicted(store) - before
            assert missing <= gone, (
                f"{missing} of {len(keys)} listed pages are missing, but the owners counted only "
                f"{gone} evicted pages since the listing began"
            )
        loop.kills += 1
    finally:
        witness.kill()
        witness.communicate()
        if owner is not None:
            owner.close()
    return len(keys), gone


@pytest.mark.timeout(60 + 2 * SECONDS)
def test_kills_in_full_store_lose_only_evicted_pages(tmp_path: Path) -> None:
    """Kills workers while they evict, and then a process that has flushed its pages and puts no
    further page (`check_witness`).
    """
    rng = random.Random(SEED + 3)
    loop = Loop(tmp_path / "0", FULL)
    listed, excused = 0, 0
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until or not listed:
            for at in (0, 1):
                loop.wait(at, rng.uniform(0.0, 0.2), opened=rng.random() < 0.8)
            while loop.children:
                loop.kill(0)
                del loop.children[0]
            pages, gone = check_witness(loop, rng)
            listed, excused = listed + pages, excused + gone
            loop.children, loop.opened = [loop.start() for _ in range(2)], [False, False]
    finally:
        loop.end()
    print(
        f"{loop.kills} kills, {listed} pages listed after flushes, {excused} pages evicted after "
        "the listings began"
    )


# Range of the changing capacity, in MiB.
LEAST, MOST = 24, 96


def command(*words: str) -> subprocess.Popen[bytes]:
    """Starts `ritornello` with these arguments in the background."""
    line = [sys.executable, "-m", "ritornello", *words]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ask(*words: str) -> None:
    """Runs `ritornello` with these arguments, and checks that it succeeds."""
    assert command(*words).wait(timeout=300) == 0, words


def directories(store: Path) -> list[str]:
    """Returns the directories of the store that are not being drained."""
    line = [sys.executable, "-m", "ritornello", "paths", "list", str(store), "--json"]
    answer = json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
    return [path["dir"] for path in answer["paths"] if not path["draining"]]


def segments(root: Path) -> list[Path]:
    """Returns the segment files below `root`, which has files of a single store."""
    return [path for path in root.rglob("seg-*") if path.is_file()]


def blocks(root: Path) -> int:
    """Returns the allocated bytes of all files and directories below `root`."""
    total = 0
    for path in root.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def changes(rng: random.Random, loop: Loop, more: list[Path]) -> list[str]:
    """Returns the arguments of a random change of the store's capacity or directories."""
    store = str(loop.path)
    if rng.random() < 0.5:
        return ["resize", store, f"{rng.randrange(LEAST, MOST)}MiB"]
    there = directories(loop.path)
    if len(there) > 1 and rng.random() < 0.6:
        return ["paths", "drain", store, rng.choice(there)]
    return ["paths", "add", store, str(rng.choice(more))]


@pytest.mark.timeout(120 + 3 * SECONDS)
def test_kills_during_capacity_changes_damage_no_page(tmp_path: Path) -> None:
    """The owner, the client and the command that changes the store are killed while the store
    shrinks and grows, and while directories are added and drained. The next process that opens the
    store reads no wrong byte, and the files never take more space than the largest capacity.
    """
    rng = random.Random(SEED + 1)
    root = tmp_path / "store"
    more = [tmp_path / f"more-{n}" for n in range(3)]
    rt.Store.open(root, capacity=f"{MOST}MiB", segment_bytes=SEGMENT).close()
    loop = Loop(root, "")
    shaped, cut = 0, 0
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until or not (shaped and cut):
            loop.wait(0, 0.0, opened=True)
            shaper = command(*changes(rng, loop, more))
            try:
                shaper.wait(timeout=rng.uniform(0.02, 0.6))
                shaped += 1
            except subprocess.TimeoutExpired:
                cut += 1
            at = rng.randrange(2)
            if rng.random() < 0.5:
                loop.kill(at)
                loop.children[at], loop.opened[at] = loop.start(), False
            if rng.random() < 0.5:
                shaper.kill()
            shaper.wait(timeout=300)
            assert blocks(tmp_path) <= MOST << 20
        loop.end()
        names = list(loop.flushed)
        loop.capacity = f"{LEAST}MiB"
        loop.check(names, evicts=True)
        ask("resize", str(root), loop.capacity)
        assert blocks(tmp_path) <= LEAST << 20
        assert len(segments(tmp_path)) <= (LEAST << 20) // SEGMENT
        loop.check(names, evicts=True)
    finally:
        loop.end()
    print(
        f"{loop.kills} kills of workers; {shaped} changes of the store ended before their random "
        f"timeout, {cut} did not"
    )


def read(store: rt.Store, names: range) -> int:
    """Reads sequences of six pages each, and checks the bytes. Returns how many pages of all
    sequences were read: of each sequence, the leading pages up to the first missing page.
    """
    came = 0
    for name in names:
        keys = keys_of(name, 6)
        out = [bytearray(PAGE_BYTES) for _ in keys]
        got = store.get_batch(SCOPE, keys, out)
        for key, page in zip(keys[:got], out, strict=False):
            assert bytes(page) == page_of(key), f"wrong bytes in sequence {name}"
        came += got
    return came


def write(store: rt.Store, name: int) -> None:
    """Puts a sequence of six pages and checks that it is stored."""
    keys = keys_of(name, 6)
    assert store.put_batch(SCOPE, keys, [page_of(key) for key in keys]) == 6
    assert read(store, range(name, name + 1)) == 6


def test_client_survives_drain_and_resize(tmp_path: Path) -> None:
    """A connected client reads pages that a drain moved to other segments, and puts new pages."""
    root, other = tmp_path / "store", tmp_path / "other"
    names = range(120)
    with owner_of(root, capacity="64MiB", segment_bytes=4 << 20) as owner:
        with rt.Store.open(root) as client:
            assert client.role == "client"
            for name in names:
                write(client, name)
            for at, words in enumerate(
                [
                    ["resize", str(root), "128MiB"],
                    ["paths", "add", str(root), str(other)],
                    ["paths", "drain", str(root), "segments"],
                ]
            ):
                ask(*words)
                assert read(client, names) == 720, words
                write(client, 1000 + at)
            assert segments(other)
            assert not segments(root)
            ask("resize", str(root), "16MiB")
            assert 0 < read(client, names) < 720
            write(client, 2000)
            assert client.role == "client"
        owner.communicate("", timeout=60)
        assert owner.returncode == 0
    assert blocks(tmp_path) <= 16 << 20
