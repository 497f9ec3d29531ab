"""Stores on loop devices that are slow, or fail for a moment.

Needs root, loop devices and, for slow devices, io_uring and the blkio controller of cgroup v1; a
test skips and names the missing requirement. `servers/loop_device.py` makes the devices.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from device_pages import PAGE_BYTES, SMALL_PAGE, SMALL_SCOPE, put, put_small, read
from real_device import or_skip, require_io_uring
from support import blank, keys_of, pages_of

import ritornello as rt
from ritornello.errors import FatalError, RetryError, RitornelloError
from ritornello.lmcache.settings import Settings
from ritornello.lmcache.store import LMCacheStore
from servers.child import Child
from servers.loop_device import Disk, Throttle, command

# Bytes per second at which the throttled writer writes, and the number of pages of its put: 12 MiB,
# which stay queued for three seconds.
SLOW = 4 << 20
IN_FLIGHT = 48
FILE_SYSTEMS = pytest.mark.parametrize("slow_disk", ["ext4", "xfs"], indirect=True)
# A program that submits a put when it reads a line, and then waits for the put's end.
WRITER = """
import sys
from device_pages import PAGE_BYTES, SCOPE
from support import keys_of, pages_of
from test_real_devices import IN_FLIGHT
import ritornello as rt
keys = keys_of("writer", IN_FLIGHT)
pages = pages_of(keys, PAGE_BYTES)
store = rt.Store.open(sys.argv[1], io="uring")
print("open", flush=True)
sys.stdin.readline()
ticket = store.submit_put(SCOPE, keys, pages)
print("submitted", flush=True)
ticket.wait()
print("done", flush=True)
sys.stdin.readline()
"""


# A program that starts gets of single pages ("start"), gets single pages ("get"), and waits for all
# gets that it started ("wait"). The program prints the reason of each miss, or "hit".
READER = """
import sys
from device_pages import PAGE_BYTES, SCOPE
import ritornello as rt
store = rt.Store.open(sys.argv[1], io="uring")
def start(name):
    return store.submit_get(SCOPE, [name.encode()], [bytearray(PAGE_BYTES)], timeout=4)
def end(ticket):
    outcome = ticket.wait(60)
    return "hit" if outcome.ok[0] else outcome.reason
started = []
print("open", flush=True)
for line in sys.stdin:
    word, *names = line.split()
    tickets = [start(name) for name in names]
    if word == "start":
        started += tickets
        print("started", flush=True)
    else:
        print(*map(end, started if word == "wait" else tickets), flush=True)
