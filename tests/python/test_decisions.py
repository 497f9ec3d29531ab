"""Decisions about the pages of requests: recorded in Python, shown by `ritornello explain`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from support import keys_of, open_small, pages_of, wait_until

import ritornello as rt
from ritornello.errors import ClosedError, InvalidError
from servers.child import owner_of

PAGE = 8192
SCOPE = rt.Scope.opaque("decisions", PAGE, chained=True)
KEYS = keys_of("prompt", 6)


def explain(path: Path, request: str) -> dict[str, Any]:
    words = ["explain", str(path), "--request", request, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "ritornello", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return cast(dict[str, Any], json.loads(done.stdout))


def test_request_is_explained_by_its_id(where: Path) -> None:
    with open_small(where) as store:
        assert store.put_batch(SCOPE, KEYS[:4], pages_of(KEYS[:4], PAGE)) == 4
        store.note_decision("cmpl-1-0-5d41402a", SCOPE, KEYS, "loaded", found=4, loaded=3)
        store.note_decision(
            "cmpl-1-0-5d41402a",
            SCOPE,
            KEYS,
            "declined",
            found=4,
            detail="slow",
            estimate=(0.5, 0.25),
        )
        store.note_decision("cmpl-2", SCOPE, KEYS, "missed")
        assert store.stats()["counters"]["decisions_loaded"] == 1
        (request,) = explain(where, "cmpl-1")["requests"]
        newest, oldest = request["decisions"]
        assert (newest["outcome"], newest["detail"], newest["pages"]) == ("declined", "slow", 6)
        assert (newest["seconds_with_load"], newest["seconds_without_load"]) == (0.5, 0.25)
        assert (oldest["outcome"], oldest["found"], oldest["loaded"]) == ("loaded", 4, 3)
        assert request["scope"] == SCOPE.id.hex()
        spans = request["explanation"]["spans"]
        assert [(one["answer"], one["pages"]) for one in spans] == [("hit", 4), ("unknown", 2)]


def test_client_reports_its_decisions(where: Path) -> None:
    with owner_of(where, capacity="64MiB", segment_bytes=4 << 20), rt.Store.open(where) as store:
        assert store.role == "client"
        store.note_decision("r", SCOPE, KEYS, "missed")

        def reported() -> int:
            return int(store.stats()["counters"]["decisions_missed"])

        wait_until(lambda: reported() == 1, "the report of the client")


def test_decisions_beyond_the_buffer_are_counted(where: Path) -> None:
    with open_small(where) as store:
        for number in range(2000):
            store.note_decision(f"r-{number}", SCOPE, KEYS, "missed")
        counters = store.stats()["counters"]
        assert counters["decisions_missed"] + counters["dropped_decisions"] == 2000
        assert counters["decisions_missed"] >= 256


def test_cache_records_decisions_in_its_disk_tier(tmp_path: Path) -> None:
    tiers = [f"host 16MiB {tmp_path}/host", f"disk {tmp_path}/disk 64MiB"]
    with rt.Cache.open(tiers) as cache:
        cache.note_decision("r", SCOPE, KEYS, "too_short", detail="why")
        wait_until(lambda: explain(tmp_path / "disk", "r")["requests"], "the report of the cache")
        assert explain(tmp_path / "host", "r")["requests"] == []


def test_malformed_decisions_are_refused(where: Path) -> None:
    with open_small(where) as store:
        refused = cast(Any, store.note_decision)
        with pytest.raises(InvalidError, match="not_cacheable"):
            refused("r", SCOPE, KEYS, "elsewhere")
        with pytest.raises(InvalidError, match="8 to 64 bytes"):
            refused("r", SCOPE, [b"short"], "missed")
        with pytest.raises(InvalidError, match="estimate"):
            refused("r", SCOPE, KEYS, "declined", estimate=(-1.0, 0.0))
    with pytest.raises(ClosedError):
        store.note_decision("r", SCOPE, KEYS, "missed")
