"""A kernel that refuses calls: failed syncs and allocations by `strace -e inject`, and a sandbox
that forbids `io_uring`, like the default profile of container runtimes, and direct I/O.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_sigkill import PAGE_BYTES, SCOPE, keys_of, page_of

import ritornello as rt

# Twelve times puts a sequence of seven pages and flushes. Prints for each repetition (`rounds`) the
# sequence's name, the numbers of stored and flushed pages, and the kind of the error ("" if none).
# Also prints how bytes were moved, and, after a failed sync, the outcomes of two further puts and
# flushes and the number of reopenings of the store (`after`).
CHILD = """
import json, sys, time
sys.path.insert(0, {here!r})
from test_hostile_kernel import forbid
from test_sigkill import PAGE_BYTES, SCOPE, keys_of, page_of
if {forbid!r}:
    forbid()
import ritornello as rt
from ritornello.errors import RitornelloError
rounds = []
store = rt.Store.open(sys.argv[1], capacity="64MiB", segment_bytes=1 << 20)
for name in range(12):
    keys = keys_of(name, 7)
    stored = flushed = 0
    word = ""
    try:
        stored = store.put_batch(SCOPE, keys, [page_of(key) for key in keys])
        store.flush()
        flushed = stored
    except RitornelloError as error:
        word = error.kind
    rounds.append([name, stored, flushed, word])
out = [bytearray(PAGE_BYTES) for _ in range(7)]
right = 0
for name in range(12):
    keys = keys_of(name, 7)
    for key, page in zip(keys[:store.get_batch(SCOPE, keys, out)], out):
        assert bytes(page) == page_of(key), "a get returned wrong bytes"
        right += 1
stats = store.stats()
io = stats["io"]
after = []
if stats["poisoned"]:
    deadline = time.monotonic() + 20
    while store.problem and time.monotonic() < deadline:
        time.sleep(0.05)
    # The first flush after the reopening fails if puts that had succeeded may be lost.
    for _ in range(2):
        try:
            after.append(store.put_batch(SCOPE, keys, [page_of(key) for key in keys]))
            store.flush()
            after.append("flushed")
        except RitornelloError as error:
            after.append(error.kind)
    after.append(store.stats()["counters"]["reopenings"])
print(json.dumps(dict(rounds=rounds, right=right, mode=io["mode"], direct=io["direct"],
                      warnings=list(io["warnings"]), poisoned=bool(stats["poisoned"]),
                      after=after)))
try:
    store.close()
except RitornelloError:
    pass
"""
# By architecture: the flag O_DIRECT, and the numbers of the system calls `open` (on x86_64) and
# `openat`, each with the index of its argument `flags`.
MACHINES = {"x86_64": (0x4000, {2: 1, 257: 2}), "aarch64": (0x10000, {56: 2})}
IO_URING_SETUP = 425


def forbid() -> None:
    """Installs a seccomp filter that forbids `io_uring` and direct I/O in this process."""
    import ctypes
    import struct

    o_direct, opens = MACHINES[platform.machine()]
    errno, allow = 0x0005_0000, 0x7FFF_0000
    # Opcodes of BPF: load a word; jump if it equals the operand; jump if it has the bit of the
    # operand; return. A line has the opcode, the number of lines to skip if the condition of a jump
    # is true and if it is false, and the operand.
    load, equal, bit, answer = 0x20, 0x15, 0x45, 0x06
    program = [(load, 0, 0, 0), (equal, 0, 1, IO_URING_SETUP), (answer, 0, 0, errno | 1)]
    for number, position in opens.items():
        program += [
            (equal, 0, 4, number),
            (load, 0, 0, 16 + 8 * position),
            (bit, 0, 1, o_direct),
            (answer, 0, 0, errno | 22),
            (answer, 0, 0, allow),
        ]
    program += [(answer, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    memory = ctypes.create_string_buffer(code)
    head = struct.pack("HP", len(program), ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, head, 0, 0) == 0, ctypes.get_errno()


def run(path: Path, *before: str, forbidden: bool = False) -> dict[str, Any]:
    """Runs the program `CHILD`, preceded by the words `before` of another command if any, and
    returns the program's report.
    """
    code = CHILD.format(here=str(Path(__file__).parent), forbid=forbidden)
    words = [*before, sys.executable, "-c", code, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def inject(what: str) -> list[str]:
    """Returns the beginning of an `strace` command that injects `what` into a program's system
    calls; skips the test if the machine cannot trace programs.
    """
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    words = [strace, "-f", "-qq", "-o", "/dev/null", "-e", f"trace={what.split(':')[0]}"]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode != 0:
        pytest.skip(f"strace cannot trace a program here: {tried.stderr.strip()}")
    return [*words, "-e", f"inject={what}"]


def check(path: Path, said: dict[str, Any]) -> None:
    """Checks that all pages that the program flushed are stored, and that the store takes puts."""
    out = [bytearray(PAGE_BYTES) for _ in range(7)]
    with rt.Store.open(path) as store:
        for name, _, flushed, _ in said["rounds"]:
            keys = keys_of(name, 7)
            got = store.get_batch(SCOPE, keys, out)
            assert got >= flushed, f"flushed pages of sequence {name} are missing"
            for key, page in zip(keys[:got], out, strict=False):
                assert bytes(page) == page_of(key), f"wrong bytes in sequence {name}"
        keys = keys_of(99, 3)
        assert store.put_batch(SCOPE, keys, [page_of(key) for key in keys]) == 3
        store.flush()


# Opening a new store makes fewer than 12 calls of `fdatasync`, so the call that fails comes after
# the opening.
@pytest.mark.parametrize("nth", [12, 16, 20, 24])
def test_store_reopens_after_failed_fdatasync(tmp_path: Path, nth: int) -> None:
    path = tmp_path / "kv"
    said = run(path, *inject(f"fdatasync:error=EIO:when={nth}"))
    words = [word for _, _, _, word in said["rounds"]]
    assert set(words[words.index("retry") :]) <= {"retry", "miss", ""}, words
    if said["poisoned"]:
        *first, stored, flushed, reopenings = said["after"]
        assert first in ([7, "miss"], [7, "flushed"])
        assert (stored, flushed, reopenings) == (7, "flushed", 1)
    check(path, said)


def test_full_disk_stops_growth_not_store(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    said = run(path, *inject("fallocate:error=ENOSPC:when=2+"))
    assert not said["poisoned"]
    assert said["rounds"][0][2] == 7
    # The store has one segment and evicts old sequences, but all seven pages of the last sequence
    # were stored and flushed.
    assert said["rounds"][-1][2] == 7
    assert said["right"] >= 7


def test_store_works_without_uring_and_direct_io(tmp_path: Path) -> None:
    if platform.machine() not in MACHINES:
        pytest.skip(f"the test has no seccomp filter for {platform.machine()}: add it to MACHINES")
    path = tmp_path / "kv"
    said = run(path, forbidden=True)
    assert (said["mode"], said["direct"]) == ("buffered", False)
    assert any("O_DIRECT" in warning for warning in said["warnings"]), (
        "a warning must name O_DIRECT"
    )
    assert said["right"] == 12 * 7
    check(path, said)