"""


@pytest.fixture
def slow_writer(slow_disk: Disk) -> Iterator[Callable[[Path], Child]]:
    """Returns a function that starts the program `WRITER` on a store, with throttled writes. Kills
    the writers after the test.
    """
    require_io_uring(slow_disk.path / "tried")
    with or_skip():
        throttle = Throttle([slow_disk], "writer")
    with ExitStack() as children:
        yield lambda path: start_writer(path, throttle, children)
    throttle.remove()


def start_writer(path: Path, throttle: Throttle, children: ExitStack) -> Child:
    child = children.enter_context(Child(WRITER, path))
    assert child.read() == "open"
    throttle.add(child.pid)
    throttle.limit(SLOW)
    return child


def bytes_written(pid: int) -> int:
    """Returns the bytes that a process has submitted to block devices. Direct writes count
    immediately.
    """
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def kill_in_flight(child: Child) -> None:
    """Lets the writer submit its put, and kills it while most of the writes are queued."""
    before = bytes_written(child.pid)
    assert child.ask() == "submitted"
    deadline = time.monotonic() + 20
    while bytes_written(child.pid) - before < IN_FLIGHT * PAGE_BYTES * 3 // 4:
        assert time.monotonic() < deadline, "the writer did not submit 3/4 of its put within 20 s"
        time.sleep(0.02)
    child.kill()
    assert child.read() == "", "the writer's put ended before the kill: the test has no effect"
    child.wait(timeout=30)


def check_dead_writes_harmless(
    disk: Disk, store: rt.Store, early: Sequence[bytes], killed: float, written: int
) -> None:
    """Called immediately after a writer was killed. Puts and flushes pages. Reads these pages and
    the pages `early` after the device has completed its queue: no queued write of the dead writer
    may have overwritten a page. `written`: bytes that the device had written before the writer's
    put. `killed`: the time of the kill.
    """
    late = [keys_of(f"late {n}", 16) for n in range(6)]
    for keys in late:
        put(store, keys)
    store.flush()
    flushed = read(store, [*early, *(key for keys in late for key in keys)])
    assert len(flushed) >= 32, "fewer than 32 of the flushed pages are still stored"
    time.sleep(max(0.0, killed + IN_FLIGHT * PAGE_BYTES / SLOW + 1.5 - time.monotonic()))
    own = 96 * PAGE_BYTES
    more = disk.written() - written - own
    assert more > 8 << 20, (
        "the device wrote too few bytes of the dead writer's put: the test has no effect"
    )
    lost = len(flushed) - len(read(store, flushed))
    assert lost == 0, f"{lost} of {len(flushed)} flushed pages are no longer hits"
    # A page that was overwritten before the first read is not in `flushed`, so check the counter of
    # damaged pages as well.
    assert store.stats()["counters"]["damaged_pages"] == 0


@FILE_SYSTEMS
def test_late_writes_of_dead_client_damage_no_page(
    slow_writer: Callable[[Path], Child], slow_disk: Disk
) -> None:
    path = slow_disk.path / "kv"
    early = keys_of("early", 8)
    with rt.Store.open(path, capacity="48MiB", segment_bytes=4 << 20) as store:
        put(store, early)
        store.flush()
        writer = slow_writer(path)
        written = slow_disk.written()
        kill_in_flight(writer)
        check_dead_writes_harmless(slow_disk, store, early, time.monotonic(), written)


@FILE_SYSTEMS
def test_late_writes_of_dead_owner_damage_no_page(
    slow_writer: Callable[[Path], Child], slow_disk: Disk
) -> None:
    path = slow_disk.path / "kv"
    early = keys_of("early", 8)
    with rt.Store.open(path, capacity="48MiB", segment_bytes=4 << 20) as store:
        put(store, early)
        store.flush()
    writer = slow_writer(path)
    written = slow_disk.written()
    kill_in_flight(writer)
    killed = time.monotonic()
    with rt.Store.open(path) as store:
        check_dead_writes_harmless(slow_disk, store, early, killed, written)


def fail_flush(store: rt.Store, disk: Disk) -> str:
    """Puts runs whose flush fails because `disk` fails all requests for data, until the caller
    calls `disk.cut(0)`. Returns the name of the runs.
    """
    # Try three times: the owner also flushes every two seconds. If the owner flushes just before
    # the disk begins to fail requests (`cut`), `flush` finds nothing to write, and does not fail.
    for name in ("between", "between, again", "between, the third time"):
        put_small(store, name, 5)
        disk.cut(disk.data)
        try:
            store.flush()
        except RetryError:
            return name
        disk.cut(0)
    pytest.fail("none of three flushes failed, although the disk failed all requests for data")


def test_flush_survives_earlier_failed_sync(tmp_path: Path, make_disk: Callable[..., Disk]) -> None:
    """After a failed sync the kernel's page cache holds index records that the disk lacks. A later
    flush must write them to the disk.
    """
    disk = make_disk("failing", 128)
    path = disk.path / "kv"
    store = rt.Store.open(path, capacity="32MiB", segment_bytes=4 << 20)
    early = put_small(store, "early", 3)
    store.flush()
    command("sync", "--file-system", path)
    between = fail_flush(store, disk)
    with pytest.raises(FatalError):
        store.close()
    disk.cut(0)

    with rt.Store.open(path) as store:
        # The owner may still find the pages of the failed flush in its index. After a further put
        # of these pages and a flush, the pages must be on the disk.
        flushed = early + put_small(store, between, 5) + put_small(store, "late", 3)
        store.flush()
        with or_skip():
            copy = disk.after_power_loss(tmp_path / "copy")
    try:
        with rt.Store.open(copy.path / "kv") as store:
            there = store.exists(SMALL_SCOPE, flushed)
            lost = len(flushed) - sum(there)
            assert lost == 0, f"{lost} of {len(flushed)} flushed pages are not in the disk's copy"
            right = pages_of(flushed, SMALL_PAGE)
            out = blank(len(flushed), SMALL_PAGE)
            assert store.get_batch(SMALL_SCOPE, flushed, list(out)) == len(flushed)
            assert (out == right).all()
    finally:
        copy.detach()


# A program that prints its role, puts a page for every line it reads, and prints the number of
# stored pages or the kind of the error.
CLIENT = """
import sys
from device_pages import SMALL_PAGE, SMALL_SCOPE
from support import keys_of, pages_of
import ritornello as rt
from ritornello.errors import RitornelloError
store = rt.Store.open(sys.argv[1])
print(store.role, flush=True)
for line in sys.stdin:
    keys = keys_of(line, 1)
    try:
        print(store.put_batch(SMALL_SCOPE, keys, list(pages_of(keys, SMALL_PAGE))), flush=True)
    except RitornelloError as error:
        print(error.kind, flush=True)
