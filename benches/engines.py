"""Measures the store inside engines, compared with each engine's own storage.

Prints the benchmarks of all engines, or of the named engines, in one table:

    python3 benches/engines.py [--json [FILE]] [--dir DIR] [ENGINE...]

Each benchmark runs in its engine's own environment (`make sglang`, `make lmcache`) and prints rows
with `system`, `object_bytes`, `op`, `mb_s`, `p50_us`; this script adds `engine`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("sglang", "lmcache")
COLUMNS = ("engine", "object_bytes", "op", "system", "mb_s", "p50_us")


def rows_of(engine: str, folder: str) -> list[dict[str, Any]]:
    """Returns the rows of an engine's benchmark."""
    python = ROOT / "build/env" / engine / "bin/python"
    if not python.exists():
        raise SystemExit(f"{python.relative_to(ROOT)} does not exist: make {engine}")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        bench = ROOT / "benches" / f"{engine}.py"
        command = [str(python), str(bench), "--json", file.name, "--dir", folder]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise SystemExit(f"{' '.join(command)} failed")
        rows: list[dict[str, Any]] = json.loads(Path(file.name).read_text())
    return [{"engine": engine, **row} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table. The rows of compared systems are adjacent."""
    columns = [name for name in COLUMNS if name in rows[0]]
    order = sorted(rows, key=lambda row: (row.get("engine", ""), row["object_bytes"], row["op"]))
    cells = [columns, ["---"] * len(columns)]
    cells += [["" if row[name] is None else str(row[name]) for name in columns] for row in order]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="rows as JSON, in place of a table"
    )
    parser.add_argument("--dir", default=str(ROOT / "build"), help="a directory on the disk")
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=", ".join(ENGINES))
    given = parser.parse_args()
    for unknown in set(given.engines) - set(ENGINES):
        parser.error(f"no benchmark of {unknown}")
    rows = [row for name in given.engines or ENGINES for row in rows_of(name, given.dir)]
    if given.json in (None, "-"):
        print(json.dumps(rows) if given.json else table(rows))
    else:
        Path(given.json).write_text(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
