"""Reads from SGLang's configuration what decides whether pages of this engine may be reused."""

import logging
from typing import TYPE_CHECKING

from sglang.version import __version__

from ritornello.connector.identity import (
    ModelIdentity,
    depends_on_maximum_length,
    draft_option,
    dtype_name,
    model_name,
)
from ritornello.connector.weight_fingerprint import fingerprint_of
from ritornello.sglang.identity import HASH_ALGORITHM, Engine, file_digest

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger("ritornello.sglang")

# Options of SGLang that affect the computation or the memory layout.
OPTIONS = ("device", "kv_cache_dtype", "load_format", "quantization", "speculative_algorithm")


def engine_of(config: "HiCacheStorageConfig") -> Engine:
    from sglang.srt.runtime_context import get_model, get_server_args, process_model_config

    options: dict[str, str] = {}
    name, fingerprint, heads = str(config.model_name), None, 0
    try:
        args, model = get_server_args(), process_model_config()
        name, heads = model_name(model.hf_config.to_dict()), _kv_heads(model)
        options = _options(args, model)
        # If the weight version is not the version that SGLang was started with, the weights were
        # updated, and differ from the weights in the files.
        if str(args.load_format) != "dummy" and _weight_version() == str(args.weight_version):
            path = str(get_model().model_path)
            fingerprint = fingerprint_of(path, args.revision, args.download_dir)
        if args.speculative_draft_model_path:
            draft = str(args.speculative_draft_model_path)
            revision = args.speculative_draft_model_revision
            options |= draft_option(fingerprint_of(draft, revision, None))
    except Exception as error:
        # SGLang publishes no configuration in this process, or publishes it under other names.
        logger.warning(
            "ritornello: SGLang does not describe the model that it runs (%s): pages are stored "
            "under a random epoch",
            error,
        )
        fingerprint = None
    return Engine(
        version=__version__,
        model=ModelIdentity.of(name, fingerprint, options, hash_algorithm=HASH_ALGORITHM),
        kv_heads=heads,
        tp=(config.tp_rank, config.tp_size),
        pp=(config.pp_rank, config.pp_size),
        cp=(config.attn_cp_rank, config.attn_cp_size),
        replicated=bool(config.is_mla_model),
    )


def dcp_size_of(config: "HiCacheStorageConfig") -> int:
    """Returns the size of decode context parallelism, 1 outside an engine. The configuration of
    SGLang 0.5.22 has no such field, so the engine is asked: this release refuses the storage at the
    engine's start if the size exceeds 1, but not when the storage is attached later.
    """
    size = getattr(config, "dcp_size", None)
    if size is not None:
        return int(size)
    from sglang.srt.runtime_context import get_parallel

    try:
        return int(get_parallel().attn_dcp_size)
    except (RuntimeError, ValueError):  # outside an engine SGLang publishes no sizes
        return 1


def is_first_rank(config: "HiCacheStorageConfig") -> bool:
    """Returns whether this rank counts the tokens that are loaded, each of which all ranks load."""
    return not (config.tp_rank or config.pp_rank or config.attn_cp_rank)


def is_storage_writer(config: "HiCacheStorageConfig") -> bool:
    """Returns whether this rank writes its pages: every rank, unless the model uses MLA, with which
    several ranks hold the same bytes, and one of them writes. The configuration of SGLang 0.5.22
    does not name the writer; with this release the writer is the first tensor-parallel rank.
    """
    declared = getattr(config, "is_storage_writer", None)
    return not config.is_mla_model or config.tp_rank == 0 if declared is None else bool(declared)


def _options(args: "ServerArgs", model: "ModelConfig") -> dict[str, str]:
    """Returns options that affect the computation or the memory layout."""
    from sglang.srt.runtime_context import attention_backends

    options = {
        **{name: str(getattr(args, name)) for name in OPTIONS},
        "attention_backends": "/".join(map(str, attention_backends())),
        "compute_dtype": dtype_name(model.dtype),
        "kv_scales": file_digest(args.quantization_param_path),
    }
    if depends_on_maximum_length(str(model.hf_config)):
        options["context_len"] = str(model.context_len)
    return options


def _kv_heads(model: "ModelConfig") -> int:
    """Returns the K/V heads of the whole model; 0 if SGLang has no such number, for example because
    layers have different numbers of heads.
    """
    try:
        return int(model.get_total_num_kv_heads())
    except (RuntimeError, ValueError, AttributeError):
        return 0


def _weight_version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)
