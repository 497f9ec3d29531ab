"""`ritornello top` on a terminal."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from select import select

import pytest
from support import SMALL, keys_of, open_small, pages_of

import ritornello as rt
from servers.child import owner_of

SCOPE = rt.Scope.opaque("m", 4096)


def drawn(written: str) -> str:
    """Returns the text on the terminal after a program wrote `written`, which moves the cursor over
    unchanged characters.
    """
    cells: dict[tuple[int, int], str] = {}
    row, column = 1, 1
    for move, other, character in re.findall(
        r"\x1b\[([0-9;]*)H|(\x1b\[[0-9;?]*[a-zA-Z])|([^\x1b])", written
    ):
        if character:
            cells[row, column] = character
            column += 1
        elif not other:
            row, column = map(int, move.split(";")) if move else (1, 1)
    height, width = (max((cell[axis] for cell in cells), default=0) for axis in (0, 1))
    lines = (
        "".join(cells.get((y, x), " ") for x in range(1, width + 1)) for y in range(1, height + 1)
    )
    return " ".join(" ".join(lines).split())


class Screen:
    """`ritornello` on a terminal of `lines` lines and `columns` columns. `written`: all its
    output.
    """

    def __init__(self, *words: str, lines: int = 24, columns: int = 80) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        line = [sys.executable, "-m", "ritornello", *words]
        self.process = subprocess.Popen(
            line, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.written = ""

    def read(self, seconds: float = 0.1) -> str:
        while select([self.master], [], [], seconds)[0]:
            try:
                self.written += os.read(self.master, 1 << 16).decode(errors="replace")
            except OSError:  # no process has the terminal open
                break
        return self.written

    def shows(self, pattern: str) -> bool:
        """Returns whether text that matches `pattern` appears within a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if re.search(pattern, drawn(self.read())):
                return True
            if self.process.poll() is not None:
                self.read()
        return False

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def end(self) -> int:
        code = self.process.wait(60)
        self.read()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[rt.Store]:
    with open_small(tmp_path / "store") as store:
        keys = keys_of("a", 5)
        assert store.put_batch(SCOPE, keys, pages_of(keys, 4096)) == 5
        yield store


@pytest.mark.parametrize("key", ["q", "\x1b", "\x03"])
def test_key_ends_top_and_restores_terminal(store: rt.Store, tmp_path: Path, key: str) -> None:
    screen = Screen("top", str(tmp_path / "store"))
    try:
        assert screen.shows("5 pages in 1"), screen.written
        assert screen.shows("quarantined"), screen.written
        screen.press(key)
        assert screen.end() == 0
        entered, left = screen.written.find("\x1b[?1049h"), screen.written.rfind("\x1b[?1049l")
        assert 0 <= entered < left, "the alternate screen must be left at the end"
        assert screen.written.rfind("\x1b[?25h") > screen.written.rfind("\x1b[?25l"), (
            "the cursor was not shown again"
        )
    finally:
        screen.close()


@pytest.mark.parametrize(("lines", "columns"), [(50, 200), (40, 30), (3, 12), (1, 1)])
def test_top_fits_any_terminal_size(
    store: rt.Store, tmp_path: Path, lines: int, columns: int
) -> None:
    screen = Screen("top", str(tmp_path / "store"), lines=lines, columns=columns)
    try:
        # No row fits on the smallest terminal, so wait only for the switch to the alternate screen.
        while "\x1b[?1049h" not in screen.read():
            assert screen.process.poll() is None, screen.written
        assert columns < 30 or screen.shows("full")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.end() == 0
    finally:
        screen.close()


def test_top_survives_owner_death(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    rt.Store.open(path, **SMALL).close()
    with owner_of(path) as owner:
        screen = Screen("top", path)
        try:
            assert screen.shows(f"owned by process {owner.pid}"), screen.written
            owner.kill()
            owner.wait()
            assert screen.shows("no process owns the store: waiting"), screen.written
            with owner_of(path) as next_owner:
                assert screen.shows(f"owned by process {next_owner.pid}"), screen.written
            screen.press("q")
            assert screen.end() == 0
        finally:
            screen.close()


def test_top_waits_for_first_owner(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    rt.Store.open(path, **SMALL).close()
    screen = Screen("top", path)
    try:
        assert screen.shows("no process owns the store: waiting for an owner"), screen.written
        assert "\x1b[?1049h" not in screen.written
        with owner_of(path) as owner:
            assert screen.shows(f"owned by process {owner.pid}"), screen.written
            screen.press("q")
            assert screen.end() == 0
    finally:
        screen.close()


def test_top_without_store_fails(tmp_path: Path) -> None:
    screen = Screen("top", str(tmp_path / "nothing"))
    try:
        assert screen.end() == 2
        assert "\x1b[?1049h" not in screen.written
        assert "nothing" in screen.written
    finally:
        screen.close()
