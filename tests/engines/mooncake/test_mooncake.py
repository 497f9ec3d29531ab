"""A remote tier in a real Mooncake store, over TCP on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from servers.process import free_port

HERE = Path(__file__).parent
DEBIAN = Path(sys.prefix) / "debian"
LIBRARIES = [*DEBIAN.glob("usr/lib/*/"), *DEBIAN.glob("lib/*/")]
ENVIRONMENT = {
    **os.environ,
    "LD_LIBRARY_PATH": os.pathsep.join(map(str, LIBRARIES)),
    "PYTHONPATH": str(HERE.parents[1] / "python"),
    "PYTHONFAULTHANDLER": "1",
}
PAGES = 150

_tried = subprocess.run(
    [sys.executable, "-c", "import mooncake.store"],
    env=ENVIRONMENT,
    capture_output=True,
    text=True,
    check=False,
)
if _tried.returncode != 0:
    _why = _tried.stderr.strip().rsplit("\n", 1)[-1]
    pytest.skip(f"Mooncake cannot be loaded here: {_why}", allow_module_level=True)


class Process:
    """A worker or another program, which is killed when the test ends."""

    def __init__(self, *words: str | Path, log: Path) -> None:
        with log.open("ab") as err:
            self.process = subprocess.Popen(
                words,
                env=ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )

    def answer(self) -> str:
        """Returns the next line of the process's output."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> tuple[int, int]:
        """Sends a command to the worker. Returns the two numbers of its answer; see `use`
        in `worker.py`.
        """
        assert self.process.stdin
        print(what, file=self.process.stdin, flush=True)
        first, second = self.answer().split()
        return int(first), int(second)

    def kill(self) -> None:
        """Kills the process by SIGKILL, as the failure of a machine would end it."""
        self.process.kill()
        self.process.communicate()


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as processes:

        def start(*words: str | Path) -> Process:
            process = Process(*words, log=tmp_path / "log")
            processes.callback(process.kill)
            return process

        yield start


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def master(start: Start, port: int, tmp_path: Path) -> Process:
    program = shutil.which("mooncake_master", path=Path(sys.prefix) / "bin")
    assert program
    return start(
        *(program, "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"),
        *(f"--metrics_port={free_port()}", "--enable_metric_reporting=false"),
        f"--log_dir={tmp_path}",
    )


@pytest.fixture
def holder(start: Start, master: Process, port: int) -> Process:
    """Starts, and returns, the process whose memory holds the values of the Mooncake store."""
    del master
    for _ in range(100):
        holder = start(sys.executable, HERE / "worker.py", "hold", f"127.0.0.1:{port}")
        if holder.answer() == "False":
            return holder
    raise AssertionError("no worker could join Mooncake's master in 100 attempts")


def doctor(port: int) -> subprocess.CompletedProcess[str]:
    address = f"ritornello.mooncake:Mooncake?master=127.0.0.1:{port}&host=127.0.0.1"
    words = [sys.executable, "-m", "ritornello", "doctor", "--json", "--backend", address]
    return subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_mooncake_meets_backend_contract(holder: Process, port: int) -> None:
    del holder
    for _ in range(3):
        done = doctor(port)
        answer = json.loads(done.stdout)
        wrong = [check for check in answer["checks"] if check["wrong"]]
        if not wrong:
            break
        # Try again: Mooncake may refuse a call just after its start.
        print(wrong, done.stderr)
    assert (wrong, done.returncode, answer["healthy"]) == ([], 0, True)
    assert "cannot be listed" in answer["advice"][0]


def test_killed_memory_holder_costs_hits_only(
    start: Start, master: Process, holder: Process, port: int, tmp_path: Path
) -> None:
    def worker(name: str) -> Process:
        there = f"127.0.0.1:{port}"
        return start(sys.executable, HERE / "worker.py", "use", there, tmp_path / name)

    writer, reader = worker("writer"), worker("reader")
    assert writer.ask("put a") == (PAGES, PAGES)
    assert writer.ask("put b") == (PAGES, 2 * PAGES)
    assert writer.ask("put c") == (PAGES, 3 * PAGES)
    writer.kill()
    assert reader.ask("get a") == (PAGES, PAGES)
    assert reader.ask("get nothing") == (0, 0)
    holder.kill()
    # The worker compares every page it loads.
    found, came = reader.ask("get b")
    assert found == came < PAGES
    master.kill()
    assert reader.ask("get c") == (0, 0)
    assert reader.ask("get a") == (PAGES, PAGES), (
        "pages on this machine must stay readable without the master"
    )


def test_missing_master_is_reported(port: int) -> None:
    done = doctor(port)
    assert done.returncode == 1
    wrong = [check["wrong"] for check in json.loads(done.stdout)["checks"]]
    assert f"no mooncake_master at 127.0.0.1:{port}" in wrong[0]
