"""Stores on loop devices that are slow, fail for a moment, or are not mounted.

Needs root, loop devices and, for slow devices, the blkio controller of cgroup v1; a test skips and
names the missing requirement. `real_device.py` makes the devices.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from real_device import Disk, Throttle, command, require_io_uring
from support import blank, keys_of, pages_of

import ritornello as rt
from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.settings import StoreSettings
from ritornello.errors import FatalError, RetryError, RitornelloError
from ritornello.lmcache.settings import Settings
from ritornello.lmcache.store import LMCacheStore

PAGE_BYTES = 256 << 10
# Keys do not chain: a lost page hides no other.
SCOPE = rt.Scope.opaque("device", PAGE_BYTES)
# Bytes per second of the throttled writer, and pages of its put: 12 MiB, queued for three seconds.
SLOW = 4 << 20
IN_FLIGHT = 48
FILE_SYSTEMS = pytest.mark.parametrize("slow_disk", ["ext4", "xfs"], indirect=True)
# Submits its put when it reads a line, and waits for its end.
WRITER = """
import sys
sys.path.insert(0, {here!r})
from support import keys_of, pages_of
from test_real_devices import IN_FLIGHT, PAGE_BYTES, SCOPE
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


def read(store: rt.Store, keys: Sequence[bytes]) -> list[bytes]:
    """Returns the keys whose pages are hits, and checks the bytes of each."""
    found: list[bytes] = []
    for first in range(0, len(keys), 16):
        some = keys[first : first + 16]
        out = blank(len(some), PAGE_BYTES)
        outcome = store.submit_get(SCOPE, some, list(out)).wait()
        assert outcome is not None
        right = pages_of(some, PAGE_BYTES)
        for at, ok in enumerate(outcome.ok):
            if ok:
                assert (out[at] == right[at]).all(), "wrong bytes"
                found.append(some[at])
    return found


def put(store: rt.Store, keys: Sequence[bytes], seconds: float = 20) -> None:
    """Puts pages, and retries for `seconds` while the store has no space for them."""
    pages = pages_of(keys, PAGE_BYTES)
    deadline = time.monotonic() + seconds
    while True:
        try:
            if store.put_batch(SCOPE, keys, list(pages)) == len(keys):
                return
        except RetryError:
            pass
        assert time.monotonic() < deadline, "no space for a put"
        time.sleep(0.05)


