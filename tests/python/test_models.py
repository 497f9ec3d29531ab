"""The table of models in docs/models.md: its figures follow from the shapes, and a store serves
pages of each size, through the core, vLLM's tier and LMCache's client.
"""

import re
import select
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import blank, keys_of, page_of, pages_of
from tier_support import TierHarness, offload_keys

import ritornello as rt
from ritornello.lmcache import NativeClient

TABLE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
MIB = 1 << 20
CHUNK_TOKENS = 256
# Bytes of a bfloat16.
ITEM_BYTES = 2


class Model(NamedTuple):
    """A row of the table. `heads`: KV heads; 0 for MLA, whose latent vector every rank holds
    completely.
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    token_kib: str
    # MiB of a chunk for each of `DEGREES`.
    cells: tuple[str, ...]

    def chunk_bytes(self, degree: int) -> int:
        """Returns the bytes of one rank's chunk. With more ranks than heads, several ranks hold
        copies of one head.
        """
        if not self.heads:
            return self.layers * self.head_dim * ITEM_BYTES * CHUNK_TOKENS
        heads = max(self.heads // degree, 1)
        return 2 * self.layers * heads * self.head_dim * ITEM_BYTES * CHUNK_TOKENS


DEGREES = (1, 2, 4, 8, 16)


def models() -> list[Model]:
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in TABLE.read_text().splitlines()
        if re.match(r"\| [^|]+ \| \d+ \|", line)
    ]
    return [
        Model(name, int(layers), 0 if heads == "MLA" else int(heads), int(dim), token, tuple(cells))
        for name, layers, heads, dim, token, *cells in rows
    ]


MODELS = models()
SIZES = sorted({model.chunk_bytes(degree) for model in MODELS for degree in DEGREES})


def figure(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_figures_follow_from_shapes(model: Model) -> None:
    assert model.token_kib == figure(model.chunk_bytes(1) / CHUNK_TOKENS / 1024)
    expected = tuple(figure(model.chunk_bytes(degree) / MIB) for degree in DEGREES)
    assert model.cells == expected


def test_table_has_twelve_models_and_long_chunks() -> None:
    assert len(MODELS) == 12
    assert max(SIZES) > 64 * MIB


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> rt.Store:
    return rt.Store.open(tmp_path_factory.mktemp("models"), "6GiB")


@pytest.mark.parametrize("page_bytes", SIZES, ids=lambda size: figure(size / MIB))
def test_chunk_of_each_size_is_served(store: rt.Store, page_bytes: int) -> None:
    scope = rt.Scope.opaque("models", page_bytes)
    keys = keys_of(str(page_bytes), 2)
    pages = pages_of(keys, page_bytes)
    assert store.put_batch(scope, keys, list(pages)) == 2
    out = blank(2, page_bytes)
    assert store.get_batch(scope, keys, list(out)) == 2
    assert (out == pages).all()
    store.delete(scope, keys)


def test_tier_serves_longest_chunk(where: Path) -> None:
    row = max(SIZES)
    keys = offload_keys("a", 2)
    first = TierHarness(where, row_bytes=row, rows=4)
    assert first.save(first.begin("r", keys), keys).ok == [True] * 2
    first.tier.close()
    second = TierHarness(where, row_bytes=row, rows=4)
    request = second.begin("r", keys)
    assert second.hits(request, keys) == 2
    loaded = second.load(request, keys, first=2)
    assert (loaded.ok, loaded.reasons) == ([True] * 2, {})
    assert all(second.right(keys, first=2))
    second.tier.close()


def test_lmcache_client_serves_longest_chunk(where: Path) -> None:
    page: Any = page_of(b"object", max(SIZES))
    key = f"model@00000001@0@{bytes(32).hex()}"
    client = NativeClient(path=str(where), capacity="2GiB")

    def completed() -> list[bool] | None:
        assert select.select([client.event_fd()], [], [], 60)[0]
        ((_, ok, why, found),) = client.drain_completions()
        assert ok, why
        return found

    client.submit_batch_set([key], [memoryview(page)])
    completed()
    out: Any = np.zeros_like(page)
    client.submit_batch_get([key], [memoryview(out)])
    assert completed() == [True]
    assert (out == page).all()
    client.close()
