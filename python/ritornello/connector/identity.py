"""The part of a page's identity that all engines share: model, weights and options of the engine
decide, besides tokens, whether bytes may be reused. Adapters add layout, layers and heads.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ritornello._core import Scope

EPOCH_BYTES = 16

# Fields of a model's configuration that describe where the configuration comes from, or how the
# model is run: they do not affect the values that the model computes.
IGNORED_FIELDS = frozenset({"_name_or_path", "name_or_path", "transformers_version", "use_cache"})
# A rotary embedding that chooses its factors by the configured maximum length.
LONGROPE = "longrope"

# Logged if an epoch is random; `%s` is the adapter's word, "saved" or "stored".
EPOCH_WARNING = "the weights were not loaded from files; pages %s now are not found after a restart"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The common part of an engine's scopes; can be pickled. `options`: options of the engine that
    affect the computation or the layout of memory. `epoch`: empty for weights that were loaded from
    files (their fingerprint identifies them), random otherwise and after every change.
    """

    name: str
    weights: bytes = b""
    kv_scale: str = "none"
    hash_algorithm: str = ""
    options: tuple[tuple[str, str], ...] = ()
    epoch: bytes = b""

    @classmethod
    def of(
        cls,
        name: str,
        fingerprint: bytes | None,
        options: Mapping[str, str],
        *,
        hash_algorithm: str,
        kv_scale: str = "none",
    ) -> "ModelIdentity":
        """Returns the identity of a model. `fingerprint`: digest of the weights; None if they were
        not loaded from files: the identity then has a random epoch.
        """
        weights, epoch = (fingerprint, b"") if fingerprint else (b"", new_epoch())
        sorted_options = tuple(sorted(options.items()))
        return cls(name, weights, kv_scale, hash_algorithm, sorted_options, epoch)

    def at(self, epoch: bytes) -> "ModelIdentity":
        """Returns a copy with this epoch; the identity itself if `epoch` is empty."""
        return replace(self, epoch=epoch) if epoch else self

    def scope(
        self,
        dtype: str,
        page_tokens: int,
        *,
        layers: tuple[int, int],
        kv_heads: tuple[int, int],
        head_dim: int,
        layout: str,
        chained: bool,
        page_bytes: int,
        part: int = 0,
        options: Mapping[str, str] | None = None,
    ) -> "Scope":
        """Returns the scope of pages with this dtype, layout and part of the model. `options`:
        options of these pages only, which are added to `self.options`.
        """
        from ritornello._core import Scope

        return Scope(
            self.name,
            dtype,
            page_tokens,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layout=layout,
            weights=self.weights,
            kv_scale=self.kv_scale,
            hash_algorithm=self.hash_algorithm,
            epoch=self.epoch,
            part=part,
            extra={**dict(self.options), **(options or {})},
            chained=chained,
            page_bytes=page_bytes,
        )


def new_epoch() -> bytes:
    return os.urandom(EPOCH_BYTES)


def canonical_config(config: Mapping[str, Any]) -> str:
    """Returns a model configuration as canonical JSON, without the fields in `IGNORED_FIELDS`."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): clean(v) for k, v in value.items() if str(k) not in IGNORED_FIELDS}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return value

    return json.dumps(clean(config), sort_keys=True, separators=(",", ":"), default=str)


def model_name(config: Mapping[str, Any]) -> str:
    """Returns the model's type, for display, and the digest of its configuration."""
    digest = hashlib.sha256(canonical_config(config).encode()).hexdigest()
    return f"{config.get('model_type') or 'model'}:{digest}"


def dtype_name(dtype: object) -> str:
    """Returns the name of a torch dtype, as in "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def file_digest(path: str | os.PathLike[str] | None) -> str:
    """Returns the digest of a small file that affects the computation; "" without a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def depends_on_maximum_length(config: str) -> bool:
    """Returns whether KV depends on the configured maximum length, which the scope must then name.
    `config`: the configuration of the model as text.
    """
    return LONGROPE in config


def draft_option(fingerprint: bytes | None) -> dict[str, str]:
    """Returns the option that identifies a draft model whose KV is stored with the pages, by the
    fingerprint of its weights; a random value if they were not loaded from files.
    """
    return {"draft": (fingerprint or new_epoch()).hex()}


def kv_scale_of(cache_dtype: str, dtypes: Collection[str]) -> str:
    """Returns where the scales of quantized KV come from: "none" if `cache_dtype` is "auto" or one
    of `dtypes`, to which no scales are applied, otherwise "checkpoint".
    """
    return "none" if cache_dtype in ("auto", *dtypes) else "checkpoint"


def ambiguity(*, scales_at_run_time: bool, hash_algorithm: str) -> str:
    """Returns why pages with equal keys may differ, in which case no page may be loaded or saved;
    "" if such pages are equal.
    """
    if scales_at_run_time:
        return (
            "KV scales are calculated at run time and are not part of a block's bytes; "
            "use scales of the checkpoint"
        )
    if hash_algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        return (
            f"{hash_algorithm} block hashes start from a random seed in every process; "
            "use sha256, or set PYTHONHASHSEED"
        )
    return ""
