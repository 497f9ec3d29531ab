"""LMCache's adapter over tiers: settings, lookups that wait for a remote, a disk tier, and two
machines that share a remote.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import Bytes, blank, keys_of, page_of

import ritornello as rt
from ritornello.lmcache.lmcache_objects import Item, ObjectStore
from ritornello.lmcache.lookup import ObjectLookup
from ritornello.lmcache.naming import Family, Group, ObjectFormat, ObjectName
from ritornello.lmcache.settings import Settings
from ritornello.lmcache.store import Found

PAGE = 64 << 10
FAMILY = Family("org/model-7b", 0, "")
FORMAT = ObjectFormat(PAGE, "bfloat16[2,4,64,64]@KV_2LTD")
EXPECTED = {0: FORMAT}
KEYS = [bytes(8) + key for key in keys_of("prompt", 5)]
WAIT_SECONDS = 60.0


def group_of(keys: Sequence[bytes]) -> list[Group]:
    return [Group(FAMILY, range(len(keys)), list(keys))]


# Settings.


@pytest.mark.parametrize(
    ("tiers", "advice"),
    [
        (["host 8GiB", "disk /nvme/kv 200GiB"], "--l1-size-gb"),
        (["disk /nvme/kv 200GiB", "host 8GiB"], "--l1-size-gb"),
        (["gpu 8GiB"], "--gpu-memory-utilization"),
        (["file:///mnt/kv"], "begins with the disk"),
    ],
)
def test_other_tiers_are_refused_in_one_line(tiers: list[str], advice: str) -> None:
    with pytest.raises(ValueError, match=advice) as refused:
        Settings.parse({"tiers": tiers})
    assert "\n" not in str(refused.value)


def test_disk_tier_gives_the_directories() -> None:
    settings = Settings.parse({"tiers": ["disk /a/kv /b/kv 4GiB rate=1MiB", "file:///far"]})
    assert settings.directories == ("/a/kv", "/b/kv")
    assert settings.has_remote


# Lookups.


class FakeStore:
    """A store whose lookups stay pending for the given number of calls."""

    has_remote = True

    def __init__(self, pending: int) -> None:
        self.left = pending
        self.asked: list[tuple[bytes, int]] = []
        self.cancelled: list[bytes] = []
        self.released: list[Any] = []
        self.meter = self
        self.counted: dict[str, float] = {}

    def find(self, scope: rt.Scope, keys: Sequence[bytes], seconds: float) -> Found:
        self.asked.append((scope.id, len(keys)))
        if self.left:
            self.left -= 1
            return Found([False] * len(keys), None, pending=True)
        return Found([place != 1 for place in range(len(keys))], "lease")

    def cancel_lookup(self, scope: rt.Scope, keys: Sequence[bytes]) -> None:
        self.cancelled.append(scope.id)

    def release(self, lease: Any) -> None:
        self.released.append(lease)

    def add_all(self, counts: dict[str, float]) -> None:
        self.counted |= counts


class FakeObjects:
    """An `ObjectStore` with a fake store that has no formats yet."""

    def __init__(self, pending: int) -> None:
        self.store = FakeStore(pending)
        self.formats = self

    def refuses_hashes(self, keys: Sequence[bytes]) -> bool:
        return False

    def of(self, family: Family) -> dict[ObjectFormat, rt.Scope]:
        return {}

    def scope(self, family: Family, object_format: ObjectFormat, *, is_stored: bool) -> rt.Scope:
        assert not is_stored
        return rt.Scope.opaque(object_format.layout, object_format.nbytes, chained=False)

    def refresh(self) -> bool:
        return False


def lookup_in(objects: Any, keys: Sequence[bytes], seconds: float = 60.0) -> ObjectLookup:
    return ObjectLookup(objects, group_of(keys), len(keys), seconds, EXPECTED)


def test_pending_lookup_is_continued() -> None:
    objects = FakeObjects(pending=2)
    lookup = lookup_in(objects, KEYS)
    assert [lookup.advance() for _ in range(3)] == [False, False, True]
    assert lookup.found == [True, False, True, True, True]
    (leased,) = lookup.leases
    assert leased.lease == "lease" and leased.keys == [KEYS[0], *KEYS[2:]]
    assert objects.store.counted == {"probed_pages": 5, "hit_pages": 4}


def test_cancelled_lookup_ends_transfers_and_leases() -> None:
    pending = FakeObjects(pending=9)
    lookup = lookup_in(pending, KEYS)
    assert not lookup.advance()
    lookup.cancel()
    assert pending.store.cancelled == [pending.store.asked[0][0]]
    assert lookup.found == [False] * 5 and lookup.leases == []
    done = FakeObjects(pending=0)
    lookup = lookup_in(done, KEYS)
    assert lookup.advance()
    lookup.cancel()
    assert done.store.released == ["lease"] and done.store.cancelled == []


# Tiers.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ObjectStore]:
    objects = ObjectStore(Settings.parse({"tiers": [f"disk {tmp_path}/kv 64MiB"]}))
    yield objects
    objects.store.close()


def machine(path: Path, name: str, **further: Any) -> ObjectStore:
    tiers = [f"disk {path}/{name} 64MiB", f"file://{path}/far"]
    return ObjectStore(Settings.parse({"tiers": tiers, "prefetch": "wait_complete", **further}))


def run(
    objects: ObjectStore, keys: Sequence[bytes], memory: Sequence[Any], put: bool
) -> list[bool]:
    """Puts or gets objects, and returns which of them were moved."""
    items = [
        Item(ObjectName(FAMILY, key), FORMAT, page) for key, page in zip(keys, memory, strict=True)
    ]
    completions = rt._core.Completions()
    job = objects.start(1, items, completions, is_put=put)
    until = time.monotonic() + WAIT_SECONDS
    while job is None:
        assert time.monotonic() < until
        time.sleep(0.001)
        job = next(iter(objects.complete_tickets(completions.drain())), None)
    return job.ok


def put(objects: ObjectStore, keys: Sequence[bytes]) -> list[bool]:
    return run(objects, keys, [page_of(key, PAGE) for key in keys], put=True)


def find(objects: ObjectStore, keys: Sequence[bytes]) -> ObjectLookup:
    lookup = lookup_in(objects, keys)
    until = time.monotonic() + WAIT_SECONDS
    while not lookup.advance():
        assert time.monotonic() < until
        time.sleep(0.001)
    return lookup


def assert_loads(objects: ObjectStore, keys: Sequence[bytes]) -> None:
    out: Bytes = blank(len(keys), PAGE)
    assert run(objects, keys, list(out), put=False) == [True] * len(keys)
    for key, page in zip(keys, out, strict=True):
        assert (page == page_of(key, PAGE)).all()


def test_disk_tier_serves_objects(disk: ObjectStore) -> None:
    assert find(disk, KEYS).found == [False] * 5
    assert put(disk, KEYS[:3]) == [True] * 3
    lookup = find(disk, KEYS)
    assert lookup.found == [True, True, True, False, False]
    assert [leased.keys for leased in lookup.leases] == [KEYS[:3]]
    assert_loads(disk, KEYS[:3])
    for leased in lookup.leases:
        disk.store.release(leased.lease)
    counts = disk.store.meter.counts()
    assert counts["saved_pages"] == counts["loaded_pages"] == 3
    assert counts["loaded_bytes"] == 3 * PAGE and counts["load_seconds"] > 0
    assert "errors" not in counts, "every call of the store is a call of the cache"
    assert disk.store.stats_counts()["tier_dropped_pages:disk"] == 0


def test_objects_after_a_missing_one_are_found(disk: ObjectStore) -> None:
    assert put(disk, KEYS[2:]) == [True] * 3
    assert find(disk, KEYS).found == [False, False, True, True, True]


def test_deletion_listing_and_usage_act_on_the_disk(disk: ObjectStore) -> None:
    assert put(disk, KEYS) == [True] * 5
    assert disk.usage() == {"": 5 * PAGE}
    ((_, _, scope, objects),) = disk.formats.stored_formats()
    assert objects == 5
    assert set(disk.store.keys(scope, 0, 100)[0]) == set(KEYS)
    assert disk.delete(group_of(KEYS[:2]), 2) == [True, True]
    assert find(disk, KEYS).found == [False, False, True, True, True]
    assert disk.usage() == {"": 3 * PAGE}
    assert "errors" not in disk.store.meter.counts()


def test_closed_gate_finds_nothing(tmp_path: Path) -> None:
    objects = ObjectStore(Settings.parse({"tiers": [f"disk {tmp_path}/kv 64MiB"], "gate": "never"}))
    put(objects, KEYS)
    lookup = find(objects, KEYS)
    assert lookup.found == [False] * 5 and lookup.leases == []
    objects.store.close()


def test_machines_share_a_remote(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    one, two = (machine(tmp_path, name) for name in ("one", "two"))
    assert put(one, KEYS) == [True] * 5
    one.store.call("flush", lambda cache: cache.flush(), None)
    lookup = find(two, [*KEYS, bytes(40)])
    assert lookup.found == [True] * 5 + [False]
    assert [leased.keys for leased in lookup.leases] == [KEYS]
    assert_loads(two, KEYS)
    counts = two.store.stats_counts()
    assert counts["prefetches:completed"] > 0
    assert "errors" not in two.store.meter.counts()
    one.store.close()
    two.store.close()


def test_remote_that_is_away_costs_hits_only(tmp_path: Path) -> None:
    objects = machine(tmp_path, "one")  # its remote's directory does not exist
    assert find(objects, KEYS).found == [False] * 5
    assert put(objects, KEYS) == [True] * 5
    assert find(objects, KEYS).found == [True] * 5
    assert_loads(objects, KEYS)
    objects.store.close()
