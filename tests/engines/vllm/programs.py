"""Runs programs, each in a process that is forked from an interpreter which has imported vLLM: the
imports take half of the CPU time of a program with a small engine.

As a program this module is such an interpreter. For each line of its input, a `Run` in JSON, it
forks a process, and prints this process's status as `waitpid` returns it.
"""

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import REPLY, set_environment

from servers.child import Child

PR_SET_PDEATHSIG = 1


@dataclass
class Run:
    """A run of `program` with its arguments `words`. Its errors go to the file `log`, and so does
    its output if `output` is None. The kernel kills the process after `timeout` seconds.
    """

    program: str
    words: list[str]
    log: str
    timeout: int
    environment: dict[str, str]
    input: str = os.devnull
    output: str | None = None

    def become(self) -> None:
        """Runs the program in this process, as its main module."""
        signal.alarm(self.timeout)
        # If pytest interrupts a test, it kills the interpreter that forked this process: the kernel
        # then kills this process too.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ.clear()
        os.environ.update(self.environment)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        output = os.open(self.output, os.O_WRONLY) if self.output else log
        for number, file in ((0, os.open(self.input, os.O_RDONLY)), (1, output), (2, log)):
            os.dup2(file, number)
        sys.argv = [self.program, *self.words]
        # The collections of a process that ends take longer than a small engine's start. vLLM
        # unfreezes objects when it shuts down; Python collects frozen objects neither then nor
        # while it ends.
        gc.unfreeze = lambda: None  # type: ignore[assignment]
        runpy.run_path(self.program, run_name="__main__")
        gc.freeze()


class Interpreters:
    """Two interpreters that fork in turn, one process at a time each. Python hashes strings
    differently in the two, so a test fails if the keys of stored pages depend on these hashes: the
    next program does not find the pages.
    """

    def __init__(self) -> None:
        # The interpreters that run no program. The first of them runs the next program.
        self._idle: list[Child] = []
        self._started: list[Child] = []

    def start(self, program: Path, *words: str, log: Path, timeout: int, **streams: str) -> Child:
        """Starts `program`. Returns the interpreter that forked it, for `wait`."""
        if len(self._started) < 2:
            self._started.append(Child(Path(__file__)))
            self._idle.insert(0, self._started[-1])
        assert self._idle, "two programs are running: end one of them first"
        interpreter = self._idle.pop(0)
        path = os.pathsep.join(filter(None, sys.path))
        environment = dict(os.environ | {"PYTHONPATH": path})
        asked = Run(str(program), list(words), str(log), timeout, environment, **streams)
        try:
            interpreter.send(json.dumps(asdict(asked)))
        except BaseException:
            self.end()
            raise
        return interpreter

    def wait(self, interpreter: Child, program: Path, log: Path) -> None:
        """Waits for the end of the program that `interpreter` runs."""
        try:
            ended = interpreter.read()
            assert ended, "the interpreter that forks programs has ended"
        except BaseException:
            # End the interpreters: if the wait is interrupted, the exit status of `program` is
            # unread, and the next run would take this status for the status of its program.
            self.end()
            raise
        self._idle.append(interpreter)
        status = os.waitstatus_to_exitcode(int(ended))
        assert status == 0, f"{program.name} ended with {status}; its log:\n{tail(log)}"

    def end(self) -> None:
        for child in self._started:
            child.kill()
            child.communicate(timeout=60)
        self._started.clear()
        self._idle.clear()


INTERPRETERS = Interpreters()


def tail(log: Path) -> str:
    """Returns the last 3,000 characters of a log."""
    return log.read_text()[-3000:] if log.exists() else ""


def ask_program(name: str, *words: str | Path, log: Path, timeout: int) -> Any:
    """Runs a program of this folder, whose output goes to `log`, and returns its reply."""
    program = Path(__file__).with_name(name)
    INTERPRETERS.wait(
        INTERPRETERS.start(program, *map(str, words), log=log, timeout=timeout), program, log
    )
    lines = log.read_text().splitlines()
    line = next((line for line in lines if line.startswith(REPLY)), None)
    assert line is not None, f"{name} sent no reply; the end of its log:\n{tail(log)}"
    return json.loads(line.removeprefix(REPLY))


class Dialogue:
    """A program with which this process exchanges lines of text. `lines` are the lines of its
    output, without its replies. Its errors go to the file `log`. As a context manager, kills the
    program if the block fails; otherwise the block ends it.
    """

    def __init__(self, program: Path, *words: str | Path, log: Path, timeout: int = 900) -> None:
        self.lines: list[str] = []
        self._program, self._log = program, log
        streams = {name: f"{log}.{name}" for name in ("input", "output")}
        for path in streams.values():
            os.mkfifo(path)
        with ExitStack() as files:
            # With these modes an open does not wait for the program, which may end before it opens
            # a pipe.
            output = os.open(streams["output"], os.O_RDONLY | os.O_NONBLOCK)
            self._output = files.enter_context(os.fdopen(output))
            self._input = files.enter_context(os.fdopen(os.open(streams["input"], os.O_RDWR), "w"))
            self._interpreter = INTERPRETERS.start(
                program, *map(str, words), log=log, timeout=timeout, **streams
            )
            self._files = files.pop_all()

    def send(self, line: str) -> None:
        print(line, file=self._input, flush=True)

    def reply(self) -> Any:
        """Returns the program's next reply."""
        self._wait_for_output()
        for line in self._output:
            if line.startswith(REPLY):
                return json.loads(line.removeprefix(REPLY))
            self.lines.append(line.rstrip())
        said = "\n".join([*self.lines[-40:], tail(self._log)])
        raise AssertionError(f"the program ended without a reply; the end of its output:\n{said}")

    def end(self) -> None:
        """Waits until the program ends, without killing it."""
        self._input.close()
        self._wait_for_output()
        self.lines += [line.rstrip() for line in self._output]
        self._files.close()
        INTERPRETERS.wait(self._interpreter, self._program, self._log)

    def _wait_for_output(self) -> None:
        """Waits until the program writes its first output or ends. Before, a read would return the
        end of the output.
        """
        if not os.get_blocking(self._output.fileno()):
            select.select([self._output, self._interpreter.stdout], [], [])
            os.set_blocking(self._output.fileno(), True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._files.close()
        finally:
            if kind is not None:
                INTERPRETERS.end()


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
    # Garbage collections in the forked processes leave out the objects that exist now: an engine
    # collects several times at its start and its end, and these objects are more than its own.
    gc.collect()
    gc.freeze()


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
