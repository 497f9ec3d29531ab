"""Our native client for LMCache on a real store, called as LMCache's bridge to native clients calls
it.
"""

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_remote import Held
from support import Bytes, CoreLog, blank, open_small, page_of, wait_until

import ritornello as rt
from ritornello.lmcache import NativeClient
from ritornello.lmcache.client import Completion
from ritornello.lmcache.settings import Settings
from ritornello.lmcache.store import LMCacheStore
from servers.child import Child

KIB = 1 << 10


def texts(count: int, *, start: int = 0, model: str = "m", salt: str = "") -> list[str]:
    tail = f"@{salt}" if salt else ""
    return [
        f"{model}@{number:08x}@0@{number.to_bytes(32).hex()}{tail}"
        for number in range(start, start + count)
    ]


def bytes_of(keys: list[str], nbytes: int) -> list[Bytes]:
    return [page_of(key.encode(), nbytes) for key in keys]


def views(pages: Any) -> list[memoryview]:
    return [memoryview(page) for page in pages]


def completed(client: NativeClient, number: int) -> Completion:
    """Waits for the eventfd as LMCache does. Returns the first completion, and asserts that it
    belongs to the operation `number`.
    """
    until = time.monotonic() + 60
    while time.monotonic() < until:
        readable, _, _ = select.select([client.event_fd()], [], [], 60)
        assert readable
        for completion in client.drain_completions():
            assert completion[0] == number
            return completion
    raise AssertionError("no operation was completed within 60 s")


def put(client: NativeClient, keys: list[str], nbytes: int) -> Completion:
    pages = bytes_of(keys, nbytes)
    return completed(client, client.submit_batch_set(keys, views(pages)))


def get(client: NativeClient, keys: list[str], nbytes: int) -> tuple[list[bool], Bytes]:
    out = blank(len(keys), nbytes)
    done = completed(client, client.submit_batch_get(keys, views(out)))
    assert done[1] and done[3] is not None
    return done[3], out


def exists(client: NativeClient, keys: list[str]) -> list[bool]:
    done = completed(client, client.submit_batch_exists(keys))
    assert done[1] and done[3] is not None
    return done[3]


@pytest.fixture(autouse=True)
def small(where: Path) -> None:
    """Creates the store before the client opens it, because the client's settings cannot choose
    small segments.
    """
    open_small(where).close()


@pytest.fixture
def client(where: Path) -> Iterator[NativeClient]:
    opened = NativeClient(path=str(where))
    yield opened
    opened.close()


def test_put_objects_are_loaded(client: NativeClient) -> None:
    keys = texts(20)
    assert put(client, keys, 64 * KIB)[1:] == (True, "", None)
    ok, out = get(client, keys, 64 * KIB)
    assert ok == [True] * 20
    assert (out == np.stack(bytes_of(keys, 64 * KIB))).all()


def test_listed_directories_are_added(where: Path, tmp_path: Path) -> None:
    listed = [str(where), str(tmp_path / "b"), str(tmp_path / "c")]
    client, keys = NativeClient(path=listed), texts(20)
    assert put(client, keys, 64 * KIB)[1:] == (True, "", None)
    client.close()
    assert (tmp_path / "b" / "VOLUME").exists() and (tmp_path / "c" / "VOLUME").exists()
    client = NativeClient(path=listed[0])
    assert get(client, keys, 64 * KIB)[0] == [True] * 20
    client.close()


def test_each_key_has_its_own_result(client: NativeClient) -> None:
    keys = texts(9)
    put(client, keys[1::3] + keys[2::3], 64 * KIB)
    expected = [False, True, True] * 3
    assert exists(client, keys) == expected
    ok, out = get(client, keys, 64 * KIB)
    assert ok == expected, "objects after a missing object must be loaded as well"
    for key, page, is_there in zip(keys, out, ok, strict=True):
        assert (page == (page_of(key.encode(), 64 * KIB) if is_there else 0xA5)).all()


def test_different_size_is_miss(client: NativeClient) -> None:
    keys = texts(3)
    put(client, keys, 64 * KIB)
    assert exists(client, keys) == [True] * 3
    for nbytes in (32 * KIB, 128 * KIB, 64 * KIB - 1):
        ok, out = get(client, keys, nbytes)
        assert ok == [False] * 3
        assert (out == 0xA5).all()


def test_batch_of_mixed_sizes_models_salts_is_loaded(client: NativeClient) -> None:
    keys = texts(2) + texts(2, model="other") + texts(2, salt="tenant")
    sizes = [4 * KIB, 12_345] * 3
    pages = [page_of(key.encode(), size) for key, size in zip(keys, sizes, strict=True)]
    assert completed(client, client.submit_batch_set(keys, views(pages)))[1]
    out = [np.zeros(size, np.uint8) for size in sizes]
    done = completed(client, client.submit_batch_get(keys, views(out)))
    assert done[3] == [True] * 6
    for page, got in zip(pages, out, strict=True):
        assert (page == got).all()
    assert exists(client, texts(2, salt="stranger")) == [False] * 2
    assert exists(client, [*texts(1), "no key at all"]) == [True, False]