@pytest.fixture
def slow_writer(slow_disk: Disk) -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts a throttled writer on a store, and kills it after the test."""
    require_io_uring(slow_disk.path / "tried")
    throttle = Throttle(slow_disk, "writer")
    children: list[subprocess.Popen[str]] = []
    yield lambda path: start_writer(path, throttle, children)
    for child in children:
        child.kill()
        child.communicate()
    throttle.remove()


def start_writer(
    path: Path, throttle: Throttle, children: list[subprocess.Popen[str]]
) -> subprocess.Popen[str]:
    code = WRITER.format(here=str(Path(__file__).parent))
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    children.append(child)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    throttle.add(child.pid)
    throttle.limit(SLOW)
    return child


def bytes_written(pid: int) -> int:
    """Returns the bytes that a process has submitted to block devices. Direct writes count
    immediately.
    """
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def kill_in_flight(child: subprocess.Popen[str]) -> None:
    """Lets the writer submit its put, and kills it while most of the writes are queued."""
    assert child.stdin is not None
    assert child.stdout is not None
    before = bytes_written(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "submitted\n"
    deadline = time.monotonic() + 20
    while bytes_written(child.pid) - before < IN_FLIGHT * PAGE_BYTES * 3 // 4:
        assert time.monotonic() < deadline, "the writer does not write"
        time.sleep(0.02)
    child.kill()
    assert child.stdout.read() == "", "the writes ended before the kill"
    child.wait(timeout=30)


def check_dead_writes_harmless(
    disk: Disk, store: rt.Store, early: Sequence[bytes], killed: float, written: int
) -> None:
    """Puts and flushes pages to the dead writer's space immediately. Reads them back when the
    device has completed its queue. `written` is the device's count at the kill.
    """
    late = [keys_of(f"late {n}", 16) for n in range(6)]
    for keys in late:
        put(store, keys)
    store.flush()
    flushed = read(store, [*early, *(key for keys in late for key in keys)])
    assert len(flushed) >= 32, "nearly everything was evicted"
    time.sleep(max(0.0, killed + IN_FLIGHT * PAGE_BYTES / SLOW + 1.5 - time.monotonic()))
    own = 96 * PAGE_BYTES
    more = disk.written() - written - own
    assert more > 8 << 20, "the writes of the dead process did not outlive it: nothing was tried"
    lost = len(flushed) - len(read(store, flushed))
    assert lost == 0, f"{lost} of {len(flushed)} flushed pages were overwritten by a dead process"
    # Pages that were overwritten before the first read are missing in `flushed`.
    assert store.stats()["counters"]["damaged_pages"] == 0


@FILE_SYSTEMS
def test_dead_clients_writes_spare_reused_space(
    slow_writer: Callable[[Path], subprocess.Popen[str]], slow_disk: Disk
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
def test_dead_owners_writes_spare_reused_space(
    slow_writer: Callable[[Path], subprocess.Popen[str]], slow_disk: Disk
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


SMALL_PAGE = 4096
SMALL_SCOPE = rt.Scope.opaque("index", SMALL_PAGE)


def put_small(store: rt.Store, name: str, runs: int) -> list[bytes]:
    """Puts runs of 200 small pages. The record of a run is longer than 3 KiB, so that several of
    them fill blocks of the journal that no later record writes again.
    """
    keys = []
    for n in range(runs):
        some = keys_of(f"{name} {n}", 200)
        assert store.put_batch(SMALL_SCOPE, some, list(pages_of(some, SMALL_PAGE))) == 200
        keys += some
    return keys


def fail_flush(store: rt.Store, disk: Disk) -> str:
    """Puts runs whose flush fails on `disk`, which stays cut. Returns the name of the runs."""
    # The owner flushes every two seconds without a call, perhaps just before the disk is cut.
    for name in ("between", "between, again", "between, the third time"):
        put_small(store, name, 5)
        disk.cut(disk.data)
        try:
            store.flush()
        except RetryError:
            return name
        disk.cut(0)
    pytest.fail("no flush met the cut disk")


def test_flush_survives_earlier_failed_sync(tmp_path: Path, make_disk: Callable[..., Disk]) -> None:
    """After a failed sync the page cache holds index records that the disk lacks."""
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
        # A put of pages that this owner still finds must be as durable as a put of new pages.
        flushed = early + put_small(store, between, 5) + put_small(store, "late", 3)
        store.flush()
        copy = disk.after_power_loss(tmp_path / "copy")
    try:
        with rt.Store.open(copy.path / "kv") as store:
            there = store.exists(SMALL_SCOPE, flushed)
            lost = len(flushed) - sum(there)
            assert lost == 0, f"{lost} of {len(flushed)} flushed pages were not on the disk"
            right = pages_of(flushed, SMALL_PAGE)
            out = blank(len(flushed), SMALL_PAGE)
            assert store.get_batch(SMALL_SCOPE, flushed, list(out)) == len(flushed)
            assert (out == right).all()
    finally:
        copy.detach()


# Puts a page for every line it reads, and prints the number of stored pages or the error.
CLIENT = """
import sys
sys.path.insert(0, {here!r})
from support import keys_of, pages_of
from test_real_devices import SMALL_PAGE, SMALL_SCOPE
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
    """Exit code and output of `ritornello stat`."""
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
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT.format(here=str(Path(__file__).parent)), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "client\n"
        between = fail_flush(store, disk)
        assert store.problem
        assert quiet.problem()
        code, said = stat(path)
        assert code == 1, said
        assert sum(store.exists(SMALL_SCOPE, early)) == len(early), "found while it is broken"
        disk.cut(0)
        healed = time.monotonic()
        while store.problem:
            assert time.monotonic() < healed + 20, "not reopened"
            time.sleep(0.05)
        assert (store.role, quiet.problem(), stat(path)[0]) == ("owner", "", 0)
        assert sum(store.exists(SMALL_SCOPE, early)) == len(early), "flushed pages are missing"
        with pytest.raises(RitornelloError) as lost:
            store.flush()
        assert lost.value.kind == "miss"
        put_small(store, between, 5)
        store.flush()
        answers: list[str] = []
        while answers[-1:] != ["1\n"]:
            assert time.monotonic() < healed + 20, answers
            client.stdin.write(f"client {len(answers)}\n")
            client.stdin.flush()
            answers.append(client.stdout.readline())
            time.sleep(0.05)
        client.communicate()
        quiet.close()


