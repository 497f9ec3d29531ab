"""A connector whose store's policy refuses the hash of the engine's keys serves nothing, and opens
the path again until the policy permits the hash. A failed store that cannot be closed does not
prevent the opening of another store.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from reopening_stores import (
    EXIT_WHILE_CLOSING,
    NOT_SUPPORTED,
    FailingStore,
    assert_fails,
    can_serve,
    can_store,
    occupied_by_file,
    replace_open,
)
from support import wait_until

from ritornello.connector.fail_safe import CLOSING_MAX, REOPENING, FailSafeStore
from ritornello.connector.meter import Meter
from ritornello.connector.opening import open_store
from ritornello.connector.settings import StoreSettings
from ritornello.vllm.settings import Settings as VllmSettings
from ritornello.vllm.tier.store import TierStore

LOGGER = logging.getLogger("ritornello.test")


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ritornello.connector.fail_safe.RETRY_SECONDS", 0.05)


def test_refused_hash_is_not_used_after_reopening(
    make_store: Callable[..., FailSafeStore], tmp_path: Path
) -> None:
    repair = occupied_by_file(tmp_path / "kv")
    fail_safe = make_store()
    fail_safe.expect_hash("xxhash")
    assert not fail_safe.open()
    repair()
    wait_until(
        lambda: "allow_weak_hashes" in fail_safe.broken,
        "the connector reports that the policy refuses the engine's hash",
    )
    assert not can_serve(fail_safe)


def test_refused_hash_is_not_used_at_first_opening(
    make_store: Callable[..., FailSafeStore],
) -> None:
    fail_safe = make_store()
    fail_safe.expect_hash("xxhash")
    assert not can_serve(fail_safe)
    assert "allow_weak_hashes" in fail_safe.broken


def test_policy_written_later_ends_refusal(
    make_store: Callable[..., FailSafeStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail_safe = make_store()
    fail_safe.expect_hash("xxhash")
    assert not can_serve(fail_safe)
    assert fail_safe.broken.endswith(REOPENING)
    (tmp_path / "kv" / "policy.toml").write_text("allow_weak_hashes = true")
    wait_until(lambda: can_serve(fail_safe), "the store serves")
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "allow_weak_hashes" in line]) == 1
    assert "serves again" in lines[-1]


def test_permitting_store_at_path_ends_refusal(
    make_store: Callable[..., FailSafeStore], tmp_path: Path
) -> None:
    kv, disk = tmp_path / "kv", tmp_path / "disk"
    open_store(StoreSettings(str(disk), capacity="1GiB"), LOGGER).close()
    (disk / "policy.toml").write_text("allow_weak_hashes = true")
    fail_safe = make_store()
    fail_safe.expect_hash("xxhash")
    assert not can_serve(fail_safe)
    assert (kv / "LOCK").exists(), "the connector must have made a store without a policy"
    kv.rename(tmp_path / "below")
    disk.rename(kv)
    wait_until(lambda: can_serve(fail_safe), "the store serves")


def test_refused_tier_serves_once_permitted(tmp_path: Path) -> None:
    store = TierStore(
        VllmSettings.parse({"path": str(tmp_path / "kv"), "capacity": "1GiB"}), Meter(), "xxhash"
    )
    try:
        assert not can_store(store)
        (tmp_path / "kv" / "policy.toml").write_text("allow_weak_hashes = true")
        wait_until(lambda: can_store(store), "the store takes puts")
    finally:
        store.close()


def test_refusing_store_is_opened_rarely(
    make_store: Callable[..., FailSafeStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ritornello.connector.fail_safe.RETRY_SECONDS_MAX", 0.1)
    stores: list[FailingStore] = []

    def open_core() -> FailingStore:
        stores.append(FailingStore())
        time.sleep(0.02 * (len(stores) == 3))
        return stores[-1]

    replace_open(open_core, monkeypatch)
    fail_safe = make_store()
    fail_safe.expect_hash("xxhash")
    assert not fail_safe.open()
    wait_until(lambda: len(stores) == 3 and stores[-1].closed.is_set(), "the open was retried")
    wait_until(lambda: fail_safe._retry_pause > 0.1, "the retry after a slow open pauses longer")
    assert 20 * 0.02 <= fail_safe._retry_pause <= 60
    assert all(store.closed.is_set() for store in stores)
    assert len(caplog.records) == 1


def test_store_that_cannot_be_closed_is_replaced(
    make_store: Callable[..., FailSafeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = FailingStore()
    stuck.closable.clear()
    stores = [stuck, FailingStore()]
    replace_open(lambda: stores.pop(0), monkeypatch)
    fail_safe = make_store()
    assert_fails(fail_safe)
    wait_until(fail_safe.open, "the second store is open")
    assert not stuck.closed.is_set()
    fail_safe.close()
    stuck.closable.set()
    assert stuck.closed.wait(30)


def test_number_of_closing_stores_is_limited(
    make_store: Callable[..., FailSafeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ritornello.connector.fail_safe.RETRY_SECONDS_MAX", 0.05)
    stores: list[FailingStore] = []

    def open_core() -> FailingStore:
        stores.append(FailingStore())
        stores[-1].closable.clear()
        return stores[-1]

    replace_open(open_core, monkeypatch)
    fail_safe = make_store()
    for _ in range(CLOSING_MAX):
        wait_until(fail_safe.open, "the store is open")
        assert_fails(fail_safe)
    wait_until(lambda: "still being closed" in fail_safe.broken, "no further store is opened")
    assert len(stores) == CLOSING_MAX
    stores[1].closable.set()
    wait_until(fail_safe.open, "a store is opened after a closing store was closed")
    for store in stores:
        store.closable.set()


def test_close_does_not_wait_for_hung_disk(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ritornello.connector.fail_safe.CLOSE_SECONDS", 0.1)
    stuck = FailingStore()
    stuck.closable.clear()
    replace_open(lambda: stuck, monkeypatch)
    fail_safe = FailSafeStore(StoreSettings("/kv"), LOGGER, lambda _: None)
    assert fail_safe.open()
    fail_safe.close()
    assert not stuck.closed.is_set()
    assert "still being closed" in caplog.text
    stuck.closable.set()
    assert stuck.closed.wait(30)


@pytest.mark.long
def test_process_with_hung_store_serves_another_and_exits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXIT_WHILE_CLOSING, str(tmp_path / "kv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode == NOT_SUPPORTED:
        pytest.skip(
            "this process may not use userfaultfd(2), or does not know its system call number"
        )
    assert (done.returncode, done.stdout) == (0, "serves\n"), done.stderr
