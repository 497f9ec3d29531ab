"""Everything besides tokens that decides whether a page's bytes may be reused.

The scheduler's side assembles this identity once and sends it to the workers, so that all processes
use the same identity. vLLM's block hashes cover tokens, LoRA adapters, images and cache salts.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any

from ritornello.connector.identity import ModelIdentity, dtype_name, new_epoch
from ritornello.vllm.cache_groups import ALL, CacheGroup, ObjectId, Reach, head_ranges_of, trailing
from ritornello.vllm.handshake import GroupLayout
from ritornello.vllm.model import model_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ritornello._core import Scope

# Fields of vLLM's group description that depend on the number of workers.
SHARDED = frozenset({"num_kv_heads", "num_head_slots", "max_tp_shards", "dcp_sharded"})


@dataclass(frozen=True, slots=True)
class Identity:
    """The model, and its KV cache groups; can be pickled. `hash_tokens`: tokens between two
    consecutive block hashes of a request. `alignment`: a prefix is resumed at multiples of this
    number of tokens. `ranks`: the number of tensor-parallel workers of a stage.
    """

    model: ModelIdentity
    hash_tokens: int
    alignment: int
    groups: tuple[CacheGroup, ...]
    ranks: int = 1

    def with_new_epoch(self) -> "Identity":
        """Returns a copy under which no page stored before is found."""
        return replace(self, model=self.model.at(new_epoch()))

    def scope(self, object_id: ObjectId) -> "Scope":
        """Returns the scope of an object. The scope names layers and heads, not workers, so that
        every worker with the same layers and heads uses the same pages.
        """
        group = self.groups[object_id.group]
        layers = group.stages[object_id.stage]
        numbers = [_number(name) for name in layers]
        digest = hashlib.sha256("\n".join(layers).encode()).hexdigest()[:32]
        return self.model.scope(
            group.dtype,
            group.page_tokens,
            layers=(min(numbers), max(numbers) + 1),
            kv_heads=group.head_ranges[object_id.head_range],
            head_dim=group.head_dim,
            layout=group.layout,
            part=object_id.group,
            options={"kv_spec": group.spec, "layer_names": digest},
            # Pages of a window are useful without the pages before the window.
            chained=group.reach.tokens is None,
            page_bytes=group.object_bytes(object_id.stage, object_id.head_range),
        )


def _number(layer: str) -> int:
    """Returns the last number in a layer's name: its index in the model; 0 without a number."""
    found = re.findall(r"\d+", layer)
    return int(found[-1]) if found else 0


def identity_of(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    group_layouts: Sequence[GroupLayout],
    layout: Callable[[Any], str],
) -> Identity:
    """Returns the identity of this engine, which `support.unsupported_reason` accepted.
    `group_layouts`: the layouts that the workers reported. `layout` names how a group's blocks are
    laid out. ValueError if the KV heads of a group cannot be derived from the configuration.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    groups = tuple(
        _cache_group(spec, shape, kv_heads_of(spec, total, ranks), ranks, layout(spec))
        for spec, shape in zip(specs, group_layouts, strict=True)
    )
    return Identity(
        model=model_identity(vllm_config, [group.dtype for group in groups], {}),
        hash_tokens=hash_tokens_of(vllm_config, kv_cache_config),
        alignment=lcm(*(group.page_tokens for group in groups)),
        groups=groups,
        ranks=ranks,
    )


def _cache_group(
    spec: Any, shape: GroupLayout, kv_heads: int, ranks: int, layout: str
) -> CacheGroup:
    layers = sum(len(stage) for stage in shape.stages)
    # If the heads of a block are interleaved, its bytes are ordered differently from a block in
    # which each head is contiguous.
    order = "heads" if shape.head_major else "mixed"
    if shape.arrangement:
        order = f"{order}/{shape.arrangement}"
    head_ranges, shared = head_ranges_of(
        kv_heads, ranks, layers * shape.head_bytes, sliceable=shape.head_major
    )
    return CacheGroup(
        reach=reach_of(spec),
        page_tokens=spec.block_size,
        kv_heads=kv_heads,
        head_dim=spec.head_size,
        head_bytes=shape.head_bytes,
        dtype=dtype_name(spec.dtype),
        layout=f"{layout}/{order}",
        spec=spec_text(spec),
        head_ranges=head_ranges,
        shared=shared,
        stages=shape.stages,
    )


def reach_of(spec: Any) -> Reach:
    """Returns which pages a group needs, by the class of its spec. If vLLM's hybrid cache manager
    is off, vLLM keeps the blocks of all tokens for layers with a sliding window too: such a group
    needs all pages.
    """
    if type(spec).__name__ == "SlidingWindowSpec":
        return trailing(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
    return ALL


def kv_heads_of(spec: Any, total: int, ranks: int) -> int:
    """Returns the number of KV heads of a group over all tensor-parallel workers. Each worker has
    `spec.num_kv_heads` of these heads, or a head that other workers also have. `total`: the number
    of KV heads in the model's configuration. `ranks`: the number of tensor-parallel workers.
    """
    shards, local = getattr(spec, "max_tp_shards", None), int(spec.num_kv_heads)
    if shards == 1 or ranks == 1:
        return local
    if max(total // ranks, 1) == local and (total % ranks == 0 or ranks % total == 0):
        return total
    if local > 1:
        return local * ranks
    raise ValueError(
        "how the KV heads are split over the workers cannot be derived from the model configuration"
    )


def spec_text(spec: Any) -> str:
    """Returns vLLM's description of a group, without the fields that depend on the number of
    workers.
    """
    fields = {name: str(value) for name, value in vars(spec).items() if name not in SHARDED}
    return f"{type(spec).__name__}({', '.join(f'{n}={v}' for n, v in sorted(fields.items()))})"


def hash_tokens_of(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Returns the number of tokens between two consecutive block hashes of a request."""
    found = getattr(kv_cache_config, "hash_block_size", None)
    return int(found or vllm_config.cache_config.block_size)