@pytest.fixture(params=["mount point", "directory below"])
def second_directory(
    tmp_path: Path, request: pytest.FixtureRequest, make_disk: Callable[..., Disk]
) -> tuple[Disk, Path, list[bytes]]:
    """A closed store, half of whose 64 flushed pages are on a disk that is not mounted."""
    disk = make_disk("second", 128)
    path, second = tmp_path / "kv", disk.path
    if request.param == "directory below":
        second /= "more"
    keys = keys_of("page", 64)
    directories = [path / "segments", second]
    with rt.Store.open(path, "40MiB", paths=directories, segment_bytes=4 << 20) as store:
        put(store, keys)
        store.flush()
    for directory in directories:
        assert list(directory.glob("seg-*")), f"no segment in {directory}"
    disk.unmount()
    return disk, path, keys


def put_unmounted(store: rt.Store, disk: Disk, keys: list[bytes]) -> list[bytes]:
    """Reads and puts while a directory is not mounted. Returns the keys that it flushed."""
    found = read(store, keys)
    assert 0 < len(found) < len(keys), "pages of one directory are hits, of the other misses"
    more = keys_of("unmounted", 4)
    try:
        stored = store.put_batch(SCOPE, more, list(pages_of(more, PAGE_BYTES)))
        store.flush()
    except RetryError:
        stored = 0
    assert not list(disk.path.iterdir()), "a file was made below the mount point"
    return more[:stored]


def test_unmounted_directory_keeps_its_pages(
    second_directory: tuple[Disk, Path, list[bytes]],
) -> None:
    disk, path, keys = second_directory
    with rt.Store.open(path) as store:
        more = put_unmounted(store, disk, keys)
    assert not list(disk.path.iterdir()), "a file was made below the mount point"
    disk.mount()
    with rt.Store.open(path) as store:
        missing = len(keys + more) - len(read(store, keys + more))
        assert missing == 0, f"{missing} of {len(keys + more)} flushed pages are missing"


def test_directory_mounted_later_serves_open_store(
    second_directory: tuple[Disk, Path, list[bytes]],
) -> None:
    disk, path, keys = second_directory
    with rt.Store.open(path) as store:
        more = put_unmounted(store, disk, keys)
        disk.mount()
        deadline = time.monotonic() + 12
        while len(read(store, keys + more)) < len(keys + more) and time.monotonic() < deadline:
            time.sleep(0.5)
        missing = len(keys + more) - len(read(store, keys + more))
        assert missing == 0, f"{missing} of {len(keys + more)} flushed pages are still misses"


STORE_MAKER = """
import sys
sys.path.insert(0, {here!r})
from test_real_devices import put_small
import ritornello as rt
with rt.Store.open(sys.argv[1], "1GiB") as store:
    put_small(store, "before", 2)
"""


