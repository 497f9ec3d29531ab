"""Parts of our adapter for LMCache: object names, formats, locks, queries, key listing, settings,
and the check of LMCache's interface.
"""

from dataclasses import make_dataclass
from threading import Thread
from typing import Any, NamedTuple

import pytest

import ritornello as rt
from ritornello.lmcache import interface
from ritornello.lmcache.executor import LookupExecutor
from ritornello.lmcache.formats import REFRESH_SECONDS, FormatCatalog
from ritornello.lmcache.interface import INTERFACE, interface_difference
from ritornello.lmcache.listing import list_objects
from ritornello.lmcache.locks import Locks
from ritornello.lmcache.lookup import fits
from ritornello.lmcache.naming import (
    RANK_PREFIXES_MAX,
    Family,
    ObjectFormat,
    ObjectName,
    RankPrefixes,
    group_objects,
    page_key,
    parse_name,
    parse_scope,
    scope_of,
    split_key,
)
from ritornello.lmcache.settings import Settings

FAMILY = Family("org/model-7b", 2, "tenant")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def name_of(number: int, family: Family = FAMILY) -> ObjectName:
    return ObjectName(family, page_key(0x01000100, number.to_bytes(32)))


# Names.


def test_key_contains_rank_and_hash() -> None:
    for rank, digest in ((0, b"\x01"), (0xFFFF_FFFF, bytes(range(32))), (7, b"x" * 56)):
        key = page_key(rank, digest)
        assert 8 <= len(key) <= 64
        assert split_key(key) == (rank, digest)


@pytest.mark.parametrize(("rank", "digest"), [(1 << 64, b"x"), (0, b""), (0, b"x" * 57)])
def test_rank_or_hash_of_invalid_length_is_refused(rank: int, digest: bytes) -> None:
    with pytest.raises(ValueError, match="does not fit in 8 bytes, or the hash"):
        page_key(rank, digest)


def test_object_names_of_lmcache_bridge_are_parsed() -> None:
    plain = parse_name("org/model-7b@01000100@2@00ff")
    assert plain == ObjectName(Family("org/model-7b", 2, ""), page_key(0x01000100, b"\x00\xff"))
    salted = parse_name("org/model-7b@01000100@2@00ff@tenant")
    assert salted == ObjectName(FAMILY, plain.key)


@pytest.mark.parametrize("text", ["", "a@b", "m@0@0@zz", "m@0@0@00@s@t", "m@0@0@"])
def test_invalid_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_name(text)


def test_scope_contains_family_format_and_namespace() -> None:
    object_format = ObjectFormat(4096, "bfloat16[2,16,64]@KV_2LTD")
    scope = scope_of(FAMILY, object_format, "v2")
    assert scope.page_bytes == 4096
    assert not scope.chained
    assert parse_scope(scope.describe(), "v2") == (FAMILY, object_format)
    assert parse_scope(scope.describe(), "") is None
    assert parse_scope(rt.Scope.opaque("other", 4096).describe(), "") is None


def test_stored_objects_keep_their_scopes() -> None:
    """If the id of this scope changes, objects that earlier versions stored are not found."""
    scope = scope_of(FAMILY, ObjectFormat(4096, "bfloat16[2,16,64]@KV_2LTD"), "v2")
    assert scope.id.hex() == "72b6642b5e2e5da729e49db414d89474"


def test_scope_names_dtype_that_all_tensors_share() -> None:
    layouts = {
        "bfloat16[2,8]@KV_2LTD": "bfloat16",
        "float16[8]+float16[2]@KV_2LTD": "float16",
        "float16[8]+float32[2]@KV_2LTD": "",
        "": "",
    }
    for layout, dtype in layouts.items():
        assert scope_of(FAMILY, ObjectFormat(4096, layout), "").describe()["dtype"] == dtype


def test_any_difference_makes_other_scope() -> None:
    object_format = ObjectFormat(4096, "bfloat16[2048]")
    scopes = {
        scope_of(family, other, namespace).id
        for family in (FAMILY, FAMILY._replace(model="m"), FAMILY._replace(group=3))
        for other in (
            object_format,
            object_format._replace(nbytes=8192),
            object_format._replace(layout="float16[2048]"),
        )
        for namespace in ("", "v2")
    } | {scope_of(FAMILY._replace(salt=""), object_format, "").id}
    assert len(scopes) == 19


