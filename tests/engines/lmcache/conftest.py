"""Fixtures: LMCache's two kinds of adapters of its second tier (L2), each with a separate store,
and memory for objects.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(
    LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="WARNING", LMCACHE_TRACK_USAGE="false"
)
# Makes the helpers in this file's directory, the servers, and the unit tests' helpers importable.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "sources"), str(HERE.parents[2])]
sys.path.append(str(HERE.parents[1] / "python"))

from harness import AdapterKind, Memory  # noqa: E402


@pytest.fixture(params=["plugin", "native_plugin"])
def adapter_kind(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterKind:
    return AdapterKind(request.param, tmp_path / "store")


@pytest.fixture
def plugin(tmp_path: Path) -> AdapterKind:
    return AdapterKind("plugin", tmp_path / "store")


@pytest.fixture
def memory() -> Iterator[Memory]:
    yield Memory(64 << 20)