@pytest.mark.parametrize("has_store", [True, False], ids=["with a store", "empty"])
@pytest.mark.parametrize("folder", [".", "kv"])
def test_late_mount_moves_engine_to_its_disk(
    make_disk: Callable[..., Disk], folder: str, has_store: bool
) -> None:
    disk = make_disk("late", 2048)
    path = disk.path / folder
    before: list[bytes] = []
    if has_store:
        # In another process: this process would not create a store below the disk on which it had a
        # store.
        line = [
            sys.executable,
            "-c",
            STORE_MAKER.format(here=str(Path(__file__).parent)),
            str(path),
        ]
        subprocess.run(line, check=True, timeout=60)
        before = [key for run in range(2) for key in keys_of(f"before {run}", 200)]
    disk.unmount()
    # Default settings: an engine that starts before the mount creates a store.
    handle = FailSafeStore(StoreSettings(str(path)), logging.getLogger(__name__), lambda _: None)

    def found(keys: list[bytes]) -> int:
        return handle.call("exists", lambda store: sum(store.exists(SMALL_SCOPE, keys)), 0)

    try:
        below = handle.call("put", lambda store: put_small(store, "below", 2), [])
        assert found(below) == 400
        disk.mount()
        mounted = time.monotonic()
        while found(below) > 0 or not handle.open():
            assert time.monotonic() < mounted + 20, "the engine stays below the mount point"
            time.sleep(0.05)
        assert found(before) == len(before)
        after = handle.call("put", lambda store: put_small(store, "after", 2), [])
        assert found(after) == 400
    finally:
        handle.close()
    with rt.Store.open(path) as store:
        assert sum(store.exists(SMALL_SCOPE, after)) == 400
    disk.unmount()
    with rt.Store.open(path) as store:
        assert [sum(store.exists(SMALL_SCOPE, keys)) for keys in (below, after)] == [400, 0]


def test_late_mount_moves_serve_to_its_disk(make_disk: Callable[..., Disk]) -> None:
    disk = make_disk("served", 2048)
    disk.unmount()
    line = [sys.executable, "-m", "ritornello", "serve", str(disk.path), "--capacity", "1GiB"]
    served = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None
        assert served.stdout.readline().startswith("ready: ")
        disk.mount()
        assert served.stdout.readline().startswith("reopening: ")
        assert served.stdout.readline().startswith("ready: ")
        with rt.Store.open(disk.path) as store:
            assert store.role == "client"
            keys = put_small(store, "served", 2)
            store.flush()
        served.terminate()
        assert served.wait(60) == 0
    finally:
        served.kill()
        served.communicate()
    with rt.Store.open(disk.path) as store:
        assert sum(store.exists(SMALL_SCOPE, keys)) == 400
    disk.unmount()


def test_copy_mounted_over_store_is_opened(
    tmp_path: Path, make_disk: Callable[..., Disk], capfd: pytest.CaptureFixture[str]
) -> None:
    disk = make_disk("original", 2048)
    line = [sys.executable, "-c", STORE_MAKER.format(here=str(Path(__file__).parent))]
    subprocess.run([*line, str(disk.path)], check=True, timeout=60)
    command("sync", "--file-system", disk.path)
    copy = disk.after_power_loss(tmp_path / "copy")
    copy.unmount()
    settings = StoreSettings(str(disk.path))
    handle = FailSafeStore(settings, logging.getLogger(__name__), lambda _: None)

    def found(keys: list[bytes]) -> int:
        return handle.call("exists", lambda store: sum(store.exists(SMALL_SCOPE, keys)), 0)

    try:
        original = handle.call("put", lambda store: put_small(store, "original", 2), [])
        assert found(original) == 400
        assert copy.device is not None
        command("mount", copy.device, disk.path)
        mounted = time.monotonic()
        while found(original) > 0 or not handle.open():
            assert time.monotonic() < mounted + 20, "the engine stays on the original"
            time.sleep(0.05)
        assert found(keys_of("before 0", 200)) == 200
        assert "a file system was mounted over the store: it is left" in capfd.readouterr().err
    finally:
        handle.close()
        command("umount", "--lazy", disk.path)
        copy.detach()


# Keeps a store open in a directory of a chroot, which is not a mount point: the kernel does not
# list the mount that contains it. Prints whether the store has the pages that it put.
CHROOT = """
import logging, os, sys
import numpy.random  # It loads modules at its first use, which the chroot lacks.
sys.path.insert(0, {here!r})
from test_real_devices import FailSafeStore, SMALL_SCOPE, StoreSettings, put_small
os.chroot(sys.argv[1])
os.chdir("/")
handle = FailSafeStore(StoreSettings("/disk/kv"), logging.getLogger(), lambda _: None)
keys = handle.call("put", lambda store: put_small(store, "below", 2), [])
for _ in sys.stdin:
    found = handle.call("exists", lambda store: sum(store.exists(SMALL_SCOPE, keys)), -1)
    print(found, handle.open(), flush=True)
handle.close()
"""


