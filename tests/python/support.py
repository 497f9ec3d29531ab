"""Keys, pages, stores and waits that the tests share. A page's bytes follow from its key and size,
so that every byte read back can be checked.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import ritornello as rt

Bytes: TypeAlias = NDArray[np.uint8]

# So small that tests can fill the store and overwrite evicted pages.
SMALL: dict[str, Any] = {"capacity": "64MiB", "segment_bytes": 4 << 20}


def open_small(path: Path | Sequence[Path], **options: Any) -> rt.Store:
    """Opens a store of 64 MiB in segments of 4 MiB; `options`: further arguments of
    `Store.open`.
    """
    return rt.Store.open(path, **{**SMALL, **options})


def keys_of(name: str, pages: int) -> list[bytes]:
    """Returns keys of the sequence `name`: key n commits to all before it."""
    keys, last = [], name.encode()
    for _ in range(pages):
        last = hashlib.sha256(last).digest()
        keys.append(last)
    return keys


def page_of(key: bytes, page_bytes: int) -> Bytes:
    """Returns the expected bytes for `key`, of shape (page_bytes,)."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, page_bytes, np.uint8)


def pages_of(keys: Sequence[bytes], page_bytes: int) -> Bytes:
    """Returns the expected bytes for `keys`, of shape (len(keys), page_bytes)."""
    return np.stack([page_of(key, page_bytes) for key in keys])


def blank(pages: int, page_bytes: int) -> Bytes:
    """Returns memory for reads, filled with a byte that reveals unread parts."""
    return np.full((pages, page_bytes), 0xA5, np.uint8)


def wait_until(done: Callable[[], object], what: str = "it was done") -> None:
    """Waits until `done` returns a true value. Fails after a minute, with `what` as the reason."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, f"not reached before the deadline: {what}"
        time.sleep(0.002)
