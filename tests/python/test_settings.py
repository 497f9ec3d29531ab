"""Settings of a scope (codec, quota, retention), retention by puts, and a store's write budget."""

import math
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support import keys_of, open_small, pages_of

import ritornello as rt
from ritornello.errors import ClosedError, InvalidError

PAGE = 64 << 10
SCOPE = rt.Scope.opaque("tenant", PAGE, chained=True)


def put(store: rt.Store, name: str, pages: int = 8, **terms: Any) -> int:
    keys = keys_of(name, pages)
    return store.put_batch(SCOPE, keys, pages_of(keys, PAGE), **terms)


def usage(store: rt.Store) -> dict[str, Any]:
    (scope,) = store.stats()["largest_scopes"]
    assert isinstance(scope, dict)
    return scope


def test_quota_holds_and_survives_restart(where: Path) -> None:
    with open_small(where) as store:
        store.configure(SCOPE, quota="2MiB", retained=1 << 20)
        for name in range(10):
            assert put(store, f"{name}") == 8
        shown = usage(store)
        assert shown["id"] == SCOPE.id.hex()
        assert shown["model"] == "tenant"
        assert 1 << 20 < shown["bytes"] <= shown["quota_bytes"] == 2 << 20
        assert shown["retained_bytes_max"] == 1 << 20
    with open_small(where) as store:
        assert usage(store)["quota_bytes"] == 2 << 20
        store.configure(SCOPE)
        assert usage(store)["quota_bytes"] is None


CLIENT = """
import sys, ritornello as rt
with rt.Store.open(sys.argv[1]) as store:
    assert store.role == "client"
    store.configure(rt.Scope.opaque("tenant", 64 << 10, chained=True), quota=0)
"""


def test_client_may_configure_scope(where: Path) -> None:
    with open_small(where) as owner:
        put(owner, "a")
        subprocess.run([sys.executable, "-c", CLIENT, str(where)], check=True, timeout=60)
        assert usage(owner)["quota_bytes"] == 0
        assert usage(owner)["bytes"] == 0


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"codec": "gzip"}, "raw, split"),
        ({"codec": "int8"}, "dtype"),
        ({"quota": "2G"}, "2GiB"),
        ({"quota": -1}, "quota is -1"),
        ({"retained": [1]}, r"retained is \[1\]"),
        ({"quota": 1, "retained": 2}, "retain"),
    ],
)
def test_invalid_settings_are_rejected(where: Path, settings: dict[str, Any], advice: str) -> None:
    with open_small(where) as store, pytest.raises(InvalidError, match=advice):
        store.configure(SCOPE, **settings)


@pytest.mark.parametrize(
    "moment",
    [
        time.time() + 3600,
        int(time.time()) + 3600,
        datetime.now() + timedelta(hours=1),
        datetime.now(UTC) + timedelta(hours=1),
        math.inf,
    ],
)
def test_retained_pages_are_not_evicted(where: Path, moment: Any) -> None:
    with open_small(where) as store:
        assert put(store, "kept", retain_until=moment) == 8
        keys = keys_of("kept too", 8)
        ticket = store.submit_put(SCOPE, keys, pages_of(keys, PAGE), copy=True, retain_until=moment)
        outcome = ticket.wait(30)
        assert outcome is not None
        assert outcome.pages == 8
        put(store, "ordinary")
        assert store.stats()["retained_bytes"] >= 16 * PAGE
        for name in range(200):
            assert put(store, f"{name}") == 8
        there = [store.probe(SCOPE, keys_of(name, 8)) for name in ("kept", "kept too", "ordinary")]
        assert there == [8, 8, 0]


@pytest.mark.parametrize("copy", [False, True])
def test_put_retains_stored_pages(where: Path, copy: bool) -> None:
    with open_small(where) as store:
        assert put(store, "a") == 8
        keys = keys_of("a", 8)
        ticket = store.submit_put(
            SCOPE, keys, pages_of(keys, PAGE), copy=copy, retain_until=time.time() + 3600
        )
        assert ticket.wait(30) is not None
        assert store.stats()["retained_bytes"] >= 8 * PAGE


@pytest.mark.parametrize("moment", [0, -5, time.time() - 1, datetime(1999, 1, 1), -math.inf])
def test_past_moment_retains_nothing(where: Path, moment: Any) -> None:
    with open_small(where) as store:
        assert put(store, "a", retain_until=moment) == 8
        assert store.stats()["retained_bytes"] == 0


@pytest.mark.parametrize("moment", ["tomorrow", math.nan, timedelta(hours=1), []])
def test_invalid_moments_are_rejected(where: Path, moment: Any) -> None:
    with open_small(where) as store, pytest.raises(InvalidError, match="datetime"):
        put(store, "a", retain_until=moment)


def test_write_budget_refuses_with_reason(where: Path) -> None:
    with open_small(where) as store:
        put(store, "there")
    with open_small(where, write_budget=0) as store:
        keys = keys_of("new", 8)
        outcome = store.submit_put(SCOPE, keys, pages_of(keys, PAGE)).wait(30)
        assert outcome is not None
        assert (outcome.pages, outcome.reason) == (0, "write_budget")
        assert put(store, "there") == 8
        stats = store.stats()
        assert stats["admission"]["budget_bytes_per_day"] == 0
        assert stats["counters"]["refused_write_budget"] == 8
    with open_small(where, admission="second_sight", write_budget="1TB/day") as store:
        assert [put(store, "new"), put(store, "new")] == [0, 8]


def test_probes_do_not_delay_close(where: Path) -> None:
    """Four threads probe until the store is closed. Neither `close` nor a thread may hang."""
    for _ in range(5):
        store = open_small(where)
        put(store, "a")
        keys = keys_of("a", 8)
        ended: list[str] = []

        def probe(store: rt.Store, keys: list[bytes], ended: list[str]) -> None:
            try:
                while True:
                    assert store.probe(SCOPE, keys) == 8
                    assert store.role in ("owner", "client")
            except ClosedError:
                ended.append("closed")

        threads = [threading.Thread(target=probe, args=(store, keys, ended)) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        store.close()
        for thread in threads:
            thread.join(60)
        assert ended == ["closed"] * 4
