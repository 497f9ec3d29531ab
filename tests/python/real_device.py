"""Requirements of tests on loop devices: a test is skipped if the machine cannot make or throttle
the devices, for example because the tests do not run as root.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ritornello as rt
from ritornello.errors import RitornelloError
from servers.loop_device import DeviceUnavailableError


@contextmanager
def or_skip() -> Iterator[None]:
    """Skips the test if the machine lacks a requirement of the device."""
    try:
        yield
    except DeviceUnavailableError as error:
        pytest.skip(str(error))


def require_io_uring(path: Path) -> None:
    """Skips the test if a store at `path`, which does not exist yet, cannot use io_uring."""
    try:
        with rt.Store.open(path, "16MiB", io="uring", segment_bytes=1 << 20) as store:
            mode = store.stats()["io"]["mode"]
    except RitornelloError as error:
        pytest.skip(f"no io_uring: {error}")
    rt.destroy(path)
    if mode != "uring":
        pytest.skip(f"no io_uring: the store chose {mode}")
