"""The core's log in Python's `logging`, and its limit on repeated lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Opens a store of 30 pages in `where`, and damages all pages in its segment file. Each get of a
# damaged page logs a warning.
DAMAGED = """
import logging, os, sys, threading, time
from pathlib import Path
import numpy as np
import ritornello as rt
from ritornello import core_log

where = Path(sys.argv[1])
scope = rt.Scope.opaque("log", 4096)
keys = [bytes([number]) * 16 for number in range(30)]
pages = np.full((30, 4096), 7, np.uint8)

def fill(where):
    store = rt.Store.open(where, capacity="64MiB", segment_bytes=4 << 20)
    for key, page in zip(keys, pages):
        store.put_batch(scope, [key], [page])
    store.flush()
    for segment in where.rglob("*"):
        if segment.stat().st_size >= 4 << 20:
            content = segment.read_bytes()
            segment.write_bytes(content.replace(b"\\x07" * 4096, b"\\x08" * 4096))
    return store

def get(store, numbers):
    for number in numbers:
        assert store.get_batch(scope, [keys[number]], pages[:1].copy()) == 0
"""
REMOVED = "a page failed verification on disk and was removed"


def log_of(where: Path, script: str, **environment: str) -> str:
    """Returns what a process that runs DAMAGED and `script` prints on standard error."""
    environment = {**os.environ, **environment}
    options = ["-W", "ignore::DeprecationWarning", "-c", DAMAGED + script, str(where)]
    found = subprocess.run(
        [sys.executable, *options], env=environment, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    return found.stderr


def test_core_logs_to_python_loggers(where: Path) -> None:
    lines = log_of(
        where,
        """
class Print(logging.Handler):
    def emit(self, record):
        print(record.name, record.levelname, Path(record.pathname).name, record.lineno > 0,
              record.fields["reason"], abs(record.created - time.time()) < 60,
              record.getMessage(), sep="|", file=sys.stderr)
logging.getLogger().addHandler(Print())
get(fill(where), [3])
""",
    )
    (line,) = lines.splitlines()
    start = "ritornello.core.store.core.removal|WARNING|removal.rs|True|checksum|True|" + REMOVED
    assert line.startswith(start + " reason=checksum generation=")


def test_engine_names_parent_of_core_loggers(where: Path) -> None:
    script = """
logging.getLogger("engine").addHandler(logging.StreamHandler())
logging.getLogger("engine").propagate = False
core_log.log_below("engine")
get(fill(where), [3])
"""
    assert log_of(where, script).startswith(REMOVED)


def test_vllm_is_parent_of_core_loggers_in_vllm() -> None:
    script = "from ritornello import core_log, vllm; print(core_log._parent)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == "vllm.ritornello\n", found.stderr


def test_core_logs_to_stderr_without_handlers(where: Path) -> None:
    (line,) = log_of(where, "get(fill(where), [3])").splitlines()
    assert f" WARNING ritornello.core.store.core.removal: {REMOVED} reason=checksum" in line


def test_environment_variable_chooses_levels_of_core_loggers(where: Path) -> None:
    script = "get(fill(where), [3])"
    assert not log_of(where, script, RITORNELLO_LOG="error")
    lines = log_of(where, script, RITORNELLO_LOG="error,ritornello_node=info").splitlines()
    assert ["the store is open role=owner" in line for line in lines] == [True]
    (line,) = log_of(where, script, RITORNELLO_LOG="warn,json").splitlines()
    assert json.loads(line)["message"] == REMOVED


@pytest.mark.parametrize("levels", ["warn", "warn,json"])
def test_repeated_lines_are_omitted_and_counted(where: Path, levels: str) -> None:
    script = "get(fill(where), range(30))"
    lines = log_of(where, script, RITORNELLO_LOG=levels).splitlines()
    assert [REMOVED in line for line in lines] == [True] * 20 + [False]
    assert "omitted 10 further lines of crates/store/src/core/removal.rs:" in lines[20]
    if "json" in levels:
        assert json.loads(lines[20])["level"] == "WARN"


def test_lines_reach_loggers_that_configuration_disabled(where: Path) -> None:
    script = """
import logging.config
store = fill(where)
get(store, [3])
while "ritornello.core.store.core.removal" not in logging.root.manager.loggerDict:
    time.sleep(0.001)  # until the thread that takes lines has made the logger
logging.config.dictConfig({
    "version": 1, "handlers": {"own": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["own"]},
})
get(store, [4])
"""
    assert [REMOVED in line for line in log_of(where, script).splitlines()] == [True, True]


def test_lines_go_to_stderr_if_log_thread_cannot_start(where: Path) -> None:
    script = """
def refuse(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
store = fill(where)
get(store, [3, 4])
"""
    start = "WARN ritornello_store::core::removal: " + REMOVED
    assert [line.startswith(start) for line in log_of(where, script).splitlines()] == [True] * 2


@pytest.mark.parametrize("value", ["", "warm", "x="])
def test_program_chooses_level_without_valid_environment_variable(where: Path, value: str) -> None:
    script = """
logging.getLogger("ritornello").setLevel("ERROR")
get(fill(where), [3])
"""
    lines = log_of(where, script, RITORNELLO_LOG=value).splitlines()
    assert ["was ignored" in line for line in lines] == ([True] if value else [])


def test_handler_that_hangs_does_not_delay_store(where: Path) -> None:
    lines = log_of(
        where,
        """
class Hang(logging.Handler):
    def emit(self, record):
        print("hangs", file=sys.stderr, flush=True)
        hung.set()
        threading.Event().wait()
hung = threading.Event()
logging.getLogger().addHandler(Hang())
store = fill(where)
get(store, [3])
hung.wait()
get(store, [4])
assert store.probe(scope, keys[5:6]) == 1
store.close()
os._exit(0)  # the exit of an interpreter locks handlers
""",
    )
    assert lines == "hangs\n"


def test_failing_handler_leaves_lines_on_stderr(where: Path) -> None:
    lines = log_of(
        where,
        """
class Fail(logging.Handler):
    def handle(self, record):
        sys.exit()
logging.getLogger().addHandler(Fail())
get(fill(where), [3, 4])
""",
    )
    assert [REMOVED in line for line in lines.splitlines()] == [True, True]


@pytest.mark.parametrize("levels", ["warn", "warn,json"])
def test_forked_child_logs_to_stderr(where: Path, levels: str) -> None:
    """During the fork a thread of the parent logs: the child inherits the locks that this thread
    holds. The child runs the functions that are registered with `atexit`.
    """
    lines = log_of(
        where,
        """
logging.getLogger().addHandler(logging.NullHandler())
store = fill(where)
other = fill(where.with_name("other"))
thread = threading.Thread(target=get, args=(other, range(20)))
thread.start()
child = os.fork()
if child == 0:
    get(fill(where.with_name("child")), range(30))
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
thread.join()
""",
        RITORNELLO_LOG=levels,
    )
    expected = 50 if "json" in levels else 30
    assert [REMOVED in line for line in lines.splitlines()] == [True] * expected
