"""Fixtures: stores and loop devices that last for one test."""

from collections.abc import Callable, Iterator
from logging import getLogger
from pathlib import Path
from typing import Any

import pytest
from real_device import or_skip
from support import CoreLog, open_small

import ritornello as rt
from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.settings import StoreSettings
from servers.loop_device import Disk, check_disks, check_throttle


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """Path of a directory that does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def store(where: Path) -> Iterator[rt.Store]:
    with open_small(where) as opened:
        yield opened


@pytest.fixture
def core_log(caplog: pytest.LogCaptureFixture) -> CoreLog:
    return CoreLog(caplog)


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., FailSafeStore]]:
    """Returns a function that makes a store as connectors do, at `tmp_path/kv`. The stores that it
    made are closed after the test.
    """
    fail_safes: list[FailSafeStore] = []

    def make(**options: Any) -> FailSafeStore:
        settings = StoreSettings(str(tmp_path / "kv"), **{"capacity": "1GiB", **options})
        fail_safe = FailSafeStore(settings, getLogger("ritornello.test"), lambda _: None)
        fail_safes.append(fail_safe)
        return fail_safe

    yield make
    for fail_safe in fail_safes:
        fail_safe.close()


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Returns a function that makes a loop device with a file system, given a name, the size in MiB
    and the kind of file system. The devices that it made are freed after the test.
    """
    with or_skip():
        check_disks()
    disks: list[Disk] = []

    def make(name: str, mebibytes: int, file_system: str = "ext4") -> Disk:
        with or_skip():
            disks.append(Disk(tmp_path / name, mebibytes, file_system))
        return disks[-1]

    yield make
    for disk in reversed(disks):
        disk.detach()


@pytest.fixture
def slow_disk(request: pytest.FixtureRequest, make_disk: Callable[..., Disk]) -> Disk:
    """A file system on a loop device of 512 MiB whose writes can be throttled. The fixture's
    parameter is the kind of file system, by default ext4.
    """
    with or_skip():
        check_throttle()
    return make_disk("slow", 512, getattr(request, "param", "ext4"))
