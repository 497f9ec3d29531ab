"""A connector's store that cannot be opened, or fails, is opened again when the fault is over."""

import gc
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support import keys_of, pages_of

import ritornello as rt
from ritornello.errors import FatalError, InvalidError, RetryError
from ritornello.fail_safe import REOPENING, RETRY_SECONDS_MAX, FailSafeStore
from ritornello.lmcache import NativeClient
from ritornello.lmcache.settings import Settings as LMCacheSettings
from ritornello.lmcache.store import LMCacheStore
from ritornello.opening import open_store
from ritornello.settings import StoreSettings
from ritornello.sglang.meter import Meter as SGLangMeter
from ritornello.sglang.settings import Settings as SGLangSettings
from ritornello.sglang.store import SGLangStore
from ritornello.vllm.cache_store import CacheStore
from ritornello.vllm.meter import Meter as VllmMeter
from ritornello.vllm.settings import Settings as VllmSettings
from ritornello.vllm.store import VllmStore
from ritornello.vllm.tier.counts import Counts
from ritornello.vllm.tier.store import TierStore

SCOPE = rt.Scope.opaque("reopening", 4096)
KEYS = keys_of("reopening", 3)
PAGES = pages_of(KEYS, 4096)
LOGGER = logging.getLogger("ritornello.test")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ritornello.fail_safe.RETRY_SECONDS", 0.05)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., FailSafeStore]]:
    """Makes handles on `tmp_path/kv`, and closes them."""
    handles: list[FailSafeStore] = []

    def make(**said: Any) -> FailSafeStore:
        settings = StoreSettings(str(tmp_path / "kv"), **{"capacity": "1GiB", **said})
        handle = FailSafeStore(settings, LOGGER, lambda _: None)
        handles.append(handle)
        return handle

    yield make
    for handle in handles:
        handle.close()


def until(done: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end, f"never came about: {what}"
        time.sleep(0.01)


def serves(handle: FailSafeStore) -> bool:
    """Whether pages come back."""
    put = handle.call("put", lambda store: store.put_batch(SCOPE, KEYS, PAGES), 0)
    out = [bytearray(4096) for _ in KEYS]
    got = handle.call("get", lambda store: store.get_batch(SCOPE, KEYS, out), 0)
    right = [bytes(page) for page in PAGES]
    assert [bytes(page) for page in out[:got]] == right[:got]
    return (put, got) == (len(KEYS), len(KEYS))


OWNER = """
import sys
import ritornello as rt
store = rt.Store.open(sys.argv[1], "64MiB", segment_bytes=4 << 20)
print(store.role, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    """Starts a process that owns the store."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path / "kv")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "owner\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=60)


def taken_by_a_file(path: Path) -> Callable[[], object]:
    path.write_text("a file")
    return path.unlink


def of_another_user(path: Path) -> Callable[[], object]:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    path.mkdir()
    os.chown(path, 12345, 12345)
    return lambda: os.chown(path, 0, 0)


def holding_other_things(path: Path) -> Callable[[], object]:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    return (path / "thesis.tex").unlink


