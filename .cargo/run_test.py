#!/usr/bin/env python3
"""Runs a test binary, and ends it with its children when it has printed nothing for too long.

    run_test.py BINARY [ARGUMENT ...]

`make` has cargo start test binaries through this script (`.cargo/tests.toml`); plain `cargo test`
does not. The limit is `TEST_SILENCE` seconds, by default 600. After the script has ended a silent
binary, it exits with status 124. libtest names a test that has run for a minute, but not with
`--quiet`. If `--quiet` is given, the script therefore does not pass the option on, and itself
leaves out the lines of tests that passed or were ignored.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMIT = float(os.environ.get("TEST_SILENCE", "600"))
# What libtest prints about a test: its result; that it has run for a minute; and, with one test
# thread, the beginning of the result's line, which libtest prints when the test starts.
RESULT = re.compile(rb"test (.+?)(?: - should panic)? \.\.\. (\w+)")
SLOW = re.compile(rb"test (.+) has been running for over \d+ seconds")
STARTED = re.compile(rb"test (.+?)(?: - should panic)? \.\.\. $")


class Output:
    """The output of a test binary, line by line."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.partial = b""
        self.slow: dict[bytes, None] = {}

    def take(self, data: bytes) -> None:
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            if result := RESULT.match(line):
                self.slow.pop(result[1], None)
            elif slow := SLOW.match(line):
                self.slow[slow[1]] = None
            if not (self.quiet and result and result[2] in (b"ok", b"ignored")):
                self.print(line + b"\n")

    def print(self, data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def running(self) -> list[str]:
        """Returns the test whose line libtest has begun to print or, without such a line, the tests
        that libtest reported as running for a minute and whose result it has not printed.
        """
        started = STARTED.match(self.partial)
        return [name.decode() for name in ([started[1]] if started else self.slow)]


def descendants(parent: int) -> list[int]:
    """Returns the ids of the process `parent` and of all its descendants, parents first."""
    found = [parent]
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def threads(process: int) -> list[str]:
    """Returns the names of the process's threads. The thread of a test has the first 15 characters
    of the test's name.
    """
    names = []
    for task in Path(f"/proc/{process}/task").glob("*/comm"):
        try:
            names.append(task.read_text().strip())
        except OSError:
            continue
    return sorted(names)


def run(binary: str, arguments: list[str]) -> int:
    quiet = "--quiet" in arguments
    command = [binary, *(word for word in arguments if word != "--quiet")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout
    output = Output(quiet)
    os.set_blocking(process.stdout.fileno(), False)
    # This descriptor is readable when the process has ended.
    end = os.pidfd_open(process.pid)
    closed = False
    heard = time.monotonic()
    while True:
        # Do not wait for the end of the output, because children of a test may keep the pipe open.
        ended = process.poll() is not None
        sources = [end] if closed else [end, process.stdout]
        select.select(sources, [], [], 0 if ended else 0.2)
        data = None if closed else process.stdout.read()
        closed = closed or data == b""
        if data:
            output.take(data)
            heard = time.monotonic()
        elif ended:
            output.print(output.partial)
            status = process.wait()
            return status if status >= 0 else 128 - status
        elif time.monotonic() - heard > LIMIT:
            output.print(output.partial + b"\n")
            names = ", ".join(output.running()) or f"unknown; threads: {threads(process.pid)}"
            print(f"{binary} printed nothing for {LIMIT:.0f} s. Running: {names}", file=sys.stderr)
            for one in reversed(descendants(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            process.wait()
            return 124


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
