"""LMCache's storage manager in two processes, one after the other: the second process finds the
pages that the first stored, whether the first closed its manager or was killed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import AdapterKind

from servers.environment import ROOT

DRIVER = Path(__file__).with_name("driver.py")
OBJECT = 2 * 4 * 256 * 64 * 2


def driver(adapter_kind: AdapterKind, *arguments: str, **further: Any) -> dict[str, Any]:
    command = [sys.executable, DRIVER, adapter_kind.json(**further), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines and done.returncode in (0, -9), done.stdout + done.stderr
    said: dict[str, Any] = json.loads(lines[-1])
    return said


@pytest.mark.parametrize("end", ["close", "kill"])
def test_restarted_manager_hits(adapter_kind: AdapterKind, end: str) -> None:
    put = driver(adapter_kind, "put", "12", *(["kill"] if end == "kill" else []))
    assert put == {"written": 12, "used": 12 * OBJECT}
    got = driver(adapter_kind, "get", "16")
    assert (got["hits"], got["wrong"]) == (12, 0)


def test_serialized_objects_are_hit(plugin: AdapterKind) -> None:
    serde = {"type": "fp8"}
    assert driver(plugin, "put", "4", serde=serde)["written"] == 4
    got = driver(plugin, "get", "4", serde=serde)
    assert got["hits"] == 4
    plain = driver(plugin, "get", "4")
    assert plain["hits"] == 0, "a storage manager without a serde must not find serialized objects"
