"""A connector's store that cannot be opened, or fails, is reopened after the fault has ended."""

import gc
import logging
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from reopening_stores import (
    EXIT_WHILE_OPENING,
    FORK_WHILE_OPENING,
    KEYS,
    SCOPE,
    FailingStore,
    assert_fails,
    can_serve,
    can_store,
    holding_foreign_files,
    interrupt,
    lmcache_store,
    lmcache_tiers,
    occupied_by_file,
    owned_by_other_user,
    replace_open,
    sglang_cache_store,
    sglang_store,
    vllm_cache_store,
    vllm_store,
    vllm_tier_cache,
    vllm_tier_store,
)
from support import SMALL, wait_until

from ritornello.connector.fail_safe import REOPENING, RETRY_SECONDS_MAX, FailSafeStore
from ritornello.connector.meter import Meter
from ritornello.connector.opening import open_store
from ritornello.connector.settings import StoreSettings
from ritornello.errors import InvalidError, RetryError
from ritornello.lmcache import NativeClient
from ritornello.vllm.cache_store import CacheStore
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.settings import Settings as VllmSettings
from ritornello.vllm.tier.store import TierStore
from servers.child import Child, owner_of

LOGGER = logging.getLogger("ritornello.test")


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ritornello.connector.fail_safe.RETRY_SECONDS", 0.05)


@pytest.fixture
def start_owner(tmp_path: Path) -> Iterator[Callable[[], Child]]:
    """Returns a function that starts a process which owns the store at `tmp_path/kv`."""
    with ExitStack() as children:
        yield lambda: children.enter_context(owner_of(tmp_path / "kv", **SMALL))


