"""The scopes of SGLang's pages: which differences between engines or pools make another scope."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from ritornello import Scope
from ritornello.connector.identity import ModelIdentity
from ritornello.sglang.identity import (
    Engine,
    PoolLayout,
    heads_of,
    is_replicated,
    keys_of,
    scopes_of,
    split_factor,
)

MODEL = ModelIdentity("llama:0", b"weights", hash_algorithm="sglang-sha256")
ENGINE = Engine("0.5.23", MODEL, 8, (0, 1), (0, 1), (0, 1), False)
SHAPE = PoolLayout(
    "kv", "MHATokenToKVPoolHost", "page_first", "bfloat16", 16, (0, 4), 8, 64, (("layer_num", "4"),)
)
BYTES = 4 * 8 * 64 * 16 * 2 * 2


class Host:
    """Stand-in for a host pool of SGLang that has only attributes."""

    layout, dtype, page_size = "page_head", "torch.bfloat16", 16
    start_layer, end_layer, layer_num, head_num, head_dim, v_head_dim = 4, 8, 4, 8, 64, 64

    def __init__(self, **others: Any) -> None:
        vars(self).update(others)


def scope(engine: Engine = ENGINE, shape: PoolLayout = SHAPE, page_bytes: int = BYTES) -> Scope:
    return scopes_of(engine, shape, page_bytes)[0]


def of_rank(rank: int, size: int, **others: Any) -> Scope:
    return scope(
        replace(ENGINE, tp=(rank, size)), replace(SHAPE, heads=max(8 // size, 1), **others)
    )


@pytest.mark.parametrize(
    ("total", "tp", "local", "heads"),
    [
        (8, (0, 1), 8, (0, 8)),
        (8, (1, 2), 4, (4, 8)),
        (2, (3, 4), 1, (1, 2)),
        (2, (1, 4), 1, (0, 1)),
        (0, (0, 1), 8, None),
        (8, (0, 2), 8, None),
        (6, (1, 4), 2, None),
        (8, (0, 1), 0, None),
    ],
)
def test_rank_holds_its_share_of_heads(
    total: int, tp: tuple[int, int], local: int, heads: tuple[int, int] | None
) -> None:
    assert heads_of(total, tp, local) == heads


def test_pool_layout_is_read_from_attributes() -> None:
    shape = PoolLayout.of("kv", Host())
    assert (shape.kind, shape.layout, shape.dtype) == ("Host", "page_head", "bfloat16")
    assert (shape.layers, shape.heads, shape.head_dim) == ((4, 8), 8, 64)
    assert ("v_head_dim", "64") in shape.details


@pytest.mark.parametrize(
    "others",
    [
        {"layout": "page_first_direct"},
        {"dtype": "float16"},
        {"page_tokens": 32},
        {"layers": (4, 8)},
        {"head_dim": 128},
        {"kind": "HiSparseMHATokenToKVPoolHost"},
        {"pool": "draft"},
        {"details": (("layer_num", "5"),)},
    ],
)
def test_other_layout_makes_other_scope(others: dict[str, Any]) -> None:
    assert scope().id == scope().id
    assert scope(shape=replace(SHAPE, **others)).id != scope().id


@pytest.mark.parametrize(
    "others",
    [
        {"version": "0.5.24"},
        {"model": replace(MODEL, name="llama:1")},
        {"model": replace(MODEL, weights=b"other")},
        {"model": replace(MODEL, epoch=b"1" * 16)},
        {"cp": (0, 2)},
        {"model": replace(MODEL, options=(("quantization", "fp8"),))},
    ],
)
def test_other_engine_makes_other_scope(others: dict[str, Any]) -> None:
    assert scope(replace(ENGINE, **others)).id != scope().id


def test_stored_pages_keep_their_scopes() -> None:
    """If the id of this scope changes, pages that earlier versions stored are not found."""
    assert of_rank(1, 2).id.hex() == "0d1c6fc2ed6af672a61c9b2cff73e304"


def test_other_page_size_makes_other_scope() -> None:
    assert scope(page_bytes=BYTES // 2).id != scope().id


def test_extra_fields_of_scope_omit_layout_and_page_size() -> None:
    described = scope().describe()
    assert not {"layout", "page_bytes"} & set(described["extra"])
    assert described["layout"].startswith("sglang-")


def test_scopes_name_heads_of_rank() -> None:
    assert len({of_rank(rank, 2).id for rank in range(2)} | {scope().id}) == 3
    assert of_rank(1, 2).describe()["kv_heads"] == (4, 8)
    assert "tp" not in of_rank(1, 2).describe()["extra"]
    assert of_rank(2, 16).id == of_rank(3, 16).id != of_rank(4, 16).id


def test_scopes_name_rank_if_heads_are_unknown() -> None:
    unknown = replace(ENGINE, kv_heads=0, tp=(1, 2))
    assert scope(unknown).describe()["extra"]["tp"] == "1/2"
    window = replace(SHAPE, pool="swa", heads=4)
    assert scope(replace(ENGINE, tp=(1, 2)), window).describe()["extra"]["tp"] == "1/2"


def test_pipeline_stages_have_separate_scopes() -> None:
    second = replace(ENGINE, pp=(1, 2))
    assert "pp" not in scope(second, replace(SHAPE, layers=(4, 8))).describe()["extra"]
    # The scopes of the next two pools name the pipeline stage, because the pools' layer numbers do
    # not determine it: the first pool begins at layer 0 although its stage is 1, and a side pool
    # counts only its own layers.
    assert scope(second).describe()["extra"]["pp"] == "1/2"
    state = replace(SHAPE, pool="mamba", layers=(4, 8))
    assert scope(second, state).describe()["extra"]["pp"] == "1/2"


def test_replicated_pools_share_one_scope() -> None:
    mla = replace(SHAPE, kind="MLATokenToKVPoolHost", heads=0, head_dim=576)
    engines = [replace(ENGINE, replicated=True, tp=(rank, 4)) for rank in range(4)]
    assert len({scope(engine, mla).id for engine in engines}) == 1
    state = replace(mla, pool="mamba")
    assert len({scope(engine, state).id for engine in engines}) == 4
    heads = replace(SHAPE, pool="draft", heads=2)
    assert not is_replicated(engines[0], heads)
    assert len({scope(engine, heads).id for engine in engines}) == 4


def test_heads_are_split_if_divisible() -> None:
    assert split_factor(ENGINE, SHAPE, 4) == 4
    assert (
        split_factor(ENGINE, SHAPE, 3) == split_factor(replace(ENGINE, kv_heads=0), SHAPE, 2) == 1
    )
    assert split_factor(ENGINE, replace(SHAPE, pool="swa"), 2) == 1
    parts = scopes_of(ENGINE, SHAPE, BYTES // 2, split=2)
    assert [part.id for part in parts] == [
        scopes_of(replace(ENGINE, tp=(rank, 2)), replace(SHAPE, heads=4), BYTES // 2)[0].id
        for rank in range(2)
    ]


def test_copied_pages_have_own_scope_if_byte_order_differs() -> None:
    layers = replace(SHAPE, layout="layer_first")
    copied = [scopes_of(ENGINE, shape, BYTES, copied=True)[0].id for shape in (SHAPE, layers)]
    assert copied[0] == scope().id
    assert copied[1] != scope(shape=layers).id


def test_side_pool_scopes_do_not_chain() -> None:
    assert scope().chained
    assert not scope(shape=replace(SHAPE, pool="mamba")).chained


def test_keys_are_decoded_hex_digests() -> None:
    digest = hashlib.sha256(b"tokens").digest()
    assert keys_of([]) == []
    assert keys_of([digest.hex(), digest[::-1].hex()]) == [digest, digest[::-1]]
    odd = ("", "page", "z" * 64, digest.hex() + ".mamba", " " * 64, "é" * 64)
    keys = keys_of([digest.hex(), *odd])
    assert keys == [digest, *(keys_of([name])[0] for name in odd)]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    # The two names together are as long as two hex digests, but neither name is a digest.
    assert len(keys_of([digest.hex()[1:], digest.hex() + "0"])) == 2
