"""The table of kinds of KV cache in docs/models.md, and the kinds that the connector serves or
leaves to vLLM's offloading, agree with the kinds of KV cache in each tested version of vLLM.
For the installed version, our tier below vLLM's offloading (`ritornello.vllm.tier`) looks up the
chunks that vLLM needs, and gives different specs different scopes.
"""

import ast
from typing import Any

import pytest
from released import sources_of

from ritornello.vllm.interface import TESTED
from ritornello.vllm.support import OFFLOADED, SERVED
from ritornello.vllm.tier.namespace import is_unbounded, spec_text, window_chunks
from servers.environment import ROOT

KINDS = "vllm/v1/kv_cache_interface.py"
# Base classes: no KV cache group has one of them as its kind.
BASES = {"KVCacheSpec", "AttentionSpec"}
# Not a kind of KV cache: this class describes a group of layers.
OTHERS = {"KVCacheGroupSpec"}


@pytest.fixture(params=TESTED, ids="vllm-{}".format)
def kinds(request: pytest.FixtureRequest) -> set[str]:
    sources = sources_of("vllm", request.param)
    classes = [
        node.name
        for node in ast.parse((sources / KINDS).read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    return {name for name in classes if name.endswith(("Spec", "Specs"))} - BASES - OTHERS


def test_table_names_every_kind(kinds: set[str]) -> None:
    text = (ROOT / "docs/models.md").read_text()
    assert len(kinds) >= 15
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in text] == []


def test_served_and_offloaded_kinds_exist(kinds: set[str]) -> None:
    assert {*SERVED, *OFFLOADED} <= kinds


def test_offloading_accepts_served_and_offloaded_kinds() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.v1 import kv_cache_interface

    def bare(name: str, **fields: int) -> object:
        """Returns an object of the kind `name` that has only the given fields: the fields that
        `get_sliding_window_size_in_chunks` reads.
        """
        kind = getattr(kv_cache_interface, name)
        made = object.__new__(kind)
        vars(made).update(fields)
        return made

    window = {"sliding_window": 64, "extra_retained_tokens": 0, "attention_chunk_size": 64}
    # `UniformTypeKVCacheSpecs` is left out: for such a group vLLM gives the scheduler's side the
    # kind of one of its layers.
    for name in {*SERVED, *OFFLOADED} - {"UniformTypeKVCacheSpecs"}:
        chunks = scheduler.get_sliding_window_size_in_chunks(bare(name, **window), 32)
        assert chunks == {"MambaSpec": 1}.get(name, None if "Full" in name or "MLAA" in name else 2)
    with pytest.raises(AssertionError):
        scheduler.get_sliding_window_size_in_chunks(bare("CrossAttentionSpec"), 32)


def specs() -> dict[str, Any]:
    """Returns specs of vLLM's own classes, at least one of each kind that vLLM offloads, except
    `UniformTypeKVCacheSpecs`.
    """
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    heads = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    latent = heads | {"num_kv_heads": 1, "head_size": 576}
    return {
        "full": kinds.FullAttentionSpec(**heads),
        # The specs of layers with a window, and with local attention, if vLLM's hybrid cache
        # manager is off.
        "full, window": kinds.FullAttentionSpec(**heads, sliding_window=128),
        "full, local": kinds.FullAttentionSpec(**heads, attention_chunk_size=128),
        "latent": kinds.MLAAttentionSpec(**latent),
        "sinks": kinds.SinkFullAttentionSpec(**heads, sink_len=128),
        "window": kinds.SlidingWindowSpec(**heads, sliding_window=128),
        "odd window": kinds.SlidingWindowSpec(**heads, sliding_window=129),
        "window, MTP": kinds.SlidingWindowSpec(
            **heads, sliding_window=128, extra_retained_tokens=3
        ),
        "latent window": kinds.SlidingWindowMLASpec(**latent, sliding_window=128),
        "local": kinds.ChunkedLocalAttentionSpec(**heads, attention_chunk_size=8192),
        "state": kinds.MambaSpec(block_size=16, shapes=((2, 64),), dtypes=(torch.float32,)),
    }


def test_tier_looks_up_the_chunks_that_vllm_needs() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    for name, spec in specs().items():
        for chunk_tokens in (16, 32, 64, 128, 256, 1024, 16384):
            needed = scheduler.get_sliding_window_size_in_chunks(spec, chunk_tokens)
            assert is_unbounded(spec) == (needed is None), name
            if needed is not None:
                assert window_chunks(spec, chunk_tokens) == needed, (name, chunk_tokens)


def test_scopes_distinguish_specs() -> None:
    made = specs()
    assert {type(spec).__name__ for spec in made.values()} == {*SERVED, *OFFLOADED} - {
        "UniformTypeKVCacheSpecs"
    }
    assert len({spec_text(spec, rank_free=True) for spec in made.values()}) == len(made)