@pytest.mark.parametrize("fault", [occupied_by_file, owned_by_other_user, holding_foreign_files])
def test_repaired_directory_is_opened(
    fault: Callable[[Path], Callable[[], object]],
    make_store: Callable[..., FailSafeStore],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    repair = fault(tmp_path / "kv")
    fail_safe = make_store()
    assert not can_serve(fail_safe)
    assert fail_safe.broken.startswith("open: ")
    assert fail_safe.broken.endswith(REOPENING)
    assert not can_serve(fail_safe)
    repair()
    wait_until(lambda: can_serve(fail_safe), "the store serves")
    assert fail_safe.broken == ""
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "open failed" in lines[0]
    assert "serves again" in lines[1]


def test_open_is_retried_until_owner_version_matches(
    make_store: Callable[..., FailSafeStore], start_owner: Callable[[], object], tmp_path: Path
) -> None:
    start_owner()
    kv = tmp_path / "kv"
    (kv / "owner.sock").rename(kv / "owner.sock.moved")
    answer = b"RTRN" + (99).to_bytes(4, "little") * 2
    with socket.socket(socket.AF_UNIX) as future:
        future.bind(str(kv / "owner.sock"))
        future.listen()
        fail_safe = make_store()

        def answered() -> bool:
            connection, _ = future.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(len(answer).to_bytes(4, "little") + answer)
            return True

        Thread(target=answered, daemon=True).start()
        assert not fail_safe.open()
        assert "restart this process with that version" in fail_safe.broken
    (kv / "owner.sock.moved").rename(kv / "owner.sock")
    wait_until(lambda: can_serve(fail_safe), "the store serves")


@pytest.mark.parametrize(
    "options", [{"codec": "potato"}, {"capacity": "1 potato"}, {"eviction": 3}]
)
def test_invalid_setting_is_not_retried(
    make_store: Callable[..., FailSafeStore],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_safe = make_store(**options)
    assert not fail_safe.open()
    assert fail_safe.broken
    assert not fail_safe.broken.endswith(REOPENING)
    monkeypatch.setattr(fail_safe, "_open", lambda: pytest.fail("the open was retried"))
    assert not can_serve(fail_safe)


def test_client_with_another_capacity_serves(
    make_store: Callable[..., FailSafeStore], start_owner: Callable[[], object]
) -> None:
    start_owner()
    fail_safe = make_store(capacity="128MiB")
    assert can_serve(fail_safe)
    assert fail_safe.call("stats", lambda store: store.stats()["capacity_bytes"], 0) == 64 << 20


@pytest.fixture
def start_replaceable_owner(
    start_owner: Callable[[], Child], tmp_path: Path
) -> Callable[[], Callable[[], object]]:
    """Returns a function that starts an owner. This function returns another function, which kills
    the owner and replaces its store by a new store with a new owner.
    """

    def start() -> Callable[[], object]:
        first = start_owner()

        def replace() -> None:
            first.kill()
            first.wait(60)
            for entry in (tmp_path / "kv").iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            start_owner()

        return replace

    return start


def test_replaced_store_is_reopened(
    make_store: Callable[..., FailSafeStore],
    start_replaceable_owner: Callable[[], Callable[[], object]],
) -> None:
    replace = start_replaceable_owner()
    fail_safes = [make_store(), make_store()]
    assert all(map(can_serve, fail_safes))
    replace()
    for fail_safe in fail_safes:
        wait_until(lambda fail_safe=fail_safe: can_serve(fail_safe), "the store serves")  # type: ignore[misc]


def test_replaced_store_is_reopened_by_submits_alone(
    make_store: Callable[..., FailSafeStore],
    start_replaceable_owner: Callable[[], Callable[[], object]],
) -> None:
    replace = start_replaceable_owner()
    fail_safe = make_store()
    assert can_store(fail_safe)
    replace()
    wait_until(lambda: can_store(fail_safe), "the store takes puts")


def test_cache_with_replaced_tier_is_reopened(
    start_replaceable_owner: Callable[[], Callable[[], object]], tmp_path: Path
) -> None:
    replace = start_replaceable_owner()
    fail_safe = CacheStore(
        VllmSettings.parse({"tiers": [f"disk {tmp_path}/kv 64MiB"]}), StepMeter()
    )

    def missed_why() -> str:
        out = [bytearray(4096) for _ in KEYS]
        ticket = fail_safe.call("get", lambda cache: cache.submit_get(SCOPE, KEYS, out), None)
        outcome = ticket and fail_safe.attempt("wait", lambda: ticket.wait(60), None)
        return str(outcome.reason) if outcome else fail_safe.broken

    try:
        assert can_store(fail_safe)
        replace()
        wait_until(lambda: missed_why() == "not_found", "lookups reach the new store")
        assert can_store(fail_safe)
    finally:
        fail_safe.close()


@pytest.mark.parametrize(
    "connector",
    [
        *(vllm_store, vllm_cache_store, vllm_tier_store, vllm_tier_cache),
        *(sglang_store, sglang_cache_store, lmcache_store, lmcache_tiers),
    ],
)
def test_every_connector_reopens_its_store(
    connector: Callable[[Path], FailSafeStore], tmp_path: Path
) -> None:
    repair = occupied_by_file(tmp_path / "kv")
    fail_safe = connector(tmp_path / "kv")
    try:
        assert not can_store(fail_safe)
        assert fail_safe.broken.endswith(REOPENING)
        repair()
        wait_until(lambda: can_store(fail_safe), "the store takes puts")
        assert fail_safe.broken == ""
    finally:
        fail_safe.close()


def test_store_opens_after_stopped_owner_resumes(
    start_owner: Callable[[], Child],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = tmp_path / "link"
    repair = occupied_by_file(link)
    owner = start_owner()
    owner.send_signal(signal.SIGSTOP)
    begun = Event()

    def open_core(*settings: Any) -> Any:
        begun.set()
        return open_store(*settings)

    monkeypatch.setattr("ritornello.connector.fail_safe.open_store", open_core)
    fail_safe = FailSafeStore(StoreSettings(str(link)), LOGGER, lambda _: None)
    try:
        assert not can_serve(fail_safe)
        repair()
        link.symlink_to(tmp_path / "kv")
        begun.clear()
        assert begun.wait(30)
        assert not can_serve(fail_safe), "calls must return misses while the owner is stopped"
        owner.send_signal(signal.SIGCONT)
        wait_until(lambda: can_serve(fail_safe), "the store serves")
    finally:
        owner.send_signal(signal.SIGCONT)
        fail_safe.close()


def test_process_exits_while_opening_store(
    start_owner: Callable[[], Child], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    repair = occupied_by_file(link)
    # The owner is stopped and so does not answer: an attempt to open the store waits a minute.
    start_owner().send_signal(signal.SIGSTOP)
    with Child(EXIT_WHILE_OPENING, link) as process:
        assert process.read() == "failed"
        repair()
        link.symlink_to(tmp_path / "kv")
        process.send()
        assert process.wait(30) == 0


def test_forked_child_opens_store_parent_waits_for(tmp_path: Path) -> None:
    occupied_by_file(tmp_path / "kv")
    command = [sys.executable, "-c", FORK_WHILE_OPENING, str(tmp_path / "kv")]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


def test_dropped_store_is_not_reopened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attempts = Event()

    def failing_open() -> object:
        attempts.set()
        raise OSError(5, "the device is gone")

    replace_open(failing_open, monkeypatch)
    fail_safe = FailSafeStore(StoreSettings(str(tmp_path / "kv")), LOGGER, lambda _: None)
    assert not fail_safe.open()
    opener = fail_safe._opener
    assert opener is not None
    attempts.clear()
    assert attempts.wait(30)
    del fail_safe
    gc.collect()
    opener.join(30)
    assert not opener.is_alive()


def test_calls_do_not_wait_for_reopening(
    make_store: Callable[..., FailSafeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = FailingStore(), FailingStore()
    unopened = [first]
    begun, go = Event(), Event()

    def open_core() -> FailingStore:
        if unopened:
            return unopened.pop()
        begun.set()
        assert go.wait(60)
        return late

    replace_open(open_core, monkeypatch)
    fail_safe = make_store()
    assert_fails(fail_safe)
    assert first.closed.wait(30)
    assert begun.wait(30)
    # The opening hangs, as it does while an owner does not answer. The next calls must return
    # nevertheless.
    assert_fails(fail_safe)
    assert not fail_safe.open()
    fail_safe.close()
    go.set()
    assert late.closed.wait(30), "a store that opens after `close` must be closed"
    assert not fail_safe.open()


def test_failing_store_is_reopened_with_back_off(
    make_store: Callable[..., FailSafeStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ritornello.connector.fail_safe.RETRY_SECONDS_MAX", 0.2)
    stores: list[FailingStore] = []

    def open_core() -> FailingStore:
        stores.append(FailingStore())
        return stores[-1]

    replace_open(open_core, monkeypatch)
    fail_safe = make_store()
    for attempts in range(1, 5):
        wait_until(fail_safe.open, "the store is open")
        assert len(stores) == attempts
        assert_fails(fail_safe)
        assert fail_safe.broken
    assert fail_safe._retry_pause == 0.2
    assert all(store.closed.wait(30) for store in stores)
    # The connector logs one line at the first failure, and one line when the store serves again.
    assert len(caplog.records) == 2


def test_back_off_is_at_most_eight_seconds() -> None:
    assert RETRY_SECONDS_MAX <= 8


def test_interrupted_open_is_retried_by_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Callable[[], object]] = [interrupt, FailingStore]
    replace_open(lambda: outcomes.pop(0)(), monkeypatch)
    fail_safe = FailSafeStore(StoreSettings("/kv"), LOGGER, lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        fail_safe.open()
    assert fail_safe.open()
    fail_safe.close()


def test_store_reopened_as_client_does_not_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [FailingStore("owner"), FailingStore("client")]
    replace_open(lambda: stores.pop(0), monkeypatch)
    store = TierStore(VllmSettings("/kv", read_only=False), Meter())
    try:
        assert store.answers_at_once()
        assert_fails(store)
        wait_until(store.open, "the store is open")
        assert not store.answers_at_once()
    finally:
        store.close()


@pytest.mark.parametrize("error", [RetryError("busy"), InvalidError("wrong"), OSError(5, "why")])
def test_non_fatal_errors_do_not_reopen_store(
    make_store: Callable[..., FailSafeStore], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def probe() -> int:
        raise error

    core = SimpleNamespace(probe=probe, close=lambda: None)
    replace_open(lambda: core, monkeypatch)
    fail_safe = make_store()
    assert_fails(fail_safe)
    assert fail_safe._store is cast(Any, core)
    assert fail_safe.broken == ""


def test_lmcache_client_serves_after_repair(tmp_path: Path) -> None:
    repair = occupied_by_file(tmp_path / "kv")
    client = NativeClient(path=str(tmp_path / "kv"), capacity="1GiB")
    try:
        assert client._objects.store.broken
        repair()
        wait_until(client._objects.store.open, "the store is open")
        assert client._objects.store.capacity() == 1 << 30
        assert client._objects.store.is_owner()
    finally:
        client.close()