class Key(NamedTuple):
    """An object key with LMCache's fields."""

    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


@pytest.mark.parametrize("ranks", [[7, 7, 7], [7, 8, 9], [7, 1 << 70, 9]])
@pytest.mark.parametrize("salts", [["", "", ""], ["a", "b", "a"]])
@pytest.mark.parametrize("bad", [b"ok", b"", b"x" * 57])
def test_objects_are_grouped_by_family(ranks: list[int], salts: list[str], bad: bytes) -> None:
    hashes = [b"one", bad, b"three"]
    keys = [
        Key(digest, kv_rank=rank, cache_salt=salt)
        for digest, rank, salt in zip(hashes, ranks, salts, strict=True)
    ]
    expected = {}
    for at, key in enumerate(keys):
        try:
            made = page_key(key.kv_rank, key.chunk_hash)
        except ValueError:
            continue
        expected[at] = (Family("m", 0, key.cache_salt), made)
    found = {
        at: (group.family, key)
        for group in group_objects(keys)
        for at, key in zip(group.indices, group.keys, strict=True)
    }
    assert found == expected


def test_no_keys_make_no_groups() -> None:
    assert group_objects([]) == []


def test_rank_prefix_cache_is_bounded() -> None:
    prefixes = RankPrefixes()
    for rank in range(RANK_PREFIXES_MAX + 10):
        assert prefixes[rank] + b"hash" == page_key(rank, b"hash")
    assert len(prefixes) <= RANK_PREFIXES_MAX


# Formats.


def test_formats_are_read_at_intervals() -> None:
    clock, asked = Clock(), []
    stored = [(scope_of(FAMILY, ObjectFormat(4096), ""), 3, 0)]

    def ask() -> list[tuple[rt.Scope, int, int]]:
        asked.append(clock.now)
        return stored

    formats = FormatCatalog(ask, "", clock)
    assert not formats.of(FAMILY)
    assert formats.refresh()
    assert list(formats.of(FAMILY)) == [ObjectFormat(4096)]
    stored.append((scope_of(FAMILY, ObjectFormat(8192), ""), 1, 0))
    assert not formats.refresh(), "a refresh before REFRESH_SECONDS must not query the store"
    clock.now += REFRESH_SECONDS + 0.1
    assert formats.refresh()
    assert list(formats.of(FAMILY)) == [ObjectFormat(8192), ObjectFormat(4096)], (
        "the newest format must be first"
    )
    clock.now += REFRESH_SECONDS + 0.1
    assert not formats.refresh(), "a refresh without new formats must return false"
    assert len(asked) == 3


def test_put_does_not_wait_for_formats() -> None:
    """A put derives its scope from the object's format, and so does not wait while another thread
    waits for the owner's list of stored formats.
    """

    def ask() -> list[tuple[rt.Scope, int, int]]:
        put = Thread(
            target=lambda: formats.scope(FAMILY, ObjectFormat(8192), is_stored=True), daemon=True
        )
        put.start()
        put.join(60)
        assert not put.is_alive(), "a put must not wait for the running query"
        assert not formats.refresh(), "a refresh must not start a query while another query runs"
        return [(scope_of(FAMILY, ObjectFormat(4096), ""), 3, 0)]

    formats = FormatCatalog(ask, "")
    assert formats.refresh()
    assert list(formats.of(FAMILY)) == [ObjectFormat(4096), ObjectFormat(8192)]


def test_formats_are_read_again_after_failure() -> None:
    clock, failing = Clock(), [True]

    def ask() -> list[tuple[rt.Scope, int, int]]:
        if failing.pop():
            raise OSError("no answer")
        return [(scope_of(FAMILY, ObjectFormat(4096), ""), 3, 0)]

    formats = FormatCatalog(ask, "", clock)
    with pytest.raises(OSError, match="no answer"):
        formats.refresh()
    clock.now += REFRESH_SECONDS + 0.1
    failing.append(False)
    assert formats.refresh()