def test_log_names_object_too_large_for_the_store(client: NativeClient, core_log: CoreLog) -> None:
    long, short = texts(1), texts(1, start=1)
    page = np.zeros(40 << 20, np.uint8)
    done = completed(client, client.submit_batch_set(long, views([page])))
    assert done[1:] == (False, "at least one object was not stored", None)
    (line,) = core_log.take("too large")
    assert "a page is too large for this store: raise the capacity" in line
    assert f"page_bytes={40 << 20}" in line
    assert exists(client, long) == [False]
    assert client._objects.store.meter.take()["skipped_pages:invalid"] == 1
    assert put(client, short, 64 * KIB)[1]
    assert get(client, short, 64 * KIB)[0] == [True]


def test_log_names_object_longer_than_any_page(
    client: NativeClient, caplog: pytest.LogCaptureFixture
) -> None:
    page = np.zeros((512 << 20) + 1, np.uint8)
    done = completed(client, client.submit_batch_set(texts(1), views([page])))
    assert done[1:] == (False, "at least one object was not stored", None)
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "scope failed" in line and str(page.nbytes) in line
    assert put(client, texts(1), 64 * KIB)[1]


def test_partial_put_fails(client: NativeClient) -> None:
    page = np.zeros(4 * KIB, np.uint8)
    number = client.submit_batch_set([*texts(1), "nonsense"], views([page, page.copy()]))
    _, ok, why, _ = completed(client, number)
    assert not ok and why
    assert exists(client, texts(1)) == [True]


def test_oversized_object_is_not_stored(client: NativeClient) -> None:
    huge = np.zeros((64 << 20) + 1, np.uint8)
    number = client.submit_batch_set(texts(2), views([np.zeros(4 * KIB, np.uint8), huge]))
    assert not completed(client, number)[1]
    done = completed(client, client.submit_batch_get(texts(2), views([bytearray(4 * KIB), huge])))
    assert done[3] == [True, False]


def test_deleted_objects_are_misses(client: NativeClient) -> None:
    keys = texts(6)
    put(client, keys[:3], 8 * KIB)
    put(client, keys[3:], 16 * KIB)
    asked = [keys[1], keys[4], *texts(1, start=50)]
    done = completed(client, client.submit_batch_delete(asked))
    assert done[1:] == (True, "", [True, True, False])
    assert exists(client, keys) == [True, False, True, True, False, True]


def test_objects_survive_restart(where: Path) -> None:
    keys = texts(4) + texts(4, salt="tenant")
    first = NativeClient(path=str(where))
    put(first, keys, 64 * KIB)
    first.close()
    second = NativeClient(path=str(where))
    assert exists(second, keys) == [True] * 8, "a new client must learn the sizes from the store"
    ok, out = get(second, keys, 64 * KIB)
    assert ok == [True] * 8
    assert (out == np.stack(bytes_of(keys, 64 * KIB))).all()
    second.close()


def test_namespaces_are_separate(where: Path) -> None:
    with_one = NativeClient(path=str(where), namespace="one")
    put(with_one, texts(2), 8 * KIB)
    with_one.close()
    with_other = NativeClient(path=str(where), namespace="other")
    assert exists(with_other, texts(2)) == [False] * 2
    with_other.close()


def test_full_store_keeps_latest_objects(client: NativeClient) -> None:
    keys = texts(80)
    for start in range(0, 80, 4):
        assert put(client, keys[start : start + 4], 2 << 20)[1]
    found = exists(client, keys)
    assert found[-4:] == [True] * 4
    assert not all(found)
    for ok, key in zip(found, keys, strict=True):
        if ok:
            had, out = get(client, [key], 2 << 20)
            assert had == [True]
            assert (out[0] == page_of(key.encode(), 2 << 20)).all()


def test_unopenable_store_serves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    client = NativeClient(path=str(tmp_path / "file"))
    keys, page = texts(1), np.zeros(4 * KIB, np.uint8)
    assert exists(client, keys) == [False]
    assert not completed(client, client.submit_batch_set(keys, views([page])))[1]
    assert completed(client, client.submit_batch_get(keys, views([page])))[3] == [False]
    assert completed(client, client.submit_batch_delete(keys))[3] == [False]
    client.close()
    client.close()


