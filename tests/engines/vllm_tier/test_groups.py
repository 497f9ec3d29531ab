"""Kinds of KV cache for which vLLM has no kernels on CPUs, and mixtures of kinds, under vLLM's own
scheduler: a second engine finds the chunks that the first stored, of every KV cache group, in the
same store or in a remote, and continues with the same bytes.
"""

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
from group_engine import GroupEngine
from harness import BLOCK, prompt

from ritornello.vllm import data_path, kernels, offloading_path
from ritornello.vllm.tier.namespace import offloads_parts
from ritornello.vllm.weights.guard import WeightGuard
from servers.vllm import CPU_SPEC, connector, offloading

HOST_BYTES = 16 << 20


def layers_of(name: str) -> dict[str, Any]:
    """Returns the kind of each layer of a model."""
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    heads = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
    full, latent = kinds.FullAttentionSpec(**heads), heads | {"head_size": 48}
    state = {"shapes": ((4, 16),), "dtypes": (torch.float32,), "block_size": BLOCK}
    models: dict[str, tuple[Any, ...]] = {
        "latent": (kinds.MLAAttentionSpec(**latent),),
        # The keys of DeepSeek V3.2's indexer are in the group of the latent KV.
        "indexer": (
            kinds.MLAAttentionSpec(**latent),
            kinds.MLAAttentionSpec(**heads | {"head_size": 20, "dtype": torch.uint8}),
        ),
        "sinks": (kinds.SinkFullAttentionSpec(**heads, sink_len=2 * BLOCK),),
        "windows": (full, kinds.SlidingWindowSpec(**heads, sliding_window=128)),
        "latent windows": (
            kinds.MLAAttentionSpec(**latent),
            kinds.SlidingWindowMLASpec(**latent, sliding_window=128),
        ),
        "local": (full, kinds.ChunkedLocalAttentionSpec(**heads, attention_chunk_size=256)),
        "states": (full, kinds.MambaSpec(**state, page_size_padded=2048, mamba_cache_mode="align")),
    }
    return {
        f"model.layers.{2 * layer + place}.attn": spec
        for place, spec in enumerate(models[name])
        for layer in range(2)
    }


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_path, "data_path", lambda: offloading_path.OffloadingPath)
    monkeypatch.setattr(offloading_path, "SPEC", CPU_SPEC)
    monkeypatch.setattr(offloading_path, "guard_of_engine", WeightGuard)
    monkeypatch.setattr(offloading_path, "default_host_bytes", lambda *_: HOST_BYTES)


@pytest.fixture
def allow_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets vLLM build the manager of `SinkFullAttentionSpec`. In 0.32 and 0.33 the manager lacks a
    parameter that vLLM passes, so no engine with this kind starts.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager as Full
    from vllm.v1.core.single_type_kv_cache_manager import SinkFullAttentionManager as Sinks

    missing = "needs_kv_cache_zeroing"
    assert missing in inspect.signature(Full.__init__).parameters
    assert missing not in inspect.signature(Sinks.__init__).parameters, (
        "vLLM's manager now has the parameter: remove the fixture `allow_sinks`"
    )
    monkeypatch.setattr(Sinks, "__init__", Full.__init__)


ASKED = prompt(51, 600)
# The kinds of the groups, and how many tokens of `ASKED` the second engine loads. A chunk has 256
# tokens, or one block if a group has a state, which exists at the end of the last whole block only,
# or a window, of which vLLM 0.32 may offload a part of a chunk.
MODELS = {
    "latent": ({"MLAAttentionSpec"}, 512),
    "indexer": ({"UniformTypeKVCacheSpecs"}, 512),
    "sinks": ({"SinkFullAttentionSpec"}, 512),
    "windows": ({"FullAttentionSpec", "SlidingWindowSpec"}, 576),
    "latent windows": ({"MLAAttentionSpec", "SlidingWindowMLASpec"}, 576),
    "local": ({"FullAttentionSpec", "ChunkedLocalAttentionSpec"}, 576),
    "states": ({"FullAttentionSpec", "MambaSpec"}, 576),
}


def settings(folder: Path, place: str, engine: str) -> dict[str, Any]:
    """Returns the connector's settings of `engine`. If `place` is "path", all engines use the same
    store; otherwise each engine has a separate disk, and all use the same remote.
    """
    if place == "path":
        return {"path": str(folder / "store"), "capacity": "1GiB"}
    remote = folder / "remote"
    remote.mkdir(exist_ok=True)
    tiers = [f"host {HOST_BYTES}", f"disk {folder / engine} 64MiB", f"file://{remote}"]
    return {"tiers": tiers, "prefetch": "wait_complete", "gate": "always"}


@pytest.mark.usefixtures("allow_sinks")
@pytest.mark.parametrize("place", ["path", "remote"])
@pytest.mark.parametrize("name", MODELS)
def test_second_engine_continues_with_the_bytes_of_the_first(
    model: Path, tmp_path: Path, name: str, place: str
) -> None:
    cache = {"mamba_cache_mode": "align"} if name == "states" else {}
    kinds, tokens = MODELS[name]
    loaded = []
    for one, asked in (("first", ASKED), ("second", ASKED + prompt(52, 90))):
        extra = settings(tmp_path, place, one)
        engine = GroupEngine(model, connector(**extra), layers_of(name), **cache)
        assert set(engine.kinds) == kinds
        loaded.append(engine.answer(asked))
        engine.stop()
    assert loaded == [0, tokens]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", ["windows", "local"])
def test_windows_in_chunks_of_several_blocks_are_not_served_before_fix(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, blocks: int
) -> None:
    """The user lists our tier in vLLM's own configuration of offloading, and chooses the chunk."""
    served = blocks == 1 or not offloads_parts(kernels.version())
    transfer = offloading(HOST_BYTES, blocks, {"path": str(tmp_path / "store")})
    loaded = []
    with caplog.at_level(logging.WARNING, "vllm.ritornello"):
        for asked in (ASKED, ASKED + prompt(52, 90)):
            engine = GroupEngine(model, transfer, layers_of(name))
            assert (engine.tier is not None) == served
            loaded.append(engine.answer(asked))
            engine.stop()
    assert loaded == [0, 576 if served else 0]
    said = [line for line in caplog.messages if "without the blocks that a window has left" in line]
    assert len(said) == (0 if served else 2)
    assert all("pages are neither loaded nor stored" in line for line in said)