def test_late_mount_is_noticed_in_chroot(tmp_path: Path, make_disk: Callable[..., Disk]) -> None:
    disk = make_disk("late", 2048)
    disk.unmount()
    root = tmp_path / "root"
    for name in ("disk", "proc", "tmp"):
        (root / name).mkdir(parents=True)
    command("mount", "-t", "proc", "proc", root / "proc")
    child = subprocess.Popen(
        [sys.executable, "-c", CHROOT.format(here=str(Path(__file__).parent)), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def ask() -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    try:
        assert ask() == "400 True"
        assert disk.device is not None
        command("mount", disk.device, root / "disk")
        mounted = time.monotonic()
        while (answer := ask()) != "0 True":
            assert time.monotonic() < mounted + 20, answer
            time.sleep(0.05)
        assert (root / "disk" / "kv" / "MANIFEST").exists()
        # After the unmount the path leads to the mount of the chroot, which the kernel does not
        # list here, and which is older than the process: no disk was mounted over the store.
        command("umount", "--lazy", root / "disk")
        time.sleep(3)
        assert ask() == "0 True", "the store was left after an unmount"
    finally:
        child.kill()
        child.communicate()
        for name in ("disk", "proc"):
            subprocess.run(["umount", "--lazy", str(root / name)], capture_output=True)


@pytest.mark.parametrize("was_begun", [False, True], ids=["", "one was begun there"])
def test_unmounted_disk_gets_no_store_below(
    make_disk: Callable[..., Disk], was_begun: bool
) -> None:
    # On a disk that is mounted over another disk: the directory below is a mount point as well.
    below, disk = make_disk("below", 2048), make_disk("above", 2048)
    disk.unmount()
    path = below.path / "kv"
    if was_begun:
        path.mkdir(mode=0o700)
        (path / "LOCK").touch(mode=0o600)
    assert disk.device is not None
    command("mount", disk.device, below.path)
    handle = FailSafeStore(StoreSettings(str(path)), logging.getLogger(__name__), lambda _: None)
    try:
        keys = handle.call("put", lambda store: put_small(store, "above", 2), [])
        assert len(keys) == 400
        command("umount", "--lazy", below.path)
        # Longer than the store takes to look where its path leads.
        time.sleep(3)
        found = handle.call("exists", lambda store: sum(store.exists(SMALL_SCOPE, keys)), 0)
        assert found == 400, "the store was left after an unmount"

        def lose(_: rt.Store) -> None:
            raise FatalError("the disk is gone")

        handle.call("exists", lose, None)
        began = time.monotonic()
        while "is not mounted" not in handle.broken:
            assert time.monotonic() < began + 20, handle.broken
            time.sleep(0.05)
        found_below = [name.name for name in path.iterdir()] if was_begun else path.exists()
        expected = ["LOCK"] if was_begun else False
        assert found_below == expected, "a store was made below the mount point"
        command("mount", disk.device, below.path)
        while not handle.open():
            assert time.monotonic() < began + 40, handle.broken
            time.sleep(0.05)
        found = handle.call("exists", lambda store: sum(store.exists(SMALL_SCOPE, keys)), 0)
        assert found == 400
    finally:
        handle.close()
        command("umount", "--lazy", below.path)


def test_full_directory_is_still_used(
    second_directory: tuple[Disk, Path, list[bytes]],
) -> None:
    """Segments are allocated whole: on a full disk they can be read and written."""
    disk, path, keys = second_directory
    disk.mount()
    with (disk.path / "filler").open("wb", buffering=0) as filler:
        for length in (1 << 20, 1 << 10):
            with pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(length))
    with rt.Store.open(path) as store:
        assert store.stats()["absent_space"]["reasons"] == []
        assert len(read(store, keys)) == len(keys), "a full disk made hits misses"
        assert store.delete(SCOPE, keys[:8]) == 8
        store.flush()
        put(store, keys[:8])