def test_only_stored_formats_are_known() -> None:
    formats = FormatCatalog(list, "")
    formats.scope(FAMILY, ObjectFormat(4096), is_stored=False)
    assert not formats.of(FAMILY)
    formats.scope(FAMILY, ObjectFormat(4096), is_stored=True)
    assert list(formats.of(FAMILY)) == [ObjectFormat(4096)]


@pytest.mark.parametrize(
    ("stored", "is_usable"),
    [
        ("bfloat16[2,8]@KV_2LTD", True),
        ("float16[2,8]@KV_2LTD", False),
        ("uint8[99]@BINARY", True),
        ("uint8[9,11]@KV_2LTD", False),
        ("uint8[99]+uint8[99]@KV_2LTD", False),
    ],
)
def test_objects_of_same_layout_or_serialized_are_usable(stored: str, is_usable: bool) -> None:
    assert fits(ObjectFormat(99, stored), ObjectFormat(32, "bfloat16[2,8]")) is is_usable


# Locks.

ONE, TWO, THREE = (name_of(number).key for number in range(3))


def test_lease_ends_with_last_lock() -> None:
    locks = Locks(60.0, Clock())
    locks.lock(FAMILY, [ONE, TWO], 11)
    locks.lock(FAMILY, [TWO, THREE], 12)
    assert len(locks) == 4
    assert locks.unlock(FAMILY, [ONE]) == []
    assert locks.unlock(FAMILY, [TWO]) == [11], "the older lease must be released first"
    assert locks.unlock(FAMILY, [THREE, TWO]) == [12]
    assert locks.unlock(FAMILY, [ONE, TWO, THREE]) == []
    assert len(locks) == 0


def test_unlock_releases_one_lock_per_key() -> None:
    locks = Locks(60.0, Clock())
    locks.lock(FAMILY, [ONE, TWO], 11)
    locks.lock(FAMILY, [ONE, TWO], 12)
    assert locks.unlock(FAMILY, [ONE, TWO]) == [11]
    assert locks.unlock(FAMILY, [ONE, TWO]) == [12]


def test_families_do_not_share_locks() -> None:
    locks = Locks(60.0, Clock())
    other = FAMILY._replace(salt="other")
    locks.lock(FAMILY, [ONE], 11)
    locks.lock(other, [ONE], 12)
    assert locks.unlock(other, [ONE]) == [12]
    assert locks.unlock(FAMILY, [ONE]) == [11]


def test_unreleased_locks_expire() -> None:
    clock = Clock()
    locks = Locks(60.0, clock)
    for lease in range(10):
        locks.lock(FAMILY, [ONE, TWO], lease)
    assert len(locks) == 20
    clock.now += 61
    assert len(locks) == 0, "expired locks must not count, even if nothing was locked since"
    locks.lock(FAMILY, [THREE], 77)
    assert len(locks) == 1
    assert [leased.lease for leased in locks._leases[FAMILY]] == [77]
    assert locks.unlock(FAMILY, [ONE, THREE]) == [77]


def test_locks_of_unused_families_expire() -> None:
    clock = Clock()
    locks = Locks(60.0, clock)
    for salt in range(40):
        locks.lock(FAMILY._replace(salt=f"tenant {salt}"), [ONE], salt)
    clock.now += 61
    for lease in range(40):
        locks.lock(FAMILY, [TWO], lease)
    assert len(locks) == 40
    assert [*locks._leases] == [FAMILY]
    assert locks.unlock(FAMILY._replace(salt="tenant 39"), [ONE]) == []


# Queries.


def test_owner_runs_queries_in_callers_thread() -> None:
    from threading import Event, get_ident

    owner = [True]
    executor = LookupExecutor(lambda: owner[0])
    threads: list[int] = []
    done = Event()
    executor.submit(lambda _: threads.append(get_ident()))
    assert threads == [get_ident()]
    owner[0] = False
    executor.submit(lambda _: threads.append(get_ident()))
    executor.submit(lambda _: done.set())
    assert done.wait(60)
    assert threads[1] != get_ident()
    executor.close()


