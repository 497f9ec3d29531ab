"""Detects a LoRA adapter that was replaced in place: same name and path, other files.

vLLM's block hashes contain an adapter's name and path. An adapter that is loaded again, from files
that were written since, computes other KV under the same hashes.
"""

from pathlib import Path

# Name, size, inode, and times of the last write and the last change.
FileSignature = tuple[str, int, int, int, int]


class Adapters:
    """The adapters that this process has loaded, by name and path."""

    def __init__(self) -> None:
        self._signatures: dict[tuple[str, str], frozenset[FileSignature]] = {}

    def replaced(self, name: str, path: str, *, in_place: bool) -> bool:
        """Returns whether the files of an adapter differ from its files at the last call for this
        name and path; False at the first call. Returns `in_place` if the folder at `path` has no
        files or cannot be read.
        """
        found = signature(Path(path))
        known = self._signatures.get((name, path))
        self._signatures[name, path] = found
        if not found:
            return in_place
        return known is not None and known != found


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
