"""Fingerprint of a model's weight files: cheap to compute, and different if a file's name, its
size, its header or a sampled byte differs.

Names, sizes and headers cannot tell a model from its fine-tune: both have the same tensors of the
same shapes. Therefore bytes in the middle of every tensor are hashed as well. A file that is not
`.safetensors` contributes evenly spaced samples instead of header and tensors.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Protocol

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
# `SAMPLE`: bytes of one sample. `SAMPLES`: a file that is not `.safetensors` is divided into about
# this number of parts, and sampled at the beginning of each part and at the end of the file.
# `MAX_HEADER`: maximum bytes of a `.safetensors` header.
SAMPLE = 256
SAMPLES = 64
MAX_HEADER = 256 << 20


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def weight_files(model: Path) -> list[Path]:
    """Returns the weight files of a model: the file itself, or the files in its folder, sorted by
    name.
    """
    if model.is_file():
        return [model]
    if not model.is_dir():
        return []
    return sorted(path for path in model.iterdir() if path.suffix in SUFFIXES and path.is_file())


def fingerprint(model: Path) -> bytes | None:
    """Returns the fingerprint, 32 bytes, of the weights in a file or folder; None if there are no
    weight files, if one cannot be read, or if the header of a `.safetensors` file is invalid.
    """
    files = weight_files(model)
    if not files:
        return None
    digest = hashlib.sha256(b"ritornello weights 1")
    try:
        for path in files:
            _add_file(digest, path)
    except (OSError, ValueError):
        return None
    return digest.digest()


def format_name(load_format: object) -> str:
    """Returns the name of a load format, in lower case. `load_format`: a text or an enum, depending
    on the engine and its version.
    """
    return str(getattr(load_format, "value", load_format)).lower()


def has_further_folders(config: object) -> bool:
    """Returns whether engines load a part of the model from a folder that has no fingerprint:
    Ultravox's language model and audio encoder, and the audio encoders of Kimi-Audio and MiMo.
    `config`: the configuration of the model.
    """
    names = ("text_model_id", "audio_model_id")
    architectures = getattr(config, "architectures", None) or ()
    has_audio = getattr(config, "audio_config", None) is not None
    return (
        any(getattr(config, name, None) for name in names)
        or "MoonshotKimiaForCausalLM" in architectures
        or (has_audio and any(name.startswith("MiMoV2") for name in architectures))
    )


def fingerprint_of(name: str, revision: str | None, folder: str | None) -> bytes | None:
    """Returns the fingerprint of the weights that a model's name stands for, if they are files on
    this machine: a path, or a snapshot that the client of Hugging Face's hub has in its cache
    `folder`. Otherwise returns None. Downloads nothing.
    """
    path = Path(name)
    if not path.exists():
        try:
            from huggingface_hub import snapshot_download

            path = Path(
                snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True)
            )
        except Exception:  # an optional package may raise anything
            return None
    return fingerprint(path)


def _add_file(digest: _Hash, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"\n{path.name} {size} ".encode())
        if path.suffix == ".safetensors":
            _add_tensors(digest, file.fileno(), size)
        else:
            step = max(size // SAMPLES, 1)
            for offset in range(0, size, step):
                digest.update(os.pread(file.fileno(), SAMPLE, offset))
            digest.update(os.pread(file.fileno(), SAMPLE, max(size - SAMPLE, 0)))


def _add_tensors(digest: _Hash, file: int, size: int) -> None:
    """Hashes the header, and at most `SAMPLE` bytes in the middle of every tensor."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if length > min(size, MAX_HEADER):
        raise ValueError("not a safetensors file")
    header = os.pread(file, length, 8)
    digest.update(header)
    for tensor in sorted(_extents(header)):
        start, end = tensor
        middle = 8 + length + max((start + end - SAMPLE) // 2, start)
        digest.update(os.pread(file, min(SAMPLE, end - start), middle))


def _extents(header: bytes) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header)
        return [
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError("not a safetensors header") from error
