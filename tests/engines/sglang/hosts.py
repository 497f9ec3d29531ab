"""SGLang's own host pools (its KV buffers in host memory) with known bytes, and a cache controller
of SGLang that has only its functions for transfers.
"""

import hashlib
import itertools
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 16
CPU = torch.device("cpu")


def mha(
    layout: str,
    *,
    page: int = PAGE,
    pages: int = 12,
    layers: tuple[int, int] = (0, 4),
    heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    drafts: int = 0,
) -> MHATokenToKVPoolHost:
    """`drafts`: number of drafting layers in the pages, after the layers of the target model."""

    def device(layers: int) -> MHABufferInfo:
        shape = (page, heads, head_dim)
        k = tuple(torch.zeros(shape, dtype=dtype) for _ in range(layers))
        v = tuple(torch.zeros(shape, dtype=dtype) for _ in range(layers))
        pointers = {"k_data_ptrs": _pointers(k), "v_data_ptrs": _pointers(v)}
        return MHABufferInfo(
            buffers=KVBuffers(k=k, v=v, layout=KVBufferLayout.NHD, **pointers),
            page_size=page,
            head_num=heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            dtype=dtype,
            device=CPU,
        )

    return MHATokenToKVPoolHost(
        device(layers[1] - layers[0]),
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=page,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=page,
        start_layer=layers[0],
        end_layer=layers[1],
        host_token_capacity=pages * page,
        draft_buffer_infos=tuple(device(1) for _ in range(drafts)),
    )


def mla(layout: str, *, page: int = PAGE, pages: int = 12, layers: int = 3) -> MLATokenToKVPoolHost:
    buffers = tuple(torch.zeros((page, 1, 96), dtype=torch.bfloat16) for _ in range(layers))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_pointers(buffers),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        kv_cache_dim=96,
        dtype=torch.bfloat16,
        device=CPU,
    )
    return MLATokenToKVPoolHost(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=page,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=page,
        start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
        host_token_capacity=pages * page,
    )


def mamba(layout: str = "page_first", *, slots: int = 12) -> MambaPoolHost:
    info = MambaStateBufferInfo(
        temporal=torch.zeros((2, 4, 2, 8, 16), dtype=torch.float32),
        conv=[torch.zeros((2, 4, 24, 3), dtype=torch.bfloat16)],
        extra_checkpoint_buffers=(),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=slots - 1, pin_memory=False, layout=layout)


def _pointers(buffers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)


def buffers(host: Any) -> list[torch.Tensor]:
    """Returns the tensors that hold all memory of a pool, as tensors of bytes."""
    if isinstance(host, MambaPoolHost):
        found = [host.temporal_buffer, *host.conv_buffer]
    else:
        found = [host.kv_buffer]
    return [buffer.view(torch.uint8).reshape(-1) for buffer in found]


def fill(host: Any, seed: int) -> None:
    """Fills the pool with pseudorandom bytes that follow from `seed`."""
    source = torch.Generator().manual_seed(seed)
    for buffer in buffers(host):
        buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=source))


def page_bytes(host: Any, page: int) -> bytes:
    """Returns the bytes of one page, as SGLang copies them."""
    flat = host.get_data_page(page * host.page_size, flat=True).contiguous()
    return flat.view(torch.uint8).numpy().tobytes()


def slots(host: Any, pages: list[int]) -> torch.Tensor:
    """Returns the positions in the pool of all tokens of `pages`, in the order of `pages`."""
    size = host.page_size
    return torch.tensor(
        list(itertools.chain.from_iterable(range(p * size, (p + 1) * size) for p in pages)),
        dtype=torch.int64,
    )


def hashes(name: str, pages: int = 5) -> list[str]:
    """Returns page hashes as SGLang makes them: a chain of sha256 in hexadecimal."""
    found, last = [], name.encode()
    for _ in range(pages):
        last = hashlib.sha256(last).digest()
        found.append(last.hex())
    return found


def config(extra: dict[str, Any], **others: Any) -> HiCacheStorageConfig:
    """Returns the configuration of an engine with a single rank. `extra`: its `extra_config`;
    `others`: other values of its fields.
    """
    said: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "tiny",
    }
    return HiCacheStorageConfig(**{**said, **others, "extra_config": extra})


def controller(host: Any, storage: Any) -> HiCacheController:
    """Returns a cache controller of SGLang that has only the attributes that the transfer functions
    of the class use.
    """
    made = object.__new__(HiCacheController)
    made.storage_backend = storage
    made.storage_host_pool = host
    made.mem_pool_host = host
    made.page_size = host.page_size
    return made


def operation() -> Any:
    return SimpleNamespace(request_id="test", is_terminated=lambda: False)