def test_client_runs_queries_in_order_until_close() -> None:
    from threading import Event

    heard: list[tuple[int, bool]] = []
    begun, go = Event(), Event()
    executor = LookupExecutor(lambda: False)

    def slow(expired: bool) -> None:
        begun.set()
        assert go.wait(60)
        heard.append((0, expired))

    executor.submit(slow)
    executor.submit(lambda expired: heard.append((1, expired)))
    assert begun.wait(60)
    executor._closed = True  # `close` sets this before it waits
    go.set()
    executor.close()
    assert heard == [(0, False), (1, True)]
    executor.submit(lambda expired: heard.append((2, expired)))
    assert heard[-1] == (2, True)


def test_pending_query_is_repeated() -> None:
    from threading import Event

    ready, done, behind = Event(), Event(), Event()
    calls: list[bool] = []

    def pending(expired: bool) -> bool:
        calls.append(expired)
        if ready.is_set():
            done.set()
        return not ready.is_set()

    # In a process that owns the store the executor first calls a query in the caller's thread. If
    # this call returns that the query is pending, the later calls run on the executor's thread.
    executor = LookupExecutor(lambda: True)
    executor.submit(pending)
    executor.submit(lambda _: behind.set())
    assert behind.wait(60), "a pending query must not delay the query behind it"
    assert not done.is_set()
    ready.set()
    assert done.wait(60)
    executor.close()
    assert len(calls) > 1 and not any(calls)


def test_close_ends_pending_queries() -> None:
    calls: list[bool] = []

    def pending(expired: bool) -> bool:
        calls.append(expired)
        return not expired

    executor = LookupExecutor(lambda: False)
    executor.submit(pending)
    executor.close()
    assert calls[-1] and not any(calls[:-1])


