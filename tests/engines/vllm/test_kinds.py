"""The table of kinds of KV cache in docs/models.md names every kind of every supported vLLM."""

import ast

import pytest
from released import sources_of

from ritornello.vllm.interface import TESTED
from ritornello.vllm.support import OFFLOADED, SERVED
from servers.environment import ROOT

KINDS = "vllm/v1/kv_cache_interface.py"
# Base classes, which no group has.
BASES = {"KVCacheSpec", "AttentionSpec"}
# Not kinds of KV cache: a group of layers, and members of an enumeration.
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


def test_kinds_of_refusals_exist(kinds: set[str]) -> None:
    assert {*SERVED, *OFFLOADED} <= kinds


def test_offloading_knows_kinds_that_refusals_send_to_it() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.v1 import kv_cache_interface

    def bare(name: str, **fields: int) -> object:
        """Returns a kind with these fields only: the others do not matter here."""
        kind = getattr(kv_cache_interface, name)
        made = object.__new__(kind)
        vars(made).update(fields)
        return made

    window = {"sliding_window": 64, "extra_retained_tokens": 0, "attention_chunk_size": 64}
    # The scheduler's side has one layer's kind in place of `UniformTypeKVCacheSpecs`.
    for name in {*SERVED, *OFFLOADED} - {"UniformTypeKVCacheSpecs"}:
        chunks = scheduler.get_sliding_window_size_in_chunks(bare(name, **window), 32)
        assert chunks == {"MambaSpec": 1}.get(name, None if "Full" in name or "MLAA" in name else 2)
    with pytest.raises(AssertionError):
        scheduler.get_sliding_window_size_in_chunks(bare("CrossAttentionSpec"), 32)
