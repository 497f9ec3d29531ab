"""What tells that a LoRA adapter was replaced in place: same name and path, other files.

vLLM's block hashes have an adapter's name and path. An adapter that is loaded a second time, from
files that were written since, computes other KV under the same hashes.
"""

from pathlib import Path

# Name, size, inode, and when it was last written and changed.
FileSignature = tuple[str, int, int, int, int]


class Adapters:
    """Those that this process has loaded, by name and path."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], frozenset[FileSignature]] = {}

    def replaced(self, name: str, path: str, *, in_place: bool) -> bool:
        """Whether an adapter about to be loaded is another one than that known by its name and
        path. Of files that cannot be looked at: if it is loaded `in_place`.
        """
        found = signature(Path(path))
        known = self._known.get((name, path))
        self._known[name, path] = found
        if not found:
            return in_place
        return known is not None and known != found


def signature(folder: Path) -> frozenset[FileSignature]:
    """Of the files in a folder; empty where there are none. Whoever writes to a file or exchanges
    it gives it another one, whatever he does to its times.
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
