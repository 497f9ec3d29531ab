"""Detects a LoRA adapter that was replaced in place: same name and path, other files.

vLLM's block hashes contain an adapter's name and path. An adapter that is loaded again, from files
that were written since, computes other KV under the same hashes.
"""

import os
from pathlib import Path

# Name, size, inode, and times of the last write and the last change.
FileSignature = tuple[str, int, int, int, int]


class Adapters:
    """The adapters that this process has loaded, by name and path."""

    def __init__(self) -> None:
        self._signatures: dict[tuple[str, str], frozenset[FileSignature]] = {}

    def replaced(self, name: str, path: str, *, in_place: bool) -> bool:
        """Returns whether the files of an adapter differ from its files at the last call for this
        name and path that found files; False at the first such call, as after a first download.
        Returns `in_place` if the folder of `path` is unknown, has no files or cannot be read.
        """
        folder = folder_of(path)
        found = signature(folder) if folder is not None else frozenset()
        if not found:
            return in_place
        known = self._signatures.get((name, path))
        self._signatures[name, path] = found
        return known is not None and known != found


def folder_of(path: str) -> Path | None:
    """Returns the folder from which vLLM loads the adapter at `path`, by the rules of vLLM's
    `get_adapter_absolute_path`: a path may begin with `~`, and a relative path that does not exist
    is a name on Hugging Face's hub. Returns None if the client of the hub has no snapshot of the
    adapter in its cache, and for names on ModelScope's hub. Downloads nothing.
    """
    try:
        folder = Path(path).expanduser()
        if folder.is_absolute() or folder.exists():
            return folder
        if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() == "true":
            return None
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception:  # an optional package may raise anything
        return None


def signature(folder: Path) -> frozenset[FileSignature]:
    """Returns the signature of the files in a folder; empty if the folder has no files or cannot be
    read. A write to a file, or its replacement, changes the signature even if timestamps are set
    back.
    """
    try:
        return frozenset(
            (path.name, at.st_size, at.st_ino, at.st_mtime_ns, at.st_ctime_ns)
            for path in folder.iterdir()
            if path.is_file()
            for at in (path.stat(),)
        )
    except OSError:
        return frozenset()
