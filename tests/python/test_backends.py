"""Remote backends that are Python classes: the example in docs/backends.md, and faulty backends."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import keys_of, pages_of

import ritornello as rt

ROOT = Path(__file__).resolve().parents[2]
PAGE, PAGES = 20_000, 8
# A backend that keeps values in its process; most subclasses add a fault.
MEMORY = '''
import threading, time
import ritornello as rt

class Memory:
    values: dict[str, bytes] = {}
    def get(self, name, start, stop):
        value = self.values.get(name)
        return None if value is None else value[start:stop]
    def exists(self, name):
        return name in self.values
    def set(self, name, value):
        self.values[name] = value

class Views(Memory):
    """Returns buffers other than bytes, and has all optional methods."""
    def get(self, name, start, stop):
        value = super().get(name, start, stop)
        return None if value is None else memoryview(bytearray(value))
    def delete(self, name):
        self.values.pop(name, None)
    def list(self, prefix):
        found = [name for name in list(self.values) if name.startswith(prefix)]
        return [(name, len(self.values[name]), time.time()) for name in found]

class Raises(Memory):
    def get(self, name, start, stop):
        raise OSError("connection lost")

class Fatal(Memory):
    def exists(self, name):
        raise rt.errors.FatalError("no such tenant")

class Short(Memory):
    def get(self, name, start, stop):
        value = super().get(name, start, stop)
        return value and value[: len(value) // 2]

class Long(Memory):
    def get(self, name, start, stop):
        return super().get(name, 0, None)

class WrongType(Memory):
    def get(self, name, start, stop):
        return 5

class NoBool(Memory):
    def exists(self, name):
        return "perhaps"

class Hangs(Memory):
    def get(self, name, start, stop):
        threading.Event().wait()

class TwoMethods:
    def get(self, name, start, stop): ...
    def exists(self, name): ...

class Arguments(Memory):
    def __init__(self, *, host: str):
        assert host == "a b"

class Tells(Memory):
    def __init__(self, *, password: str):
        self.password = password
    def get(self, name, start, stop):
        raise OSError(f"no login with {self.password}")

class Down(Memory):
    up = threading.Event()
    def __init__(self):
        if not self.up.is_set():
            raise ConnectionError("connection refused")

class NeverMade(Memory):
    def __init__(self):
        threading.Event().wait()
'''


def ritornello(*words: str, path: Path) -> subprocess.CompletedProcess[str]:
    python_path = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "ritornello", *words],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "PYTHONPATH": python_path},
    )


def doctor(address: str, path: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """Returns exit code, standard output and standard error of `ritornello doctor`."""
    done = ritornello("doctor", "--json", "--backend", address, *more, path=path)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    tmp_path.joinpath("mine.py").write_text(MEMORY)
    return tmp_path


def test_documented_example_is_valid_backend(tmp_path: Path) -> None:
    text = ROOT.joinpath("docs/backends.md").read_text()
    example = re.search(r"```python\n# my_backend.py\n(.*?)```", text, re.DOTALL)
    assert example
    tmp_path.joinpath("my_backend.py").write_text(example[1])
    code, answer, err = doctor(f"my_backend:Table?path={tmp_path}/kv.db", tmp_path)
    assert (code, answer["healthy"]) == (0, True), (answer, err)
    assert "cannot be listed" in answer["advice"][0]


@pytest.mark.parametrize("name", ["Views", "Arguments"])
def test_classes_may_return_buffers_and_take_arguments(classes: Path, name: str) -> None:
    code, answer, err = doctor(f"mine:{name}" + "?host=a%20b" * (name == "Arguments"), classes)
    assert code == 0, (answer, err)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Raises", "connection lost"),
        ("Fatal", "no such tenant"),
        ("Short", ""),
        ("Long", "more than value[start:stop]"),
        ("WrongType", "bytes-like"),
        ("NoBool", "bool"),
    ],
)
def test_doctor_reports_violated_contract(classes: Path, name: str, told: str) -> None:
    code, answer, err = doctor(f"mine:{name}", classes)
    wrong = [check["wrong"] for check in answer["checks"] if check["wrong"]]
    assert (code, answer["healthy"]) == (1, False), err
    assert any(told in line for line in wrong), wrong
    assert not any("panicked" in line for line in [err, *wrong]), err


def test_doctor_reports_hanging_class(classes: Path) -> None:
    code, answer, _ = doctor("mine:Hangs", classes, "--timeout", "2")
    assert code == 1
    assert "no answer within 2 s" in answer["checks"][0]["wrong"]


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("mine:TwoMethods", "no method set"),
        ("mine:Nobody", "Nobody"),
        ("mine:Arguments", "host"),
        ("mine:Arguments?host=a&port=1", "port"),
        ("nowhere_at_all:Class", "nowhere_at_all"),
        ("ftp://host/x", "s3://BUCKET/PREFIX"),
    ],
)
def test_failed_open_says_why(classes: Path, address: str, told: str) -> None:
    done = ritornello("doctor", "--backend", address, path=classes)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr


def test_password_in_address_is_not_shown(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "mine:Tells?password=hunter2"
    done = ritornello("doctor", "--json", "--backend", address, path=classes)
    assert done.returncode == 1
    assert json.loads(done.stdout)["backend"] == "mine:Tells?…"
    assert "no login with …" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    done = ritornello("doctor", "--backend", f"{address}&password2=hunter2", path=classes)
    assert (done.returncode, "password2" in done.stderr) == (2, True), done.stderr
    assert "hunter2" not in done.stderr
    monkeypatch.syspath_prepend(str(classes))
    with rt.Cache.open([f"host 64MiB {classes}/host", f"{address} write=none"]) as cache:
        assert cache.tiers[1] == "mine:Tells?… write=none"
        assert "hunter2" not in repr(cache) + str(cache.stats())


def test_hanging_constructor_blocks_no_tier(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(classes))
    with rt.Cache.open([f"host 64MiB {classes}/host", "mine:NeverMade"]) as cache:
        put(cache, "a")


def test_constructor_is_retried_until_it_succeeds(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(classes))
    with rt.Cache.open([f"host 64MiB {classes}/host", "mine:Down"]) as cache:
        put(cache, "a")
        cache.flush()
        assert cache.stats()["tiers"][1]["dropped_pages"] == PAGES
        importlib.import_module("mine").Down.up.set()
        until = time.monotonic() + 100
        for number in itertools.count():
            put(cache, f"later {number}")
            cache.flush()
            if cache.stats()["tiers"][1]["written_pages"]:
                return
            assert time.monotonic() < until
            time.sleep(0.2)


def put(cache: rt.Cache, prompt: str) -> None:
    """Puts the pages of a prompt, and checks that the tiers of this machine have all of them."""
    scope, keys = rt.Scope.opaque("down", PAGE, chained=True), keys_of(prompt, PAGES)
    stored = cache.submit_put(scope, keys, pages_of(keys, PAGE)).wait(60)
    assert stored is not None
    assert stored.pages == PAGES
    found = cache.lookup(scope, keys)
    assert found.local == PAGES
    for lease in found.leases:
        cache.release(lease)
