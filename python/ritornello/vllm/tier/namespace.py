"""Everything besides tokens that decides whether the bytes of a chunk (a page of vLLM's host tier)
may be reused.

vLLM's own file tier names its folder by model name, dtype, sizes and groups. A name does not
identify the weights, so this tier uses the model's configuration and the fingerprint of its
weights, as the connector does. A row of the host tier holds one chunk: the KV of all ranks side by
side. The scope of a chunk therefore names the numbers of ranks, unless vLLM declares that a row
holds one copy for all ranks (`replicated_layout`) or that the bytes of a row do not depend on the
ranks (`canonical_layout`, if `is_parallelism_agnostic`).

vLLM's block hashes cover tokens, LoRA adapters, images and cache salts.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ritornello.connector.identity import ModelIdentity, new_epoch
from ritornello.vllm.model import ambiguity, model_identity
from ritornello.vllm.tier.sequence import Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

    from ritornello._core import Scope

# Maximum page size of a store.
ROW_BYTES_MAX = 512 << 20
# Fields of a `KVCacheSpec`, vLLM's description of a KV cache group, that depend on the number of
# ranks.
RANK_FIELDS = ("num_kv_heads",)
# The first version of vLLM that does not offload a chunk without the blocks that a window has left.
WHOLE_CHUNKS = (0, 33)


@dataclass(frozen=True, slots=True)
class KernelPlatform:
    """Properties of a chunk's bytes that vLLM's code determines. `version`: the version of vLLM.
    `packing`: what, besides the configuration, determines the layout of a block (instruction set,
    device). `canonical`: vLLM's name of the format of canonical rows (`canonical_format_id`), "" if
    rows are not canonical.
    """

    version: str
    packing: str
    canonical: str = ""


@dataclass(frozen=True, slots=True)
class Namespace:
    """The scopes of an engine's chunks, one for each KV cache group."""

    model: ModelIdentity
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    row_bytes: int
    groups: tuple[Group, ...]

    def scope(self, group: Group) -> "Scope":
        return self.model.scope(
            self.dtype,
            group.chunk_tokens,
            layers=(0, self.layers),
            kv_heads=(0, self.kv_heads),
            head_dim=self.head_dim,
            layout="vllm-row",
            part=group.number,
            chained=group.chained,
            page_bytes=self.row_bytes,
        )

    def with_new_epoch(self) -> "Namespace":
        """Returns a copy in which no chunk stored before is found."""
        return replace(self, model=self.model.at(new_epoch()))


def unsupported_reason(
    vllm_config: "VllmConfig | None", offloading: "OffloadingConfig", row_bytes: int
) -> str:
    """Returns why this engine gets neither hits nor stores; "" if it is served."""
    if vllm_config is None:
        return "vLLM's configuration was not found, so the model of these bytes is unknown"
    reason = ambiguity(vllm_config)
    if reason:
        return reason
    if row_bytes > ROW_BYTES_MAX:
        return (
            f"a chunk of {row_bytes} bytes exceeds the maximum page size of the store, "
            f"{ROW_BYTES_MAX} bytes: choose a smaller block_size or blocks_per_chunk"
        )
    if not offloading.groups:
        return "vLLM offloads no KV cache group"
    return ""


def windows_refusal(
    offloading: "OffloadingConfig", kv_cache_config: "KVCacheConfig", version: str
) -> str:
    """Returns why chunks of a group with a window may contain bytes that vLLM of this `version` did
    not write; "" if they do not.
    """
    specs = (kv_cache_config.kv_cache_groups[g.group_id].kv_cache_spec for g in offloading.groups)
    blocks = offloading.cache.blocks_per_chunk
    if blocks == 1 or not offloads_parts(version) or not any(map(has_window, specs)):
        return ""
    return (
        f"vLLM {version} may offload a chunk of {blocks} blocks without the blocks that a window "
        'has left: set "blocks_per_chunk": 1 in kv_connector_extra_config, without "block_size", '
        "or use vLLM 0.33"
    )


