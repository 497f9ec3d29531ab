"""Runs programs of this folder, each in a process that is forked from an interpreter which has
imported vLLM: the imports take half of the CPU time of a program with a small engine.

As a program this module is such an interpreter. For each line of its input, a `Run` in JSON, it
forks a process, and prints this process's status as `waitpid` returns it.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from harness import REPLY, set_environment

from servers.child import Child

PR_SET_PDEATHSIG = 1


@dataclass
class Run:
    """A run of `program` with its arguments `words`; its output goes to the file `log`. The kernel
    kills the process after `timeout` seconds.
    """

    program: str
    words: list[str]
    log: str
    timeout: int
    environment: dict[str, str]

    def become(self) -> None:
        """Runs the program in this process, as its main module."""
        signal.alarm(self.timeout)
        # If pytest interrupts a test, it kills the interpreter that forked this process: the kernel
        # then kills this process too.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ.clear()
        os.environ.update(self.environment)
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file, number)
        sys.argv = [self.program, *self.words]
        runpy.run_path(self.program, run_name="__main__")


class Interpreters:
    """Two interpreters that fork in turn. Python hashes strings differently in the two, so a test
    fails if the keys of stored pages depend on these hashes: the next program does not find the
    pages.
    """

    def __init__(self) -> None:
        self._started: list[Child] = []
        self._turns = cycle(range(2))

    def run(self, program: Path, *words: str, log: Path, timeout: int) -> None:
        turn = next(self._turns)
        if turn == len(self._started):
            self._started.append(Child(Path(__file__)))
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": path}
        asked = Run(str(program), list(words), str(log), timeout, dict(environment))
        try:
            ended = self._started[turn].ask(json.dumps(asdict(asked)))
        except BaseException:
            # End the interpreters: if the wait is interrupted, the exit status of `program` is
            # unread, and the next run would take this status for the status of its program.
            self.end()
            raise
        assert ended, "the interpreter that forks programs has ended"
        status = os.waitstatus_to_exitcode(int(ended))
        assert status == 0, f"{program.name} ended with {status}; its log:\n{tail(log)}"

    def end(self) -> None:
        for child in self._started:
            child.kill()
            child.communicate(timeout=60)
        self._started.clear()
        self._turns = cycle(range(2))


INTERPRETERS = Interpreters()


def tail(log: Path) -> str:
    """Returns the last 3,000 characters of a log."""
    return log.read_text()[-3000:] if log.exists() else ""


def ask_program(name: str, *words: str | Path, log: Path, timeout: int) -> Any:
    """Runs a program of this folder, whose output goes to `log`, and returns its reply."""
    program = Path(__file__).with_name(name)
    INTERPRETERS.run(program, *map(str, words), log=log, timeout=timeout)
    lines = log.read_text().splitlines()
    line = next((line for line in lines if line.startswith(REPLY)), None)
    assert line is not None, f"{name} sent no reply; the end of its log:\n{tail(log)}"
    return json.loads(line.removeprefix(REPLY))


def import_vllm() -> None:
    # The environment must be set before the imports: OpenMP reads OMP_NUM_THREADS when it is
    # loaded.
    set_environment()
    from vllm import LLM
    from vllm.v1.worker import cpu_worker

    assert LLM and cpu_worker
    # The interpreter must have a single thread: a fork copies only the thread that calls it, but
    # also the locks that other threads hold.
    assert len(list(Path("/proc/self/task").iterdir())) == 1


def next_run() -> Run | None:
    """Forks a process for each run on standard input. Returns the run in the forked process, and
    None in this process at the end of the input.
    """
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return Run(**json.loads(line))
        print(os.waitpid(child, 0)[1], flush=True)
    return None


if __name__ == "__main__":
    import_vllm()
    if (asked := next_run()) is not None:
        asked.become()
