"""A fingerprint of a model's weight files: cheap to take, different where the weights are.

Names, sizes and headers alone cannot tell a model from a fine-tune of it: both have the same
tensors of the same shapes. So a few bytes of every tensor are hashed too. A file of another
format gives evenly spaced samples.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Protocol

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
SAMPLE = 256
SAMPLES = 64
MAX_HEADER = 256 << 20


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def weight_files(model: Path) -> list[Path]:
    """The weight files of a model: the file itself, or those in its folder, by name."""
    if model.is_file():
        return [model]
    if not model.is_dir():
        return []
    return sorted(path for path in model.iterdir() if path.suffix in SUFFIXES and path.is_file())


def fingerprint(model: Path) -> bytes | None:
    """32 bytes, or None where no weights are found or they cannot be read."""
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


def fingerprint_of(name: str, revision: str | None, folder: str | None) -> bytes | None:
    """Of the weights a model's name stands for, where they are files on this machine: a path, or
    a snapshot that the hub's client put there. Nothing is downloaded.
    """
    path = Path(name)
    if not path.exists():
        try:
            from huggingface_hub import snapshot_download

            path = Path(
                snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True)
            )
        except Exception:  # an optional package's errors: without a snapshot the epoch is random
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
    """Header and, for every tensor, its middle bytes."""
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