def offloads_parts(version: str) -> bool:
    """Returns whether vLLM of this version may offload a chunk of several blocks although a window
    has left some of them: vLLM then copies the other blocks only, and the chunk contains what the
    host memory held before. One block is offloaded whole or not at all.
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2])) < WHOLE_CHUNKS


def namespace_of(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    offloading: "OffloadingConfig",
    row_bytes: int,
    machine: KernelPlatform,
) -> Namespace:
    """Returns the namespace of an engine that `unsupported_reason` accepted. `row_bytes`: one chunk
    in the host tier, including padding.
    """
    model, parallel = vllm_config.model_config, offloading.parallel
    rank_free = offloading.replicated_layout or (
        offloading.canonical_layout and parallel.is_parallelism_agnostic
    )
    specs = {g.group_id: kv_cache_config.kv_cache_groups[g.group_id] for g in offloading.groups}
    options = {
        "vllm": machine.version,
        "packing": machine.packing,
        "kv_cache_layout": str(offloading.kv_cache_layout),
        "canonical": machine.canonical,
        "blocks_per_chunk": str(offloading.cache.blocks_per_chunk),
        "tokens_per_hash": str(offloading.cache.tokens_per_hash),
        "replicated": str(offloading.replicated_layout),
        "ranks": "any" if rank_free else ranks(parallel),
    }
    for group in offloading.groups:
        options[f"group {group.group_id}"] = (
            f"{group.tokens_per_block} tokens of {','.join(group.layer_names)}: "
            f"{spec_text(specs[group.group_id].kv_cache_spec, rank_free)}"
        )
    return Namespace(
        model=model_identity(vllm_config, (offloading.model.dtype,), options),
        dtype=offloading.model.dtype,
        layers=sum(len(group.layer_names) for group in offloading.groups),
        kv_heads=max(int(model.get_total_num_kv_heads()), 1),
        head_dim=max(int(model.get_head_size()), 1),
        row_bytes=row_bytes,
        groups=tuple(
            Group(
                group.group_id,
                group.tokens_per_block * offloading.cache.blocks_per_chunk,
                chained=is_unbounded(specs[group.group_id].kv_cache_spec),
                window_chunks=window_chunks(
                    specs[group.group_id].kv_cache_spec,
                    group.tokens_per_block * offloading.cache.blocks_per_chunk,
                ),
            )
            for group in offloading.groups
        ),
    )


def ranks(parallel: Any) -> str:
    return ", ".join(
        f"{name} {getattr(parallel, f'{name}_size')}" for name in ("tp", "pp", "pcp", "dcp")
    )


def spec_text(spec: Any, rank_free: bool) -> str:
    """Returns the class and the fields of a `KVCacheSpec`; with `rank_free` without the fields that
    depend on the number of ranks.
    """
    if not dataclasses.is_dataclass(spec):
        return str(spec)
    fields: Mapping[str, Any] = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    omitted = RANK_FIELDS if rank_free else ()
    fields_text = ", ".join(
        f"{name}={value}" for name, value in fields.items() if name not in omitted
    )
    return f"{type(spec).__name__}({fields_text})"


def is_unbounded(spec: Any) -> bool:
    """Returns whether vLLM needs all chunks of a prefix of a KV cache group with this spec, not
    only the chunks of a window. If vLLM's hybrid cache manager is off, vLLM keeps and loads the
    chunks of all tokens for layers with a window too: the spec of such layers is then a
    `FullAttentionSpec` with the window as a field.
    """
    return any(kind.__name__ == "FullAttentionSpec" for kind in type(spec).__mro__)


def has_window(spec: Any) -> bool:
    """Returns whether vLLM frees blocks of a KV cache group with this spec that a window, or a
    chunk of chunked attention, has left.
    """
    return not is_unbounded(spec) and window_tokens(spec) > 0


def window_chunks(spec: Any, chunk_tokens: int) -> int:
    """Returns how many chunks at the end of a prefix vLLM loads of a group with a window, by the
    rules of vLLM: enough for the window of the prefix's last token; and enough for the part of the
    next token's window that is in the prefix, and for `extra_retained_tokens` tokens before this
    part, which a draft model computes again. Returns 1 for a group that keeps a recurrent state
    instead of KV: the state is in the last chunk.
    """
    window = window_tokens(spec)
    before = window - 1 + int(getattr(spec, "extra_retained_tokens", 0))
    return max(-(-window // chunk_tokens), -(-before // chunk_tokens), 1)


def window_tokens(spec: Any) -> int:
    """Returns how many tokens a token attends to at most, counting the token; 0 without a limit."""
    bounds = (getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return next((int(bound) for bound in bounds if bound), 0)