def test_query_without_thread_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the executor cannot start its thread, it calls the query with True, as a query that is
    dropped, so that the query reports its end to LMCache, which waits for the report.
    """
    from threading import Event

    def fail(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    heard: list[bool] = []
    executor = LookupExecutor(lambda: False)
    with monkeypatch.context() as limited:
        limited.setattr(Thread, "start", fail)
        executor.submit(heard.append)
        executor.submit(heard.append)
    assert heard == [True, True]
    done = Event()
    executor.submit(lambda expired: done.set())
    assert done.wait(60), "the next query must start the thread"
    executor.close()


# Listing.


class Runs(NamedTuple):
    """Keys of a scope, in runs. The method `keys` is like the store's: it lists whole runs, and so
    may return more than `limit` keys.
    """

    runs: list[list[bytes]]

    def keys(self, scope: rt.Scope, after: int, limit: int) -> tuple[list[bytes], int]:
        keys: list[bytes] = []
        for generation, run in enumerate(self.runs, 1):
            if generation > after:
                keys += run
                if len(keys) >= limit:
                    return keys, 0 if generation == len(self.runs) else generation
        return keys, 0


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 100])
def test_paged_listing_returns_every_object_once(limit: int) -> None:
    keys = [name_of(number).key for number in range(20)]
    runs = Runs([keys[:1], keys[1:8], keys[8:9], keys[9:20]])
    held = [(FAMILY, scope_of(FAMILY, ObjectFormat(nbytes), ""), 20) for nbytes in (4096, 8192)]
    seen, cursor = [], None
    while True:
        listed, cursor = list_objects(held, runs.keys, limit, cursor)
        assert len(listed) <= limit
        seen += [(key, nbytes) for _, key, nbytes in listed]
        if cursor is None:
            break
        assert listed
    assert seen == [(key, nbytes) for nbytes in (4096, 8192) for key in keys]


def test_listing_continues_after_emptied_scope() -> None:
    keys = [name_of(number).key for number in range(3)]
    runs = Runs([keys])
    first, second = (scope_of(FAMILY, ObjectFormat(nbytes), "") for nbytes in (4096, 8192))
    listed, cursor = list_objects([(FAMILY, first, 3), (FAMILY, second, 3)], runs.keys, 2, None)
    assert len(listed) == 2
    listed, cursor = list_objects([(FAMILY, first, 0), (FAMILY, second, 3)], runs.keys, 9, cursor)
    assert [(key, nbytes) for _, key, nbytes in listed] == [(key, 8192) for key in keys]
    assert cursor is None


def test_listing_begins_again_if_the_scope_of_the_cursor_was_dropped() -> None:
    keys = [name_of(number).key for number in range(3)]
    runs = Runs([keys])
    first, second = (scope_of(FAMILY, ObjectFormat(nbytes), "") for nbytes in (4096, 8192))
    both = [(FAMILY, first, 3), (FAMILY, second, 3)]
    _, cursor = list_objects(both, runs.keys, 2, None)
    listed, cursor = list_objects(both[1:], runs.keys, 9, cursor)
    assert [key for _, key, _ in listed] == keys
    assert cursor is None


def test_invalid_cursor_is_refused() -> None:
    none = Runs([])
    for bad in ("x", "1:2", "zz:1:2", "00:-1:0", "00:1:y"):
        with pytest.raises(ValueError):
            list_objects([], none.keys, 5, bad)
    with pytest.raises(ValueError, match="at least 1 key"):
        list_objects([], none.keys, 0, None)
    assert list_objects([], none.keys, 5, "00:1:2") == ([], None)


# Settings.


def test_settings_are_parsed() -> None:
    settings = Settings.parse({"path": "/kv", "capacity": "1GiB", "codec": "zstd"})
    assert (settings.path, settings.capacity, settings.namespace) == ("/kv", "1GiB", "")
    assert settings.options() == {"codec": "zstd"}
    listed = Settings.parse({"path": ["/a/kv", "/b/kv"], "namespace": "n"})
    assert listed.directories == ("/a/kv", "/b/kv")


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, 'needs "path"'),
        ({"path": 3}, 'needs "path"'),
        ({"path": []}, r'"path" is a directory, or a list of directories.* not \[\]'),
        ({"path": ["/a", 3]}, r"/nvme1/kv\W+, not \['/a', 3\]"),
        ({"path": ["/a", ""]}, '"path" is a directory, or a list'),
        ({"path": "/kv", "size": 1}, "unknown key 'size'"),
        ({"path": "/kv", "capacity": True}, '"capacity"'),
        ({"path": "/kv", "write_budget": []}, '"write_budget"'),
        ({"path": "/kv", "eviction": 1}, '"eviction"'),
        ({"path": "/kv", "namespace": 1}, '"namespace"'),
    ],
)
def test_settings_error_says_what_to_write(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        Settings.parse(params)
    assert "\n" not in str(refused.value)


# The interface.


def adapter_base(**others: Any) -> Any:
    """Returns a stand-in for LMCache's base class that has the interface in
    `ritornello.lmcache.interface`; `others` adds or replaces members.
    """
    members: dict[str, Any] = dict.fromkeys(interface.ABSTRACT, lambda self: None)
    for name, parameters in interface.PARAMETERS.items():
        members[name] = eval(f"lambda {', '.join(('self', *parameters))}: None")
    return type("Base", (), members | {"__abstractmethods__": interface.ABSTRACT} | others)


KEY = make_dataclass("Key", interface.KEY_FIELDS)


def test_interface_with_optional_parts_is_accepted() -> None:
    assert interface_difference(adapter_base(), KEY) == ""
    assert interface_difference(adapter_base(submit_move_task=lambda self, keys: 0), KEY) == ""
    further = adapter_base(submit_unlock=lambda self, keys, reason=None: None)
    assert interface_difference(further, KEY) == ""


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        (
            (adapter_base(__abstractmethods__={*interface.ABSTRACT, "submit_move_task"}), KEY),
            "unknown abstract methods: submit_move_task",
        ),
        ((adapter_base(delete=None), KEY), "delete is missing"),
        (
            (adapter_base(submit_unlock=lambda self, keys, reason: None), KEY),
            "submit_unlock takes keys, reason",
        ),
        # A further field would be part of an object's identity, optional or not.
        (
            (adapter_base(), make_dataclass("Key", [*interface.KEY_FIELDS, ("tier", int, 0)])),
            "an object key has .*, tier",
        ),
    ],
)
def test_unknown_interface_fails_in_one_line(classes: Any, problem: str) -> None:
    with pytest.raises(ImportError, match=problem) as refused:
        INTERFACE.require(interface_difference(*classes), "0.9.9")
    assert "LMCache 0.9.9 differs" in str(refused.value)
    assert "\n" not in str(refused.value)