@pytest.mark.parametrize("fault", [taken_by_a_file, of_another_user, holding_other_things])
def test_repaired_directory_is_opened(
    fault: Callable[[Path], Callable[[], object]],
    made: Callable[..., FailSafeStore],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mend = fault(tmp_path / "kv")
    handle = made()
    assert not serves(handle)
    assert handle.broken.startswith("open: ")
    assert handle.broken.endswith(REOPENING)
    assert not serves(handle)
    mend()
    until(lambda: serves(handle), "it serves")
    assert handle.broken == ""
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "open failed" in lines[0]
    assert "serves again" in lines[1]


def test_owner_of_known_version_is_opened(
    made: Callable[..., FailSafeStore], owned: Callable[[], object], tmp_path: Path
) -> None:
    owned()
    kv = tmp_path / "kv"
    (kv / "owner.sock").rename(kv / "owner.sock.moved")
    answer = b"RTRN" + (99).to_bytes(4, "little") * 2
    with socket.socket(socket.AF_UNIX) as future:
        future.bind(str(kv / "owner.sock"))
        future.listen()
        handle = made()

        def answered() -> bool:
            connection, _ = future.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(len(answer).to_bytes(4, "little") + answer)
            return True

        Thread(target=answered, daemon=True).start()
        assert not handle.open()
        assert "restart this process with that version" in handle.broken
    (kv / "owner.sock.moved").rename(kv / "owner.sock")
    until(lambda: serves(handle), "it serves")


@pytest.mark.parametrize("said", [{"codec": "potato"}, {"capacity": "1 potato"}, {"eviction": 3}])
def test_invalid_setting_is_not_retried(
    made: Callable[..., FailSafeStore], said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = made(**said)
    assert not handle.open()
    assert handle.broken
    assert not handle.broken.endswith(REOPENING)
    monkeypatch.setattr(handle, "_open", lambda: pytest.fail("it was tried again"))
    assert not serves(handle)


def test_client_with_another_capacity_serves(
    made: Callable[..., FailSafeStore], owned: Callable[[], object]
) -> None:
    owned()
    handle = made(capacity="128MiB")
    assert serves(handle)
    assert handle.call("stats", lambda store: store.stats()["capacity_bytes"], 0) == 64 << 20


@pytest.fixture
def replaced(
    owned: Callable[[], "subprocess.Popen[str]"], tmp_path: Path
) -> Callable[[], Callable[[], object]]:
    """Starts an owner, and returns what puts another store, with an owner, in its place."""

    def start() -> Callable[[], object]:
        first = owned()

        def replace() -> None:
            first.kill()
            first.wait(60)
            for entry in (tmp_path / "kv").iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            owned()

        return replace

    return start


def test_replaced_store_is_reopened(
    made: Callable[..., FailSafeStore], replaced: Callable[[], Callable[[], object]]
) -> None:
    replace = replaced()
    handles = [made(), made()]
    assert all(map(serves, handles))
    replace()
    for handle in handles:
        until(lambda handle=handle: serves(handle), "it serves")  # type: ignore[misc]


def stores(handle: FailSafeStore) -> bool:
    """Whether pages are stored, by a ticket: how it ended, the store is not asked."""
    ticket = handle.call("put", lambda store: store.submit_put(SCOPE, KEYS, PAGES), None)
    outcome = ticket and handle.attempt("wait", lambda: ticket.wait(60), None)
    return outcome is not None and outcome.pages == len(KEYS)


def test_replaced_store_is_reopened_by_submits_alone(
    made: Callable[..., FailSafeStore], replaced: Callable[[], Callable[[], object]]
) -> None:
    replace = replaced()
    handle = made()
    assert stores(handle)
    replace()
    until(lambda: stores(handle), "it stores")


def test_cache_with_replaced_tier_is_reopened(
    replaced: Callable[[], Callable[[], object]], tmp_path: Path
) -> None:
    replace = replaced()
    handle = CacheStore(VllmSettings.parse({"tiers": [f"disk {tmp_path}/kv 64MiB"]}), VllmMeter())

    def missed_why() -> str:
        out = [bytearray(4096) for _ in KEYS]
        ticket = handle.call("get", lambda cache: cache.submit_get(SCOPE, KEYS, out), None)
        outcome = ticket and handle.attempt("wait", lambda: ticket.wait(60), None)
        return str(outcome.reason) if outcome else handle.broken

    try:
        assert stores(handle)
        replace()
        until(lambda: missed_why() == "absent", "it looks into the new store")
        assert stores(handle)
    finally:
        handle.close()


def of_vllm(path: Path) -> FailSafeStore:
    return VllmStore(VllmSettings.parse({"path": str(path), "capacity": "1GiB"}), VllmMeter())


def of_vllm_tiers(path: Path) -> FailSafeStore:
    return CacheStore(VllmSettings.parse({"tiers": [f"host 64MiB {path}"]}), VllmMeter())


def of_vllm_tier(path: Path) -> FailSafeStore:
    return TierStore(VllmSettings.parse({"path": str(path), "capacity": "1GiB"}), Counts())


def of_sglang(path: Path) -> FailSafeStore:
    return SGLangStore(SGLangSettings.parse({"path": str(path), "capacity": "1GiB"}), SGLangMeter())


def of_lmcache(path: Path) -> FailSafeStore:
    return LMCacheStore(LMCacheSettings.parse({"path": str(path), "capacity": "1GiB"}))


@pytest.mark.parametrize("of", [of_vllm, of_vllm_tiers, of_vllm_tier, of_sglang, of_lmcache])
def test_every_connector_reopens_its_store(
    of: Callable[[Path], FailSafeStore], tmp_path: Path
) -> None:
    mend = taken_by_a_file(tmp_path / "kv")
    handle = of(tmp_path / "kv")
    try:
        assert not stores(handle)
        assert handle.broken.endswith(REOPENING)
        mend()
        until(lambda: stores(handle), "it stores")
        assert handle.broken == ""
    finally:
        handle.close()


def test_resumed_owner_is_opened(
    owned: Callable[[], "subprocess.Popen[str]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    mend = taken_by_a_file(link)
    owner = owned()
    owner.send_signal(signal.SIGSTOP)
    begun = Event()

    def opened(*settings: Any) -> Any:
        begun.set()
        return open_store(*settings)

    monkeypatch.setattr("ritornello.fail_safe.open_store", opened)
    handle = FailSafeStore(StoreSettings(str(link)), LOGGER, lambda _: None)
    try:
        assert not serves(handle)
        mend()
        link.symlink_to(tmp_path / "kv")
        begun.clear()
        assert begun.wait(30)
        assert not serves(handle), "calls do not wait for the owner"
        owner.send_signal(signal.SIGCONT)
        until(lambda: serves(handle), "it serves")
    finally:
        owner.send_signal(signal.SIGCONT)
        handle.close()


HOLDER = """
import os, sys, threading, time
import ritornello.fail_safe
from logging import getLogger
from pathlib import Path
from ritornello.settings import StoreSettings

ritornello.fail_safe.RETRY_SECONDS = 0.05
ritornello.fail_safe.RETRY_SECONDS_MAX = 0.1
path = Path(sys.argv[1])
settings = StoreSettings(str(path), capacity="1GiB")
handle = ritornello.fail_safe.FailSafeStore(settings, getLogger(), lambda _: None)
"""

ENDING = f"""{HOLDER}
open_store, attempts, begun = ritornello.fail_safe.open_store, [], threading.Event()

def opened(*settings):
    attempts.append(1)
    if len(attempts) == 2:
        print("failed", flush=True)
        sys.stdin.readline()
        begun.set()
    return open_store(*settings)

ritornello.fail_safe.open_store = opened
assert not handle.open()
begun.wait()
# Let it come to where it waits for the owner.
time.sleep(0.3)
"""

FORKING = f"""{HOLDER}
assert not handle.open()
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status))
path.unlink()
end = time.monotonic() + 30
while not handle.open() and time.monotonic() < end:
    time.sleep(0.01)
os._exit(0 if handle.open() else 1)
"""


def test_process_exits_while_opening_store(
    owned: Callable[[], "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    mend = taken_by_a_file(link)
    # An owner that says nothing: an attempt waits for it for a minute.
    owned().send_signal(signal.SIGSTOP)
    command = [sys.executable, "-c", ENDING, str(link)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "failed\n"
        mend()
        link.symlink_to(tmp_path / "kv")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(30) == 0


def test_forked_child_opens_store_parent_waits_for(tmp_path: Path) -> None:
    taken_by_a_file(tmp_path / "kv")
    command = [sys.executable, "-c", FORKING, str(tmp_path / "kv")]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


def test_dropped_store_is_not_reopened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attempts = Event()

    def fails_to_open() -> object:
        attempts.set()
        raise OSError(5, "the device is gone")

    fake(fails_to_open, monkeypatch)
    handle = FailSafeStore(StoreSettings(str(tmp_path / "kv")), LOGGER, lambda _: None)
    assert not handle.open()
    opener = handle._opener
    assert opener is not None
    attempts.clear()
    assert attempts.wait(30)
    del handle
    gc.collect()
    opener.join(30)
    assert not opener.is_alive()


class Failing:
    """Stands for a store of which every question fails fatally."""

    def __init__(self, role: str = "client") -> None:
        self.role = role
        self.closed = Event()

    def probe(self) -> int:
        raise FatalError("the device is gone")

    def close(self) -> None:
        self.closed.set()


def fake(opened: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ritornello.fail_safe.open_store", lambda *_: opened())


def fails(handle: FailSafeStore) -> None:
    assert handle.call("probe", lambda store: cast(Any, store).probe(), 7) == 7


def test_calls_do_not_wait_for_reopening(
    made: Callable[..., FailSafeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = Failing(), Failing()
    begun, go = Event(), Event()

    def opened() -> Failing:
        if not first.closed.is_set():
            return first
        begun.set()
        assert go.wait(60)
        return late

    fake(opened, monkeypatch)
    handle = made()
    fails(handle)
    assert first.closed.wait(30)
    assert begun.wait(30)
    # The opening hangs, as with an owner that says nothing. That these return is the test.
    fails(handle)
    assert not handle.open()
    handle.close()
    go.set()
    assert late.closed.wait(30), "what was opened too late is closed"
    assert not handle.open()


def test_failing_store_is_reopened_with_back_off(
    made: Callable[..., FailSafeStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ritornello.fail_safe.RETRY_SECONDS_MAX", 0.2)
    stores: list[Failing] = []

    def opened() -> Failing:
        stores.append(Failing())
        return stores[-1]

    fake(opened, monkeypatch)
    handle = made()
    for attempts in range(1, 5):
        until(handle.open, "it is open")
        assert len(stores) == attempts
        fails(handle)
        assert handle.broken
    assert handle._retry_pause == 0.2
    assert all(store.closed.is_set() for store in stores[:-1])
    # One line when it failed first, and one when it served again.
    assert len(caplog.records) == 2


def test_back_off_stays_within_documented_time() -> None:
    assert RETRY_SECONDS_MAX <= 8


def test_refused_hash_is_not_used_after_reopening(
    made: Callable[..., FailSafeStore], tmp_path: Path
) -> None:
    mend = taken_by_a_file(tmp_path / "kv")
    handle = made()
    assert handle.require_hash("xxhash") == ""
    mend()
    until(lambda: "allow_weak_hashes" in handle.broken, "it is refused")
    assert not serves(handle)


def test_refused_hash_is_not_used_by_workers(
    made: Callable[..., FailSafeStore],
) -> None:
    handle = made()
    handle.expect_hash("xxhash")
    assert not serves(handle)
    assert "allow_weak_hashes" in handle.broken


def test_unmounted_path_gets_no_store(
    made: Callable[..., FailSafeStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, away = tmp_path / "kv", tmp_path / "away"
    handle = made()
    assert serves(handle)
    path.rename(away)
    monkeypatch.setattr(Path, "is_mount", lambda _: path.exists())

    def lose(_: rt.Store) -> None:
        raise FatalError("the store's directory was moved or replaced")

    handle.call("probe", lose, None)
    until(lambda: "no store here" in handle.broken, "it was looked for")
    assert not path.exists()
    away.rename(path)
    until(handle.open, "it is open")
    assert serves(handle)


def test_interrupted_open_is_retried_by_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Callable[[], object]] = [interrupt, Failing]
    fake(lambda: outcomes.pop(0)(), monkeypatch)
    handle = FailSafeStore(StoreSettings("/kv"), LOGGER, lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        handle.open()
    assert handle.open()
    handle.close()


def interrupt() -> object:
    raise KeyboardInterrupt


def test_owner_reopened_as_client_waits_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [Failing("owner"), Failing("client")]
    fake(lambda: stores.pop(0), monkeypatch)
    store = TierStore(VllmSettings("/kv", read_only=False), Counts())
    try:
        assert store.answers_at_once()
        fails(store)
        until(store.open, "it is open")
        assert not store.answers_at_once()
    finally:
        store.close()


@pytest.mark.parametrize("error", [RetryError("busy"), InvalidError("wrong"), OSError(5, "why")])
def test_other_failures_keep_store(
    made: Callable[..., FailSafeStore], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def probe() -> int:
        raise error

    store = SimpleNamespace(probe=probe, close=lambda: None)
    fake(lambda: store, monkeypatch)
    handle = made()
    fails(handle)
    assert handle._store is cast(Any, store)
    assert handle.broken == ""


def test_lmcache_client_serves_after_repair(tmp_path: Path) -> None:
    mend = taken_by_a_file(tmp_path / "kv")
    client = NativeClient(path=str(tmp_path / "kv"), capacity="1GiB")
    try:
        assert client._objects.store.broken
        mend()
        until(client._objects.store.open, "it is open")
        assert client._objects.store.capacity() == 1 << 30
        assert client._objects.store.is_owner()
    finally:
        client.close()
