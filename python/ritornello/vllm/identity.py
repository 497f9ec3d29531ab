"""Everything besides tokens that decides whether a page's bytes may be reused.

The scheduler side assembles it once and sends it with the work, so that two processes can never
disagree about it. Tokens, LoRA adapters, images and cache salts are in vLLM's block hashes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ritornello.vllm.weights import fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ritornello._core import Scope

EPOCH_BYTES = 16

# Where a configuration came from and how it is run, not what the model computes.
VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "use_cache"})


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of a `Scope`, in a form that can be sent between processes. `epoch` is empty
    for weights that were loaded from files (their fingerprint tells them apart) and random
    otherwise, and after every reset.
    """

    model: str
    dtype: str
    page_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    page_bytes: int
    layout: str
    weights: bytes
    kv_scale: str
    hash_algorithm: str
    extra: tuple[tuple[str, str], ...]
    epoch: bytes = b""

    def scope(self) -> "Scope":
        from ritornello._core import Scope

        return Scope(
            self.model,
            self.dtype,
            self.page_tokens,
            layers=(0, self.layers),
            kv_heads=(0, self.kv_heads),
            head_dim=self.head_dim,
            layout=self.layout,
            weights=self.weights,
            kv_scale=self.kv_scale,
            hash_algorithm=self.hash_algorithm,
            epoch=self.epoch,
            extra=dict(self.extra),
            chained=True,
            page_bytes=self.page_bytes,
        )


def new_epoch() -> bytes:
    return os.urandom(EPOCH_BYTES)


def normalised(config: Mapping[str, Any]) -> str:
    """A model configuration as canonical JSON without what does not change the computation."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): clean(v) for k, v in value.items() if str(k) not in VOLATILE}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return value

    return json.dumps(clean(config), sort_keys=True, separators=(",", ":"), default=str)


def model_name(config: Mapping[str, Any]) -> str:
    """The model's type, for a person, and the digest of its configuration."""
    digest = hashlib.sha256(normalised(config).encode()).hexdigest()
    return f"{config.get('model_type') or 'model'}:{digest}"


def identity_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", isa: str, version: str
) -> Identity:
    """The identity of what this engine computes. The configuration is one that
    `support.refusal` let pass: one full-attention group, no parallelism.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    layers = len(group.layer_names)
    config = model.hf_config.to_dict()
    weights = fingerprint_of(vllm_config)
    dtype = plain(spec.dtype)
    extra = {
        "cache_dtype": str(cache.cache_dtype),
        "compute_dtype": plain(model.dtype),
        "kv_spec": str(spec),
        "load_format": str(vllm_config.load_config.load_format),
        "quantization": str(model.quantization or "none"),
    }
    if "longrope" in normalised(config):
        # This rotary embedding chooses its factors by the length the engine was started with.
        extra["max_model_len"] = str(model.max_model_len)
    return Identity(
        model=model_name(config),
        dtype=dtype,
        page_tokens=spec.block_size,
        layers=layers,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        page_bytes=layers * spec.page_size_bytes,
        # Inside a block vLLM's CPU kernels pack keys as the instruction set likes them; nothing
        # promises that two versions pack alike.
        layout=f"vllm-{version}/cpu/{isa}/{spec.block_size}/{dtype}",
        weights=weights or b"",
        kv_scale="none" if cache.cache_dtype in ("auto", dtype) else "checkpoint",
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        extra=tuple(sorted(extra.items())),
        epoch=b"" if weights else new_epoch(),
    )


def plain(dtype: object) -> str:
    """Name of a torch dtype: bfloat16."""
    return str(dtype).removeprefix("torch.")


def fingerprint_of(vllm_config: "VllmConfig") -> bytes | None:
    """Of the weights this engine loaded, where they are files; None otherwise (made-up weights,
    or streamed from elsewhere).
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "dummy":
        return None
    path = Path(model.model)
    if not path.exists():
        snapshot = _snapshot(model.model, model.revision, load.download_dir)
        if snapshot is None:
            return None
        path = snapshot
    return fingerprint(path)


def _snapshot(name: str, revision: str | None, folder: str | None) -> Path | None:
    """Where the hub's client put a model that vLLM has downloaded; nothing is downloaded here."""
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True)
        )
    except Exception:  # an optional package's errors: without a snapshot the epoch is random
        return None