OWNER = """
import sys
from ritornello.lmcache import NativeClient
client = NativeClient(path=sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def owner_of(where: Path) -> Child:
    child = Child(OWNER, where)
    assert child.read() == "open"
    return child


def test_client_survives_killed_owner(where: Path) -> None:
    with owner_of(where) as owner:
        client = NativeClient(path=str(where))
        keys = texts(8)
        assert put(client, keys, 64 * KIB)[1]
        numbers = [
            client.submit_batch_set(batch, views(bytes_of(batch, 64 * KIB)))
            for batch in (texts(8, start=100 * n) for n in range(1, 5))
        ]
        owner.send_signal(signal.SIGKILL)
        owner.wait(60)
        done: dict[int, Completion] = {}
        until = time.monotonic() + 60
        while len(done) < len(numbers) and time.monotonic() < until:
            select.select([client.event_fd()], [], [], 1)
            done |= {completion[0]: completion for completion in client.drain_completions()}
        assert sorted(done) == numbers
        assert put(client, texts(8, start=900), 64 * KIB)[1], (
            "the client must have become the owner"
        )
        for batch in (keys, *(texts(8, start=100 * n) for n in (1, 2, 3, 4, 9))):
            ok, out = get(client, batch, 64 * KIB)
            for key, page, is_there in zip(batch, out, ok, strict=True):
                assert not is_there or (page == page_of(key.encode(), 64 * KIB)).all()
        assert all(exists(client, texts(8, start=900)))
        client.close()


def test_submitted_lookups_do_not_wait_for_stopped_owner(where: Path) -> None:
    with owner_of(where) as owner:
        client = NativeClient(path=str(where))
        put(client, texts(2), 8 * KIB)
        owner.send_signal(signal.SIGSTOP)
        try:
            begun = time.monotonic()
            numbers = [client.submit_batch_exists(texts(2)) for _ in range(20)]
            assert time.monotonic() - begun < 5, (
                "`submit_batch_exists` waited for the stopped owner"
            )
        finally:
            owner.send_signal(signal.SIGCONT)
        done: list[Completion] = []
        until = time.monotonic() + 60
        while len(done) < len(numbers) and time.monotonic() < until:
            select.select([client.event_fd()], [], [], 1)
            done += client.drain_completions()
        assert [completion[0] for completion in done] == numbers
        assert owner.stdin is not None
        owner.stdin.close()
        owner.wait(60)
        client.close()


def test_pending_lookup_ends_without_its_caller(where: Path) -> None:
    """A lookup ends and releases its leases although LMCache, which aborted the request, never
    takes its result.
    """
    tiers = [f"disk {where}", "held_remote:Held"]
    client = NativeClient(tiers=tiers, prefetch="timeout(0.05, 0)")
    cache: Any = client._objects.store
    keys = texts(4)
    assert put(client, keys[:1], 4 * KIB)[1]
    cache.call("flush", lambda store: store.flush(), None)
    Held.asked = 0
    Held.released.clear()
    try:
        client.submit_batch_exists(keys)
        wait_until(lambda: Held.asked)
        # The lookup ends after the 0.05 seconds of its policy, while the remote does not answer.
        wait_until(lambda: client._completed)
    finally:
        Held.released.set()
    wait_until(
        lambda: cache.call("stats", lambda store: store.stats()["prefetch"]["running"], 1) == 0
    )
    with rt.Store.open(where) as disk:
        assert disk.stats()["leases"] == 0
    client.close()


def test_objects_of_a_size_first_put_by_another_client_are_found(where: Path) -> None:
    with owner_of(where) as owner:
        one, two = (NativeClient(path=str(where)) for _ in range(2))
        keys = texts(2)
        assert exists(two, keys) == [False] * 2
        put(one, keys, 24 * KIB)
        until = time.monotonic() + 60
        while not all(exists(two, keys)) and time.monotonic() < until:
            time.sleep(0.2)
        assert all(exists(two, keys))
        one.close()
        two.close()
        os.kill(owner.pid, signal.SIGTERM)


def weak_texts(count: int) -> list[str]:
    """Returns keys like `texts`, but with hashes of 8 bytes, the length of LMCache's hash
    `builtin`.
    """
    return [f"m@{number:08x}@0@{number.to_bytes(8).hex()}" for number in range(count)]


def test_weak_hashes_are_refused(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    client, keys = NativeClient(path=str(where)), weak_texts(3)
    assert put(client, keys, 4 * KIB)[1:3] == (False, "at least one object was not stored")
    assert exists(client, keys) == [False] * 3
    assert get(client, keys, 4 * KIB)[0] == [False] * 3
    mixed = [*keys, *texts(3)]
    assert put(client, mixed, 4 * KIB)[1] is False
    assert get(client, mixed, 4 * KIB)[0] == [False] * 3 + [True] * 3
    client.close()
    (said,) = caplog.messages
    assert "allow_weak_hashes = true" in said
    assert str(where / "policy.toml") in said


def test_weak_hashes_are_served_if_permitted(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    (where / "policy.toml").write_text("allow_weak_hashes = true")
    client, keys = NativeClient(path=str(where)), weak_texts(3)
    assert put(client, keys, 4 * KIB)[1]
    assert exists(client, keys) == [True] * 3
    client.close()
    assert not caplog.messages


def test_failures_are_logged_once(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = LMCacheStore(Settings(str(where)))
    bad = rt.Scope.opaque("bad", 4096)
    for _ in range(3):
        assert store.submit_get(bad, [b"short"], [bytearray(4096)], staged=False) is None
    assert store.meter.counts()["errors"] == 3
    assert len(caplog.records) == 1
    store.close()
