"""Keys, pages, stores and waits that the tests share. A page's bytes follow from its key and size,
so that every byte read back can be checked.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

import ritornello as rt

Bytes: TypeAlias = NDArray[np.uint8]

# Options of `Store.open`. The capacity is so small that tests can fill the store and overwrite
# evicted pages.
SMALL: dict[str, Any] = {"capacity": "64MiB", "segment_bytes": 4 << 20}


def open_small(path: Path | Sequence[Path], **options: Any) -> rt.Store:
    """Opens a store with the options `SMALL`; `options` adds to them and overrides them."""
    return rt.Store.open(path, **{**SMALL, **options})


def keys_of(name: str, pages: int) -> list[bytes]:
    """Returns the first `pages` keys of the sequence `name`: each key is the hash of the previous
    key, and thus commits to all keys before it.
    """
    keys, last = [], name.encode()
    for _ in range(pages):
        last = hashlib.sha256(last).digest()
        keys.append(last)
    return keys


def page_of(key: bytes, page_bytes: int) -> Bytes:
    """Returns the bytes of the page of `key`, of shape (page_bytes,)."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, page_bytes, np.uint8)


def pages_of(keys: Sequence[bytes], page_bytes: int) -> Bytes:
    """Returns the bytes of the pages of `keys`, of shape (len(keys), page_bytes)."""
    return np.stack([page_of(key, page_bytes) for key in keys])


def blank(pages: int, page_bytes: int) -> Bytes:
    """Returns memory for reads, of shape (pages, page_bytes), filled with a byte that reveals the
    parts that no read wrote to.
    """
    return np.full((pages, page_bytes), 0xA5, np.uint8)


class CoreLog:
    """The lines that the core logged during a test. A thread hands them to `logging`."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def take(self, awaited: str = "") -> list[str]:
        """Returns the lines since the last call, once one of them contains `awaited`; without
        `awaited`, after half a second.
        """
        if awaited:
            wait_until(lambda: any(awaited in line for line in self._caplog.messages), awaited)
        else:
            time.sleep(0.5)
        records = [record for record in self._caplog.records if ".core." in record.name]
        self._caplog.clear()
        return [record.getMessage() for record in records]


def wait_until(done: Callable[[], object], what: str = "the awaited condition") -> None:
    """Waits until `done` returns a true value. Fails after a minute, with `what` as the reason."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, f"not reached within a minute: {what}"
        time.sleep(0.002)
