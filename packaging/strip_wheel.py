"""Moves the debug symbols of a wheel's extension modules into files in the folder SYMBOLS.

    python packaging/strip_wheel.py WHEEL SYMBOLS

Strips every `*.so` in WHEEL and writes its symbols to `SYMBOLS/NAME.so.debug`. The section
`.gnu_debuglink` of the stripped module names this file: gdb and Rust's backtraces read the symbols
if the file is in the folder of the installed module.
"""

import base64
import csv
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def strip(module: Path, symbols: Path) -> None:
    """Strips `module` and writes its symbols to `symbols`."""
    # objcopy writes the last component of the path `symbols`, and a checksum of this file, into the
    # link.
    for arguments in (
        ["--only-keep-debug", "--compress-debug-sections", module, symbols],
        ["--strip-all", f"--add-gnu-debuglink={symbols}", module],
    ):
        subprocess.run(["objcopy", *arguments], check=True)


def rewrite(wheel: Path, symbols: Path) -> None:
    """Replaces `wheel` by a wheel with stripped modules, and their digests in RECORD. All other
    files keep their bytes.
    """
    symbols.mkdir(parents=True, exist_ok=True)
    new = wheel.with_suffix(".stripped")
    changed = {}
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as out,
        tempfile.TemporaryDirectory() as scratch,
    ):
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith(".so"):
                module = Path(scratch) / Path(entry.filename).name
                module.write_bytes(data)
                strip(module, symbols / f"{module.name}.debug")
                data = module.read_bytes()
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
                changed[entry.filename] = (f"sha256={digest.rstrip(b'=').decode()}", str(len(data)))
            elif entry.filename.endswith(".dist-info/RECORD"):
                # The last file of a wheel holds the digests of all other files.
                rows = csv.reader(io.StringIO(data.decode()))
                lines = io.StringIO()
                csv.writer(lines, lineterminator="\n").writerows(
                    (row[0], *changed.get(row[0], row[1:])) for row in rows
                )
                data = lines.getvalue().encode()
            out.writestr(entry, data)
    new.replace(wheel)


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]), Path(sys.argv[2]))
