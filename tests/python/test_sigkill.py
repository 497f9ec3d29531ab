"""Processes killed at any moment: flushed pages are stored, and stored pages are right. The
processes put sequences of one to seven pages; the name of a sequence is a number.

The oracle is the children's standard output: a child prints a line only after the flush that the
line reports has returned. A page's bytes follow from its key, so that every byte read can be
checked.
"""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ritornello as rt

PAGE_BYTES = 24_000
SCOPE = rt.Scope.opaque("sigkill", PAGE_BYTES, chained=True)
# Longer than 64 units of 4 KiB, so that a page may be stored in pieces.
LONG_PAGE_BYTES = 300 << 10
LONG_SCOPE = rt.Scope.opaque("sigkill long", LONG_PAGE_BYTES, chained=True)
# Longer than 16 MiB, so that a store in several directories stripes the page over them.
STRIPED_PAGE_BYTES = (16 << 20) + 5_001
STRIPED_SCOPE = rt.Scope.opaque("sigkill striped", STRIPED_PAGE_BYTES, chained=True)


def keys_of(name: int, pages: int) -> list[bytes]:
    """Returns the keys of the first `pages` pages of sequence `name`."""
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(pages)]


def page_of(key: bytes, length: int = PAGE_BYTES) -> bytes:
    """Returns the bytes of the page of `key`."""
    return (hashlib.sha512(key).digest() * (length // 64 + 1))[:length]


CHILD = """
import sys
sys.path.insert(0, {here!r})
from test_sigkill import SCOPE, keys_of, page_of
import ritornello as rt
name = int(sys.argv[2])
with rt.Store.open(sys.argv[1], capacity="1GiB", segment_bytes=4 << 20) as store:
    print("open", store.role, flush=True)
    while True:
        keys = keys_of(name, 1 + name % 7)
        stored = store.put_batch(SCOPE, keys, [page_of(key) for key in keys])
        if name % 3 == 0:
            store.flush()
            print("flushed", name, stored, flush=True)
        name += 1
"""


def start(path: Path, name: int) -> subprocess.Popen[str]:
    code = CHILD.format(here=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(name)],
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str], delay: float) -> dict[int, int]:
    """Kills the child `delay` seconds after it has opened the store. Returns the number of pages
    that it reported as flushed, by sequence name.
    """
    assert child.stdout is not None
    assert child.stdout.readline().startswith("open")
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    with child.stdout:
        flushed = flushed_in(child.stdout.read())
    child.wait(timeout=30)
    return flushed


def flushed_in(said: str) -> dict[int, int]:
    """Returns the number of pages that a killed child printed as flushed, by sequence name. Ignores
    the child's last line if it is cut off.
    """
    whole = [line.split() for line in said.splitlines(keepends=True) if line.endswith("\n")]
    return {int(line[1]): int(line[2]) for line in whole if line[0] == "flushed"}


def check(store: rt.Store, flushed: dict[int, int], upto: int) -> None:
    out = [bytearray(PAGE_BYTES) for _ in range(7)]
    for name in range(upto):
        keys = keys_of(name, 1 + name % 7)
        there = store.probe(SCOPE, keys)
        assert there >= flushed.get(name, 0), f"flushed pages of sequence {name} are missing"
        got = store.get_batch(SCOPE, keys[:there], out[:there])
        assert got >= flushed.get(name, 0)
        for key, page in zip(keys[:got], out, strict=False):
            assert bytes(page) == page_of(key), f"wrong bytes in sequence {name}"


@pytest.mark.parametrize("seed", range(3))
def test_repeatedly_killed_owner_loses_nothing_flushed(tmp_path: Path, seed: int) -> None:
    """Each child continues after the last sequence that the previous children flushed; the store is
    so large that no page is evicted.
    """
    rng = random.Random(seed)
    flushed: dict[int, int] = {}
    begin = 0
    for _ in range(5):
        flushed |= finish(start(tmp_path / "kv", begin), rng.uniform(0.0, 0.15))
        begin = max(flushed, default=begin) + 1
        if begin > 500:
            break
        with rt.Store.open(str(tmp_path / "kv")) as store:
            check(store, flushed, begin + 50)
    assert flushed


def test_killed_writer_loses_nothing_flushed(tmp_path: Path) -> None:
    """The writers are clients. The owner continues to serve after each kill, and frees the space of
    the dead client's puts.
    """
    with rt.Store.open(str(tmp_path / "kv"), capacity="1GiB", segment_bytes=4 << 20) as store:
        flushed: dict[int, int] = {}
        for round_ in range(4):
            flushed |= finish(start(tmp_path / "kv", round_ * 40), 0.1)
        check(store, flushed, 200)
        deadline = time.monotonic() + 20
        while store.stats()["reserved_bytes"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert store.stats()["reserved_bytes"] == 0
        assert store.role == "owner"


def test_client_finds_pages_of_killed_owner(tmp_path: Path) -> None:
    """The client takes over and finds all flushed pages."""
    owner = start(tmp_path / "kv", 0)
    assert owner.stdout is not None
    assert owner.stdout.readline().split() == ["open", "owner"]
    with rt.Store.open(str(tmp_path / "kv")) as store:
        assert store.role == "client"
        time.sleep(0.2)
        owner.send_signal(signal.SIGKILL)
        with owner.stdout:
            flushed = flushed_in(owner.stdout.read())
        owner.wait(timeout=30)
        check(store, flushed, max(flushed, default=0) + 1)
        assert store.role == "owner"
        keys = keys_of(10_000, 3)
        assert store.put_batch(SCOPE, keys, [page_of(key) for key in keys]) == 3
