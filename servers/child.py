"""A Python program in a child process, with which this process exchanges lines of text."""

import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from types import TracebackType
from typing import IO, Any

# A program that owns a store until its input ends. Its arguments: the path of the store, and
# options of `Store.open` as JSON.
OWNER = """
import json, sys
import ritornello as rt
with rt.Store.open(sys.argv[1], **json.loads(sys.argv[2])) as store:
    print(store.role, flush=True)
    sys.stdin.read()
"""


class Child(Popen[str]):
    """Runs code or, given a path, a script, with the arguments `words`. The program can import the
    modules that this process can import. As a context manager, kills the process at the end.
    """

    def __init__(self, code: str | Path, *words: str | Path, stderr: int | None = None) -> None:
        program = [code] if isinstance(code, Path) else ["-c", code]
        super().__init__(
            [sys.executable, *program, *words],
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def read(self) -> str:
        """Returns the next line of output without its line break; an empty string after the last
        line.
        """
        return _open(self.stdout).readline().rstrip("\n")

    def ask(self, line: str = "") -> str:
        """Sends a line, and returns the next line of output."""
        self.send(line)
        return self.read()

    def send(self, line: str = "") -> None:
        print(line, file=_open(self.stdin), flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        super().__exit__(kind, value, traceback)


def owner_of(store: str | Path, **options: Any) -> Child:
    """Starts a process that owns the store, and does nothing else."""
    child = Child(OWNER, store, json.dumps(options))
    role = child.read()
    assert role == "owner", f"the process does not own the store: {role or 'it ended'}"
    return child


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
