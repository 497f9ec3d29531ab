"""The table of models in docs/models.md: its figures follow from the models' shapes. A store serves
chunks of each size through `ritornello.Store` and through our native client for LMCache, and rows
of vLLM's host tier of each size through our secondary tier of vLLM's offloading.
"""

import re
import select
from collections.abc import Iterator
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
# Bytes of one element of the KV cache, a bfloat16.
ITEM_BYTES = 2


class Model(NamedTuple):
    """A row of the table. `heads`: the number of KV heads; 0 for MLA, of which every rank holds the
    complete latent vector.
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    token_kib: str
    # The size in MiB of one rank's chunk for each number of ranks in `DEGREES`, and of a row of
    # vLLM's host tier for the last of these numbers.
    cells: tuple[str, ...]

    def chunk_bytes(self, degree: int) -> int:
        """Returns the bytes of one rank's chunk with `degree` ranks. With more ranks than heads,
        several ranks hold copies of one head.
        """
        if not self.heads:
            return self.layers * self.head_dim * ITEM_BYTES * CHUNK_TOKENS
        heads = max(self.heads // degree, 1)
        return 2 * self.layers * heads * self.head_dim * ITEM_BYTES * CHUNK_TOKENS

    def row_bytes(self, degree: int) -> int:
        """Returns the bytes of a row of vLLM's host tier, which has the chunks of all ranks, or
        with MLA one chunk.
        """
        return self.chunk_bytes(degree) * (degree if self.heads else 1)


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
ROWS = sorted({model.row_bytes(degree) for model in MODELS for degree in DEGREES})
# The bytes of each row and of each LMCache object are this pattern, repeated or cut off to the
# length of the row or object.
PATTERN = page_of(b"pattern", MIB + 1)


def figure(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def mib(size: int) -> str:
    return figure(size / MIB)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_documented_sizes_follow_from_model_shapes(model: Model) -> None:
    assert model.token_kib == figure(model.chunk_bytes(1) / CHUNK_TOKENS / 1024)
    chunks = tuple(mib(model.chunk_bytes(degree)) for degree in DEGREES)
    assert model.cells == (*chunks, mib(model.row_bytes(DEGREES[-1])))


def test_table_has_twelve_models_and_long_chunks() -> None:
    assert len(MODELS) == 12
    assert max(SIZES) > 64 * MIB
    # The longest row is of a model with 8 KV heads on 16 ranks, so it has each head twice. The
    # longest chunk is of the same model on one rank, so it has each head once.
    assert max(ROWS) == 2 * max(SIZES)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> rt.Store:
    return rt.Store.open(tmp_path_factory.mktemp("models"), "6GiB")


@pytest.mark.parametrize("page_bytes", SIZES, ids=mib)
def test_chunk_of_each_size_is_served(store: rt.Store, page_bytes: int) -> None:
    scope = rt.Scope.opaque("models", page_bytes)
    keys = keys_of(str(page_bytes), 2)
    pages = pages_of(keys, page_bytes)
    assert store.put_batch(scope, keys, list(pages)) == 2
    out = blank(2, page_bytes)
    assert store.get_batch(scope, keys, list(out)) == 2
    assert (out == pages).all()
    store.delete(scope, keys)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a store in which the rows of all sizes are stored, one after another."""
    return tmp_path_factory.mktemp("rows")


@pytest.mark.parametrize("row_bytes", ROWS, ids=mib)
def test_tier_serves_row_of_each_size(kept: Path, row_bytes: int) -> None:
    keys = offload_keys("a", 1)
    first = TierHarness(kept, row_bytes=row_bytes, rows=1)
    first.host[0] = np.resize(PATTERN, row_bytes)
    first.tier.save(first._transfer(first.begin("r", keys), keys, range(1)))
    assert first.ended().ok == [True]
    first.tier.close()
    second = TierHarness(kept, row_bytes=row_bytes, rows=1)
    request = second.begin("r", keys)
    assert second.hits(request, keys) == 1
    loaded = second.load(request, keys, first=0)
    assert (loaded.ok, loaded.reasons) == ([True], {})
    assert (second.host == first.host).all()
    (_, scope) = second.tier._scopes[0]
    second.store.call("delete", lambda store: store.delete(scope, keys), 0)
    second.tier.close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeClient]:
    opened = NativeClient(path=str(tmp_path_factory.mktemp("objects")), capacity="2GiB")
    yield opened
    opened.close()


@pytest.mark.parametrize("nbytes", SIZES, ids=mib)
def test_lmcache_client_serves_object_of_each_size(client: NativeClient, nbytes: int) -> None:
    key = f"model@00000001@0@{nbytes.to_bytes(32).hex()}"
    page: Any = np.resize(PATTERN, nbytes)
    out: Any = np.zeros_like(page)

    def completed() -> list[bool] | None:
        assert select.select([client.event_fd()], [], [], 60)[0]
        ((_, ok, why, found),) = client.drain_completions()
        assert ok, why
        return found

    client.submit_batch_set([key], [memoryview(page)])
    completed()
    client.submit_batch_get([key], [memoryview(out)])
    assert completed() == [True]
    assert (out == page).all()
    client.submit_batch_delete([key])
    assert completed() == [True]
