"""Tokens that were loaded instead of computed: noted in Python, told by `ritornello stat`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from support import open_small, wait_until

import ritornello as rt
from ritornello.errors import ClosedError, InvalidError
from servers.child import owner_of


def savings(path: Path) -> dict[str, Any]:
    words = ["stat", str(path), "--gpu-hour", "7200", "--json"]
    line = [sys.executable, "-m", "ritornello", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    return cast(dict[str, Any], json.loads(done.stdout)["savings"])


def test_time_is_estimated_from_measured_prefills(where: Path) -> None:
    with open_small(where) as store:
        store.note_prefill_avoided(0, 50, 3.0)
        for _ in range(40):
            store.record_prefill(0, 1000, 1.0)
            store.record_prefill(9000, 1000, 10.0)
        store.note_prefill_avoided(0, 1000, 0.25)
        store.note_prefill_avoided(9000, 1000, 0.25)
        # A load that failed.
        store.note_prefill_avoided(0, 0, 0.5)
        assert store.stats()["counters"]["prefill_avoided_tokens"] == 2050
        told = savings(where)
        assert (told["avoided_tokens"], told["untimed_tokens"]) == (2050, 50)
        assert (told["prefill_seconds"], told["load_seconds"]) == (pytest.approx(11, rel=0.1), 1.0)
        assert told["estimated_money"] == pytest.approx(2 * (told["prefill_seconds"] - 1.0))


def test_client_reports_what_it_loaded(where: Path) -> None:
    with owner_of(where, capacity="64MiB", segment_bytes=4 << 20), rt.Store.open(where) as store:
        assert store.role == "client"
        store.note_prefill_avoided(0, 320, 0.5)
        wait_until(lambda: savings(where)["untimed_tokens"] == 320, "the report of the client")


def test_cache_counts_savings_in_its_disk_tier(tmp_path: Path) -> None:
    tiers = [f"host 16MiB {tmp_path}/host", f"disk {tmp_path}/disk 64MiB"]
    with rt.Cache.open(tiers) as cache:
        cache.record_prefill(0, 1000, 2.0)
        cache.note_prefill_avoided(0, 500, 0.25)

        def seconds() -> tuple[float, float]:
            told = savings(tmp_path / "disk")
            return told["prefill_seconds"], told["load_seconds"]

        wait_until(lambda: seconds() == (1.0, 0.25), "the report of the cache")
        assert savings(tmp_path / "host")["avoided_tokens"] == 0


def test_malformed_times_are_refused(where: Path) -> None:
    with open_small(where) as store:
        for seconds in (-1.0, float("nan")):
            with pytest.raises(InvalidError, match="seconds"):
                store.note_prefill_avoided(0, 1, seconds)
            with pytest.raises(InvalidError, match="seconds"):
                store.record_prefill(0, 1, seconds)
        assert savings(where)["avoided_tokens"] == 0
    with pytest.raises(ClosedError):
        store.note_prefill_avoided(0, 1, 1.0)
