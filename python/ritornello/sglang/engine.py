"""Reads from SGLang's configuration what decides whether pages of this engine may be reused."""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.version import __version__

from ritornello.connector.identity import (
    ModelIdentity,
    depends_on_maximum_length,
    draft_option,
    dtype_name,
    file_digest,
    model_name,
)
from ritornello.connector.weight_fingerprint import (
    fingerprint_of,
    format_name,
    has_further_folders,
)
from ritornello.sglang.identity import HASH_ALGORITHM, Engine

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger("ritornello.sglang")

# Options of SGLang that affect the computation or the memory layout.
OPTIONS = ("device", "kv_cache_dtype", "load_format", "quantization", "speculative_algorithm")
# Load formats with which SGLang reads all weights from the files at the model's path. Other formats
# take weights from elsewhere: another server, another path, a URL, or a copy made by an earlier
# start.
FILE_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "instanttensor",
        "layered",
        "mistral",
        "pt",
        "safetensors",
        "sharded_state",
    }
)


class LoadedFiles(NamedTuple):
    """The properties of a server that follow from files. `weights`: fingerprint of the weights;
    None if they were not loaded from the files at the model's path. `draft`: the option that
    identifies the draft model, if there is one. `kv_scales`: digest of the file with scales of KV.
    """

    weights: bytes | None
    draft: dict[str, str]
    kv_scales: str


def engine_of(config: "HiCacheStorageConfig") -> Engine:
    from sglang.srt.runtime_context import get_server_args, process_model_config

    options: dict[str, str] = {}
    name, fingerprint, heads = str(config.model_name), None, 0
    try:
        args, model = get_server_args(), process_model_config()
        name, heads = model_name(model.hf_config.to_dict()), _kv_heads(model)
        files = loaded_files()
        options = {**_options(args, model), "kv_scales": files.kv_scales, **files.draft}
        # If the weight version is not the version that SGLang was started with, the weights were
        # updated, and differ from the weights in the files.
        is_updated = _weight_version() != str(args.weight_version)
        if not (is_updated or has_further_folders(model.hf_config)):
            fingerprint = files.weights
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


@cache
def loaded_files() -> LoadedFiles:
    """Reads the files at the first attach in this process, and returns the same at every later
    attach: SGLang loaded the files before the first attach and does not load them again without an
    update of the weights, but their contents may change on the disk.
    """
    from sglang.srt.runtime_context import get_model, get_server_args

    args = get_server_args()
    weights: bytes | None = None
    draft: dict[str, str] = {}
    kv_scales = ""
    if reads_files(args, args.load_format):
        weights = fingerprint_of(str(get_model().model_path), args.revision, args.download_dir)
    if args.speculative_draft_model_path:
        found = None
        if reads_files(args, args.speculative_draft_load_format or args.load_format):
            revision = args.speculative_draft_model_revision
            found = fingerprint_of(str(args.speculative_draft_model_path), revision, None)
        draft = draft_option(found)
    try:
        kv_scales = file_digest(args.quantization_param_path)
    except OSError as error:
        logger.warning("ritornello: cannot read the KV scales (%s)", error)
        weights = None  # the pages get a random epoch
    return LoadedFiles(weights, draft, kv_scales)


def reads_files(args: Any, load_format: object) -> bool:
    """Returns whether SGLang, started with `args`, reads all weights of a model with this load
    format from the files at the model's path. With a weight cache it takes them from the memory of
    another process, which may have loaded other files; ModelOpt may restore them from another path;
    the `pattern` of the format `sharded_state` may name any files.
    """
    return (
        format_name(load_format) in FILE_FORMATS
        and "pattern" not in (getattr(args, "model_loader_extra_config", None) or ())
        and getattr(args, "weight_cache_mode", "off") == "off"
        and not getattr(args, "modelopt_checkpoint_restore_path", None)
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
    }
    if depends_on_maximum_length(str(model.hf_config)):
        options["context_len"] = str(model.context_len)
    # Only if set, so that scopes of other engines stay the same. SGLang restricts adapters whose
    # target is "all-linear" to these modules.
    targets = getattr(args, "lora_target_modules", None)
    if targets is not None:
        options["lora_target_modules"] = ",".join(sorted(targets))
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
