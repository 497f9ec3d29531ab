"""Processes killed every fraction of a second while several of them work on one store.

`RITORNELLO_KILL_SECONDS=600 make test-python` runs each loop for ten minutes instead of a few
seconds; `RITORNELLO_KILL_SEED` chooses another course of events.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_sigkill import PAGE_BYTES, SCOPE, keys_of, page_of

import ritornello as rt

SECONDS = float(os.environ.get("RITORNELLO_KILL_SECONDS", "4"))
SEED = int(os.environ.get("RITORNELLO_KILL_SEED", "0"))
# Puts and flushes one sequence after the other, reads old ones, and says what was flushed.
CHILD = """
import random, sys
sys.path.insert(0, {here!r})
from test_sigkill import PAGE_BYTES, SCOPE, keys_of, page_of
import ritornello as rt
from ritornello.errors import RitornelloError
path, capacity, name = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(name)
with rt.Store.open(path, capacity=capacity, segment_bytes=4 << 20) as store:
    print("open", flush=True)
    out = [bytearray(PAGE_BYTES) for _ in range(7)]
    while True:
        name += 1
        keys = keys_of(name, 1 + name % 7)
        old = keys_of(rng.randrange(max(0, name - 99), name + 1), 7)
        try:
            stored = store.put_batch(SCOPE, keys, [page_of(key) for key in keys])
            if name % 3 == 0:
                store.flush()
                print("flushed", name, stored, flush=True)
            got = store.get_batch(SCOPE, old, out)
        except RitornelloError as error:
            # Another process was killed that was the owner: said once, and then it goes on.
            if store.stats()["poisoned"]:
                print("poisoned", error, flush=True)
            continue
        for key, page in zip(old[:got], out):
            if bytes(page) != page_of(key):
                print("wrong", name, flush=True)
"""


class Loop:
    """Two children at work on one store, and what they had flushed when they were killed."""

    def __init__(self, path: Path, capacity: str) -> None:
        self.capacity = capacity
        self.next = 0
        self.kills = 0
        self.begin(path)

    def begin(self, path: Path) -> None:
        """Makes a new store."""
        self.path = path
        # By name: the pages that were flushed.
        self.flushed: dict[int, int] = {}
        self.children = [self.start() for _ in range(2)]
        self.opened = [False, False]

    def end(self) -> None:
        """Kills both children."""
        while self.children:
            self.kill(0)
            del self.children[0]

    def start(self) -> subprocess.Popen[str]:
        """A child with names of its own."""
        self.next += 10_000
        code = CHILD.format(here=str(Path(__file__).parent))
        words = [sys.executable, "-c", code, str(self.path), self.capacity, str(self.next)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def wait(self, at: int, delay: float, *, opened: bool) -> None:
        """Lets a child work for `delay` seconds, counted from when it has opened the store."""
        stdout = self.children[at].stdout
        assert stdout is not None
        if opened and not self.opened[at]:
            assert stdout.readline() == "open\n"
            self.opened[at] = True
        time.sleep(delay)

    def kill(self, at: int) -> None:
        """Kills one child and reads what it said."""
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
                self.flushed[int(words[1])] = int(words[2])

    def check(self, names: list[int], *, evicts: bool) -> None:
        """Opens the store and looks at sequences that were flushed."""
        out = [bytearray(PAGE_BYTES) for _ in range(7)]
        with rt.Store.open(self.path, capacity=self.capacity, segment_bytes=4 << 20) as store:
            for name in names:
                keys = keys_of(name, 1 + name % 7)
                got = store.get_batch(SCOPE, keys, out[: len(keys)])
                assert evicts or got >= self.flushed[name], f"sequence {name} is gone"
                for key, page in zip(keys[:got], out, strict=False):
                    assert bytes(page) == page_of(key), f"wrong bytes in sequence {name}"


def run(loop: Loop, rng: random.Random, *, evicts: bool) -> tuple[int, int]:
    """Kills until the time is over. Returns how many sequences had been flushed, and the kills."""
    until = time.monotonic() + SECONDS
    flushed = 0
    while True:
        at = rng.randrange(2)
        # Now and then in the middle of opening.
        loop.wait(at, rng.uniform(0.0, 0.3), opened=rng.random() < 0.8)
        loop.kill(at)
        loop.children[at], loop.opened[at] = loop.start(), False
        if rng.random() < 0.3:
            names = list(loop.flushed)
            loop.check(rng.sample(names, min(20, len(names))), evicts=evicts)
        over = time.monotonic() >= until
        if len(loop.flushed) > 3_000 or over:
            # Before a large store is full, another one is begun.
            loop.end()
            loop.check(list(loop.flushed), evicts=evicts)
            flushed += len(loop.flushed)
            if over:
                return flushed, loop.kills
            shutil.rmtree(loop.path)
            loop.begin(loop.path.with_name(str(loop.kills)))


@pytest.mark.timeout(60 + 2 * SECONDS)
@pytest.mark.parametrize("capacity", ["2GiB", "48MiB"])
def test_kill_loop(tmp_path: Path, capacity: str) -> None:
    """In a large store everything that was flushed is there; a small one evicts all the time."""
    loop = Loop(tmp_path / "0", capacity)
    try:
        flushed, kills = run(loop, random.Random(SEED), evicts=capacity == "48MiB")
    finally:
        loop.end()
    print(f"{capacity}: {kills} kills, {flushed} sequences flushed before one and looked at")
    assert flushed > 0
    assert kills > 0