"""


def stat(path: Path) -> tuple[int, str]:
    """Returns the exit code and the output of `ritornello stat`."""
    line = [sys.executable, "-m", "ritornello", "stat", str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_store_reopens_on_healed_disk(make_disk: Callable[..., Disk]) -> None:
    disk = make_disk("healing", 128)
    path = disk.path / "kv"
    with rt.Store.open(path, capacity="32MiB", segment_bytes=4 << 20) as store:
        early = put_small(store, "early", 3)
        store.flush()
        quiet = LMCacheStore(Settings(str(path)))
        assert (store.problem, quiet.problem()) == ("", "")
        client = Child(CLIENT, path)
        assert client.read() == "client"
        between = fail_flush(store, disk)
        assert store.problem
        assert quiet.problem()
        code, said = stat(path)
        assert code == 1, said
        assert sum(store.exists(SMALL_SCOPE, early)) == len(early), (
            "flushed pages must be found while the disk fails"
        )
        disk.cut(0)
        healed = time.monotonic()
        while store.problem:
            assert time.monotonic() < healed + 20, "the store was not reopened within 20 s"
            time.sleep(0.05)
        assert (store.role, quiet.problem(), stat(path)[0]) == ("owner", "", 0)
        assert sum(store.exists(SMALL_SCOPE, early)) == len(early), "flushed pages are missing"
        with pytest.raises(RitornelloError) as lost:
            store.flush()
        assert lost.value.kind == "miss"
        put_small(store, between, 5)
        store.flush()
        answers: list[str] = []
        while answers[-1:] != ["1"]:
            assert time.monotonic() < healed + 20, answers
            answers.append(client.ask(f"client {len(answers)}"))
            time.sleep(0.05)
        client.communicate()
        quiet.close()


def test_stalled_disk_holds_up_only_its_pages(make_disk: Callable[..., Disk]) -> None:
    disks = [make_disk("stalled", 96), make_disk("working", 96)]
    require_io_uring(disks[0].path / "tried")
    with or_skip():
        throttle = Throttle(disks[:1], "stall")
    pages: list[list[str]] = [[], []]
    paths = [disk.path / "kv" for disk in disks]
    with ExitStack() as undo:
        undo.callback(throttle.remove)
        store = undo.enter_context(rt.Store.open(paths, "96MiB", segment_bytes=4 << 20))
        for key in (f"{number:032}" for number in range(60)):
            before = disks[0].written()
            put(store, [key.encode()])
            pages[int(disks[0].written() - before < PAGE_BYTES)].append(key)
        store.flush()
        stalled, working = pages
        assert min(len(stalled), len(working)) > 20
        reader = undo.enter_context(Child(READER, paths[0]))
        assert reader.read() == "open"
        # With a limit of one byte per second, reads from the first disk do not end.
        throttle.add(reader.pid)
        throttle.limit(0, reads=1)
        # 16 gets are more than the 8 threads that a store normally has for tickets.
        assert reader.ask(" ".join(["start", *stalled[:16]])) == "started"
        began = time.monotonic()
        assert set(reader.ask(" ".join(["get", *working])).split()) == {"hit"}
        time.sleep(max(0.0, began + 2.5 - time.monotonic()))
        assert reader.ask(" ".join(["get", stalled[16], working[0]])) == "stalled hit"
        throttle.limit(0)
        assert set(reader.ask("wait").split()) <= {"hit", "deadline", "stalled"}
        assert set(reader.ask(" ".join(["get", *stalled])).split()) == {"hit"}
