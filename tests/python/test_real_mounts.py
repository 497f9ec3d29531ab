"""Stores whose directories are disks that are not mounted, or are mounted while a store is open.

Needs root and loop devices; a test skips and names the missing requirement.
`servers/loop_device.py` makes the devices.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from device_pages import PAGE_BYTES, SCOPE, SMALL_SCOPE, put, put_small, read
from support import CoreLog, keys_of, pages_of

import ritornello as rt
from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.settings import StoreSettings
from ritornello.errors import FatalError, RetryError
from servers.child import Child
from servers.loop_device import Disk, command


@pytest.fixture(params=["mount point", "directory below"])
def second_directory(
    tmp_path: Path, request: pytest.FixtureRequest, make_disk: Callable[..., Disk]
) -> tuple[Disk, Path, list[bytes]]:
    """A closed store whose 64 flushed pages are in two directories. One directory is the mount
    point of a disk that is not mounted, or a directory on this disk. Returns the disk, the path of
    the store, and the keys.
    """
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
    """Reads the pages of `keys`, and puts and flushes further pages, while the disk of a directory
    is not mounted. Returns the keys of the further pages that were stored.
    """
    found = read(store, keys)
    assert 0 < len(found) < len(keys), "only the pages on the unmounted disk must be misses"
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
        assert missing == 0, f"{missing} of {len(keys + more)} flushed pages are misses"


STORE_MAKER = """
import sys
from device_pages import put_small
import ritornello as rt
with rt.Store.open(sys.argv[1], "1GiB") as store:
    put_small(store, "before", 2)
"""


def make_store(path: Path) -> None:
    """In another process, makes a store at `path` with two runs of pages."""
    with Child(STORE_MAKER, path) as maker:
        assert maker.wait(60) == 0


# `folder`: the store's directory, relative to the mount point. `has_store`: whether the disk has a
# store before it is mounted.
@pytest.mark.parametrize("has_store", [True, False], ids=["with a store", "empty"])
@pytest.mark.parametrize("folder", [".", "kv"])
def test_late_mount_moves_engine_to_its_disk(
    make_disk: Callable[..., Disk], folder: str, has_store: bool
) -> None:
    disk = make_disk("late", 2048)
    path = disk.path / folder
    before: list[bytes] = []
    if has_store:
        # In another process: a process that had a store on a disk creates no store below the disk's
        # mount point.
        make_store(path)
        before = [key for run in range(2) for key in keys_of(f"before {run}", 200)]
    disk.unmount()
    # An engine with default settings that starts before the mount creates a store below the mount
    # point.
    handle = FailSafeStore(StoreSettings(str(path)), logging.getLogger(__name__), lambda _: None)

    def found(keys: list[bytes]) -> int:
        return handle.call("exists", lambda store: sum(store.exists(SMALL_SCOPE, keys)), 0)

    try:
        below = handle.call("put", lambda store: put_small(store, "below", 2), [])
        assert found(below) == 400
        disk.mount()
        mounted = time.monotonic()
        while found(below) > 0 or not handle.open():
            assert time.monotonic() < mounted + 20, "the engine did not open the store on its disk"
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
    tmp_path: Path, make_disk: Callable[..., Disk], core_log: CoreLog
) -> None:
    disk = make_disk("original", 2048)
    make_store(disk.path)
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
            assert time.monotonic() < mounted + 20, "the engine did not open the copy"
            time.sleep(0.05)
        assert found(keys_of("before 0", 200)) == 200
        assert core_log.take(
            "a file system was mounted over the store: this process closes the store"
        )
    finally:
        handle.close()
        command("umount", "--lazy", disk.path)
        copy.detach()


# Keeps a store open in a directory of a chroot. The root of the chroot is not a mount point, so the
# kernel does not list the mount that contains it. For each line of input, prints how many of this
# program's pages are in the store, and whether the store is open.
CHROOT = """
import logging, os, sys
import numpy.random  # Imported before chroot: it loads modules, which the chroot lacks.
from test_real_mounts import FailSafeStore, SMALL_SCOPE, StoreSettings, put_small
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
    child = Child(CHROOT, root)
    try:
        assert child.ask() == "400 True"
        assert disk.device is not None
        command("mount", disk.device, root / "disk")
        mounted = time.monotonic()
        while (answer := child.ask()) != "0 True":
            assert time.monotonic() < mounted + 20, answer
            time.sleep(0.05)
        assert (root / "disk" / "kv" / "MANIFEST").exists()
        # After the unmount the path leads to the file system of the chroot. The store counts the
        # mount of this file system, which the kernel does not list, as older than the store's
        # opening: no disk was mounted over the store, so the store stays open.
        command("umount", "--lazy", root / "disk")
        time.sleep(3)
        assert child.ask() == "0 True", "the engine must keep its store after an unmount"
    finally:
        child.kill()
        child.communicate()
        for name in ("disk", "proc"):
            subprocess.run(["umount", "--lazy", str(root / name)], capture_output=True)


@pytest.mark.parametrize(
    "was_begun", [False, True], ids=["no store below", "unfinished store below"]
)
def test_unmounted_disk_gets_no_store_below(
    make_disk: Callable[..., Disk], was_begun: bool
) -> None:
    # One disk is mounted over another disk, so the directory is a mount point even after the upper
    # disk is unmounted.
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
        # Every two seconds the store checks which mount its path leads to.
        time.sleep(3)
        found = handle.call("exists", lambda store: sum(store.exists(SMALL_SCOPE, keys)), 0)
        assert found == 400, "the engine must keep its store after an unmount"

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
        assert len(read(store, keys)) == len(keys), "pages on a full disk must stay hits"
        assert store.delete(SCOPE, keys[:8]) == 8
        store.flush()
        put(store, keys[:8])
