"""Everything besides tokens that decides whether a page's bytes may be reused.

SGLang's page hashes cover tokens, cache salts and LoRA adapters only. Model, weights, dtype,
layout, page size and the part of the model that a rank holds are in the scope. The part is named by
its layers and heads if they are known, otherwise by the rank.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ritornello.connector.identity import ModelIdentity, dtype_name

if TYPE_CHECKING:
    from ritornello._core import Scope

KV = "kv"
MAMBA = "mamba"
# Class and layout of host pools whose pages have their bytes in the same order in both forms that
# SGLang offers: a copy in one tensor, and a list of memory ranges (pieces). In these pools K and V
# (with MLA, their common latent) are each in one piece, or in one piece for each layer.
ORDER_FREE = frozenset(
    {
        ("MHATokenToKVPoolHost", "page_first"),
        ("MHATokenToKVPoolHost", "page_first_direct"),
        ("MHATokenToKVPoolHost", "page_head"),
        ("MLATokenToKVPoolHost", "layer_first"),
        ("MLATokenToKVPoolHost", "page_first"),
        ("MLATokenToKVPoolHost", "page_first_direct"),
    }
)
# Attributes of a host pool that affect the bytes of its pages and have no field in a scope.
DETAILS = (
    "conv_state_shapes",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "target_layer_num",
    "temporal_dtype",
    "temporal_state_shape",
    "v_head_dim",
)
DIGEST_BYTES = 32
HASH_ALGORITHM = "sglang-sha256"


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of this process. `kv_heads`: KV heads of the whole model, 0 if unknown. `tp`,
    `pp`, `cp`: this rank, and the number of ranks, of tensor, pipeline and context parallelism.
    `replicated`: every tensor-parallel rank holds the same KV (MLA).
    """

    version: str
    model: ModelIdentity
    kv_heads: int
    tp: tuple[int, int]
    pp: tuple[int, int]
    cp: tuple[int, int]
    replicated: bool

    def at(self, epoch: bytes) -> "Engine":
        """Returns a copy whose model has this epoch; an unchanged copy if `epoch` is empty."""
        return replace(self, model=self.model.at(epoch))


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Layout of the pages of a host pool, by the pool's attributes. `layers`: first layer, and the
    layer after the last. `heads`: K/V heads of this rank, 0 if the pool has no such attribute.
    `details`: the number of layers, and the pool's attributes in `DETAILS`.
    """

    pool: str
    kind: str
    layout: str
    dtype: str
    page_tokens: int
    layers: tuple[int, int]
    heads: int
    head_dim: int
    details: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str, host: Any) -> "PoolLayout":
        first = int(getattr(host, "start_layer", 0) or 0)
        count = int(getattr(host, "layer_num", 0) or getattr(host, "num_mamba_layers", 0) or 1)
        last = int(getattr(host, "end_layer", 0) or 0)
        details = {name: str(getattr(host, name)) for name in DETAILS if hasattr(host, name)}
        return cls(
            pool=name,
            kind=type(host).__name__,
            layout=str(host.layout),
            dtype=dtype_name(host.dtype),
            page_tokens=int(host.page_size),
            layers=(first, last if last > first else first + count),
            heads=int(getattr(host, "head_num", 0) or 0),
            head_dim=int(getattr(host, "head_dim", 0) or getattr(host, "kv_cache_dim", 0) or 1),
            details=(("layer_num", str(count)), *sorted(details.items())),
        )

    def order(self, copied: bool) -> str:
        """Returns the order of bytes in a page: the order of SGLang's copy of the page in one
        tensor ("copy"), the order of the memory ranges that SGLang names ("pieces"), or "plain" if
        both are equal.
        """
        if (self.kind, self.layout) in ORDER_FREE:
            return "plain"
        return "copy" if copied else "pieces"


def heads_of(total: int, tp: tuple[int, int], local: int) -> tuple[int, int] | None:
    """Returns the range of a rank's K/V heads, or None if it is unknown. With more ranks than
    heads, neighbouring ranks hold the same head.
    """
    rank, size = tp
    if total < 1 or local < 1:
        return None
    if total % size == 0 and local == total // size:
        return rank * local, (rank + 1) * local
    if size % total == 0 and local == 1:
        head = rank // (size // total)
        return head, head + 1
    return None


def names_its_layers(shape: PoolLayout, stage: int) -> bool:
    """Returns whether `shape.layers` has the numbers that the model gives to these layers. For the
    main pool, `kv`, this holds if the first number is 0 in the first pipeline stage, and above 0 in
    any other stage. A side pool numbers only the layers that it stores.
    """
    return shape.pool == KV and (shape.layers[0] > 0) == (stage > 0)


def is_replicated(engine: Engine, shape: PoolLayout) -> bool:
    """Returns whether all tensor-parallel ranks hold the same bytes in this pool. Mamba states
    differ between ranks even if KV does not, and a pool with a number of heads holds the heads of
    its rank only.
    """
    return engine.replicated and shape.pool != MAMBA and not shape.heads


def scopes_of(
    engine: Engine, shape: PoolLayout, page_bytes: int, *, copied: bool = False, split: int = 1
) -> "list[Scope]":
    """Returns the scopes of a pool's pages: one scope, or `split` scopes if each page is stored as
    `split` ranges of heads, so that engines with more ranks can load the heads of one rank.
    `page_bytes`: bytes of a page in one range. InvalidError for a layout that the core does not
    support.
    """
    heads = None
    options = {**dict(shape.details), "pool": shape.pool}
    if is_replicated(engine, shape):
        heads = (0, 1)
    elif shape.pool == KV:
        heads = heads_of(engine.kv_heads, engine.tp, shape.heads)
    if heads is None:
        # The heads of this rank are unknown, so the scope names the rank instead.
        heads = (0, max(shape.heads, 1))
        options["tp"] = f"{engine.tp[0]}/{engine.tp[1]}"
    if engine.pp[1] > 1 and not names_its_layers(shape, engine.pp[0]):
        options["pp"] = f"{engine.pp[0]}/{engine.pp[1]}"
    if engine.cp[1] > 1:
        options["cp"] = f"{engine.cp[0]}/{engine.cp[1]}"
    first, last = heads
    width = (last - first) // split
    return [
        engine.model.scope(
            shape.dtype,
            shape.page_tokens,
            layers=shape.layers,
            kv_heads=(first + at * width, first + (at + 1) * width),
            head_dim=shape.head_dim,
            layout=f"sglang-{engine.version}/{shape.kind}/{shape.layout}/{shape.order(copied)}",
            options=options,
            # Side pools store windows and states, which are useful without the pages before them.
            chained=shape.pool == KV,
            page_bytes=page_bytes,
        )
        for at in range(split)
    ]


def split_factor(engine: Engine, shape: PoolLayout, factor: int) -> int:
    """Returns `factor` if the heads of a page are known and divisible by it, otherwise 1."""
    heads = heads_of(engine.kv_heads, engine.tp, shape.heads) if shape.pool == KV else None
    if heads is None or factor < 1 or (heads[1] - heads[0]) % factor:
        return 1
    return factor


def keys_of(page_hashes: Sequence[str]) -> list[bytes]:
    """Returns the store's keys, 32 bytes each. SGLang's page hashes are sha256 in hexadecimal;
    other hashes are hashed again.
    """
    if set(map(len, page_hashes)) == {2 * DIGEST_BYTES}:
        try:
            joined = bytes.fromhex("".join(page_hashes))
        except ValueError:
            joined = b""
        if len(joined) == DIGEST_BYTES * len(page_hashes):
            return [joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES)]
    if len(page_hashes) > 1:
        return [key for page_hash in page_hashes for key in keys_of([page_hash])]
    return [hashlib.sha256(page_hash.encode()).digest() for page_hash in page_hashes]
