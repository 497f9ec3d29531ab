"""A small store per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import open_small

import ritornello as rt


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A directory that does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def store(where: Path) -> Iterator[rt.Store]:
    with open_small(where) as opened:
        yield opened
