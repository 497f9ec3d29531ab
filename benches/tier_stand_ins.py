"""Stand-ins for the parts of vLLM that a secondary tier uses."""

import uuid
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

CHUNK_TOKENS = 256
LAYERS = ("model.layers.0", "model.layers.1")


@dataclass
class Request:
    """The part of vLLM's `ReqContext` that tiers use."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._offload_key_positions.get(key)


def sequence(name: str, keys: int) -> tuple[Request, list[bytes]]:
    seed = np.random.default_rng(abs(hash(name)) % (1 << 32))
    made = [seed.bytes(32) + b"\0\0\0\0" for _ in range(keys)]
    ends = {key: (place + 1) * CHUNK_TOKENS for place, key in enumerate(made)}
    return Request(f"{name}-{uuid.uuid4().hex}", None, ends), made


def spec_of(settings: dict[str, Any]) -> Any:
    """Returns the part of vLLM's `OffloadingSpec` that tiers use."""
    group = SimpleNamespace(group_id=0, tokens_per_block=CHUNK_TOKENS, layer_names=LAYERS)
    config = SimpleNamespace(
        groups=(group,),
        cache=SimpleNamespace(tokens_per_hash=CHUNK_TOKENS, blocks_per_chunk=1),
        model=SimpleNamespace(name="bench", dtype="bfloat16"),
        parallel=SimpleNamespace(
            rank=0, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=False
        ),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )
    events = SimpleNamespace(enable_kv_cache_events=False)
    return SimpleNamespace(
        config=config, extra_config=settings, kv_events_config=events, blocks_per_chunk=1
    )


def engine_of(settings: dict[str, Any]) -> Any:
    """Returns the part of vLLM's configuration that `RitornelloTier` uses."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=settings),
        model_config=SimpleNamespace(
            model="bench",
            hf_config=SimpleNamespace(to_dict=lambda: {"model_type": "bench"}),
            dtype="torch.bfloat16",
            quantization=None,
            get_total_num_kv_heads=lambda: 8,
            get_head_size=lambda: 128,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="dummy"),
        attention_config=SimpleNamespace(backend=None),
        device_config=SimpleNamespace(device_type="bench"),
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size=1),
    )


class FullAttentionSpec:
    """Stand-in for a class of vLLM that `RitornelloTier` recognises by its name."""
