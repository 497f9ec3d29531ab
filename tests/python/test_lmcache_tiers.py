"""Our adapter for LMCache over tiers: settings, lookups that wait for a remote, a disk tier, and
two machines that share a remote.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import Bytes, blank, keys_of, page_of

import ritornello as rt
from ritornello.errors import RetryError, RitornelloError
from ritornello.lmcache.formats import FormatCatalog
from ritornello.lmcache.lmcache_objects import Item, ObjectStore
from ritornello.lmcache.lookup import ObjectLookup
from ritornello.lmcache.naming import Family, Group, ObjectFormat, ObjectName, parse_scope
from ritornello.lmcache.settings import Settings
from ritornello.lmcache.store import Found

PAGE = 64 << 10
FAMILY = Family("org/model-7b", 0, "")
FORMAT = ObjectFormat(PAGE, "bfloat16[2,4,64,64]@KV_2LTD")
EXPECTED = {0: FORMAT}
# The format of objects that an LMCache server serializes before it stores them.
SERIALIZED = ObjectFormat(PAGE // 2, f"uint8[{PAGE // 2}]@KV_2LTD")
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
        (["file:///mnt/kv"], "needs a disk"),
    ],
)
def test_unusable_tier_lists_are_refused_in_one_line(tiers: list[str], advice: str) -> None:
    with pytest.raises(ValueError, match=advice) as refused:
        Settings.parse({"tiers": tiers})
    assert "\n" not in str(refused.value)


def test_settings_take_directories_from_disk_tier() -> None:
    settings = Settings.parse({"tiers": ["disk /a/kv /b/kv 4GiB rate=1MiB", "file:///far"]})
    assert settings.directories == ("/a/kv", "/b/kv")
    assert settings.has_remote


# Lookups.


class FakeStore:
    """A store whose first `pending` calls of `find` return pending lookups. Later calls find all
    keys except the second.
    """

    has_remote = True

    def __init__(self, pending: int) -> None:
        self.left = pending
        # The layout and the number of keys of each lookup, in order.
        self.asked: list[tuple[str, int]] = []
        self.cancelled: list[str] = []
        self.released: list[Any] = []
        self.meter = self
        self.counted: dict[str, float] = {}

    def find(self, scope: rt.Scope, keys: Sequence[bytes], seconds: float) -> Found:
        self.asked.append((layout_of(scope), len(keys)))
        if self.left:
            self.left -= 1
            return Found([False] * len(keys), None, pending=True)
        return Found([place != 1 for place in range(len(keys))], "lease")

    def cancel_lookup(self, scope: rt.Scope, keys: Sequence[bytes]) -> None:
        self.cancelled.append(layout_of(scope))

    def release(self, lease: Any) -> None:
        self.released.append(lease)

    def attempt(self, operation: str, action: Any, default: Any) -> Any:
        try:
            return action()
        except RitornelloError:
            return default

    def add_all(self, counts: dict[str, float]) -> None:
        self.counted |= counts


def layout_of(scope: rt.Scope) -> str:
    parsed = parse_scope(scope.describe(), "")
    assert parsed is not None
    return parsed[1].layout


class FakeObjects:
    """Stand-in for `ObjectStore` over a `FakeStore` that has objects in the formats `stored`."""

    def __init__(self, pending: int, *stored: ObjectFormat) -> None:
        self.store = FakeStore(pending)
        self.formats = FormatCatalog(list, "")
        for object_format in stored:
            self.formats.scope(FAMILY, object_format, is_stored=True)

    def refuses_hashes(self, keys: Sequence[bytes]) -> bool:
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


def test_keys_missing_in_stored_format_are_looked_up_in_expected_format() -> None:
    objects = FakeObjects(0, SERIALIZED)
    lookup = lookup_in(objects, KEYS)
    assert lookup.advance()
    assert objects.store.asked == [(SERIALIZED.layout, 5), (FORMAT.layout, 1)]
    assert lookup.found == [True] * 5


@pytest.mark.parametrize("used", [FORMAT, SERIALIZED])
def test_remote_is_asked_once_for_own_format(used: ObjectFormat) -> None:
    objects = FakeObjects(0, used)
    objects.formats.record_use(FAMILY, used)
    lookup = lookup_in(objects, KEYS)
    assert lookup.advance()
    assert objects.store.asked == [(used.layout, 5)]
    assert lookup.found == [True, False, True, True, True]


def test_own_format_is_looked_up_first() -> None:
    other = ObjectFormat(PAGE // 4, f"uint8[{PAGE // 4}]@KV_2LTD")
    objects = FakeObjects(0, SERIALIZED, other)
    objects.formats.record_use(FAMILY._replace(salt="other"), SERIALIZED)
    assert lookup_in(objects, KEYS).advance()
    assert objects.store.asked == [(SERIALIZED.layout, 5), (other.layout, 1)]


@pytest.mark.parametrize(("used", "earlier"), [(FORMAT, SERIALIZED), (SERIALIZED, FORMAT)])
def test_objects_in_format_of_earlier_serde_are_not_found(
    used: ObjectFormat, earlier: ObjectFormat
) -> None:
    objects = FakeObjects(0, earlier)
    objects.formats.record_use(FAMILY, used)
    lookup = lookup_in(objects, KEYS)
    assert lookup.advance()
    assert objects.store.asked == [(used.layout, 5)], (
        "objects of the earlier format must not be looked up"
    )
    other = Family("org/other-model", 0, "")
    others: Any = FakeObjects(0)
    others.formats.scope(other, earlier, is_stored=True)
    others.formats.record_use(FAMILY, used)
    assert ObjectLookup(others, [Group(other, range(5), KEYS)], 5, 60.0, EXPECTED).advance()
    assert earlier.layout not in [layout for layout, _ in others.store.asked]


@pytest.mark.parametrize(
    ("expected", "looked_up"), [(EXPECTED, FORMAT), ({}, FORMAT), (None, ObjectFormat(PAGE))]
)
def test_plugin_and_native_plugin_do_not_find_each_others_objects(
    expected: dict[int, ObjectFormat] | None, looked_up: ObjectFormat
) -> None:
    objects: Any = FakeObjects(0, FORMAT, ObjectFormat(PAGE))
    assert ObjectLookup(objects, group_of(KEYS), len(KEYS), 60.0, expected).advance()
    assert objects.store.asked == [(looked_up.layout, 5)]


def test_too_long_expected_object_costs_no_hits() -> None:
    """The layout that LMCache expects describes objects before serialization. An object of this
    layout would be longer than the maximum page, but the stored, serialized objects are shorter and
    are found.
    """
    objects: Any = FakeObjects(0, SERIALIZED)
    expected = {0: ObjectFormat(1 << 30, "bfloat16[2,4,64,65536]@KV_2LTD")}
    lookup = ObjectLookup(objects, group_of(KEYS), len(KEYS), 60.0, expected)
    assert lookup.advance()
    assert lookup.found == [True, False, True, True, True]


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
    objects: ObjectStore,
    keys: Sequence[bytes],
    memory: Sequence[Any],
    put: bool,
    object_format: ObjectFormat = FORMAT,
) -> list[bool]:
    """Puts or gets objects, and returns which of them were moved."""
    items = [
        Item(ObjectName(FAMILY, key), object_format, page)
        for key, page in zip(keys, memory, strict=True)
    ]
    completions = rt._core.Completions()
    job = objects.start(1, items, completions, is_put=put)
    until = time.monotonic() + WAIT_SECONDS
    while job is None:
        assert time.monotonic() < until
        time.sleep(0.001)
        job = next(iter(objects.complete_tickets(completions.drain())), None)
    return job.ok


def put(
    objects: ObjectStore, keys: Sequence[bytes], object_format: ObjectFormat = FORMAT
) -> list[bool]:
    pages = [page_of(key, object_format.nbytes) for key in keys]
    return run(objects, keys, pages, put=True, object_format=object_format)


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
    assert "errors" not in counts, "`Cache` must have all methods that the adapter calls"
    assert disk.store.stats_counts()["tier_dropped_pages:disk"] == 0


def test_objects_after_a_missing_one_are_found(disk: ObjectStore) -> None:
    assert put(disk, KEYS[2:]) == [True] * 3
    assert find(disk, KEYS).found == [False, False, True, True, True]


class FailingCache:
    """A cache whose `exists` raises an error. `leases`: all leases of its lookups; `released`: the
    leases that were released.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.leases: list[Any] = []
        self.released: list[Any] = []

    def lookup(self, *arguments: Any, **options: Any) -> Any:
        found = self._cache.lookup(*arguments, **options)
        self.leases += found.leases
        return found

    def exists(self, scope: rt.Scope, keys: Sequence[bytes]) -> list[bool]:
        raise RetryError("no answer in time")

    def release(self, lease: Any) -> None:
        self.released.append(lease)
        self._cache.release(lease)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class FailingDeletes:
    """A cache whose owner does not answer deletions."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def delete(self, scope: rt.Scope, keys: Sequence[bytes]) -> int:
        raise RetryError("no answer in time")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def test_failed_lookup_releases_its_leases(disk: ObjectStore) -> None:
    assert put(disk, KEYS[:3]) == [True] * 3
    failing: Any = FailingCache(disk.store._store)
    disk.store._store = failing
    lookup = find(disk, KEYS)
    assert lookup.found == [False] * 5 and lookup.leases == []
    assert failing.released == failing.leases and len(failing.leases) == 1
    assert disk.store.meter.counts()["errors"] == 1


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


def test_failed_deletion_counts_no_object(
    disk: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(disk, KEYS) == [True] * 5
    failing: Any = FailingDeletes(disk.store._store)
    monkeypatch.setattr(disk.store, "_store", failing)
    assert disk.delete(group_of(KEYS[:2]), 2) == [False, False]
    counts = disk.store.meter.counts()
    assert counts["errors"] == 1 and "deleted_pages" not in counts
    assert find(disk, KEYS).found == [True] * 5


def test_lookup_finds_nothing_if_gate_is_never(tmp_path: Path) -> None:
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
    assert (counts["remote_read_bytes"] > 5 * PAGE, counts["remote_written_bytes"]) == (True, 0)
    assert one.store.stats_counts()["remote_written_bytes"] > 5 * PAGE
    assert "errors" not in two.store.meter.counts()
    one.store.close()
    two.store.close()


def test_local_objects_of_another_format_do_not_hide_remote(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    one, two = (machine(tmp_path, name) for name in ("one", "two"))
    assert put(one, KEYS) == [True] * 5
    one.store.call("flush", lambda cache: cache.flush(), None)
    assert put(two, KEYS[:2], SERIALIZED) == [True] * 2
    two.store.close()
    two = machine(tmp_path, "two")
    lookup = find(two, KEYS)
    assert lookup.found == [True] * 5
    assert [leased.keys for leased in lookup.leases] == [KEYS[:2], KEYS[2:]]
    assert_loads(two, KEYS[2:])
    one.store.close()
    two.store.close()


def test_missing_remote_directory_costs_hits_only(tmp_path: Path) -> None:
    objects = machine(tmp_path, "one")  # its remote's directory does not exist
    assert find(objects, KEYS).found == [False] * 5
    assert put(objects, KEYS) == [True] * 5
    assert find(objects, KEYS).found == [True] * 5
    assert_loads(objects, KEYS)
    objects.store.close()


@pytest.mark.parametrize(
    ("layout", "namespace", "warned"),
    [
        ("uint8[2,16,64]@KV_2LTD", "", 1),
        ("uint8[2,16,64]@KV_2LTD", "fp8_e4m3", 0),
        ("bfloat16[2,16,64]@KV_2LTD", "", 0),
        ("uint8[4096]@KV_2LTD", "", 0),
    ],
    ids=["8-bit", "8-bit with namespace", "16-bit", "serialized"],
)
def test_objects_of_unknown_8_bit_kind_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str, namespace: str, warned: int
) -> None:
    objects = machine(tmp_path, "a", namespace=namespace)
    for key in KEYS[:2]:
        assert put(objects, [key], ObjectFormat(4096, layout)) == [True]
    objects.store.close()
    assert caplog.text.count("--kv-cache-dtype") == warned
