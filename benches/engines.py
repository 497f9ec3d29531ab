"""Measures the store inside engines, compared with each engine's own storage.

Runs the benchmarks of all engines, or of the named engines, and prints their rows in one table or,
with `--json`, as JSON. vLLM's connector on CPUs is not measured: vLLM has no storage of its own
there.

    python3 benches/engines.py [--json [FILE]] [--dir DIR] [ENGINE...]

Each benchmark runs in its engine's own environment (`make vllm`, `make sglang`, `make lmcache`) and
writes rows with `system`, `object_bytes`, `op`, and some of `mb_s`, `p50_us` and `cpu_s_gib`
(seconds of processor time per GiB). A benchmark that uses several kinds of memory names the kind of
each row as `memory`. This script adds `engine`, `to_own` and `to_disk` to each row. `to_own` is the
row's rate divided by the fastest rate of the engine's own storage, `to_disk` the row's rate divided
by the fastest rate of the disk's limit. The rates are of the same operation on objects of the same
size in the same memory. Both ratios are null for rows of the engine's own storage, of the disk's
limit, or without a rate. A ratio is also null if no row has the rate by which it divides.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The benchmark of each engine, and the beginning of the names of its rows that measure the engine's
# own storage.
ENGINES = {
    "vllm": ("vllm_tier.py", "fs"),
    "sglang": ("sglang.py", "hicache_file"),
    "lmcache": ("lmcache.py", "fs_native"),
}
LIMIT = "disk"
RATIOS = ("to_own", "to_disk")
COLUMNS = ("engine", "object_bytes", "op", "system", "mb_s", *RATIOS, "p50_us", "cpu_s_gib")


def rows_of(engine: str, folder: str) -> list[dict[str, Any]]:
    """Returns the rows of an engine's benchmark."""
    python = ROOT / "build/env" / engine / "bin/python"
    if not python.exists():
        raise SystemExit(f"{python.relative_to(ROOT)} does not exist: make {engine}")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        program, own = ENGINES[engine]
        bench = ROOT / "benches" / program
        command = [str(python), str(bench), "--json", file.name, "--dir", folder]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise SystemExit(f"{' '.join(command)} failed")
        rows: list[dict[str, Any]] = json.loads(Path(file.name).read_text())
    return with_ratios([{"engine": engine, **row} for row in rows], own)


def with_ratios(rows: list[dict[str, Any]], own: str) -> list[dict[str, Any]]:
    """Returns the rows with `to_own` and `to_disk`. `own`: the beginning of the names of
    the systems that are the engine's own storage.
    """

    def ratio(row: dict[str, Any], to: str) -> float | None:
        rates = [
            other["mb_s"]
            for other in rows
            if other["system"].startswith(to)
            and other["op"] == row["op"]
            and other.get("mb_s")
            and other["object_bytes"] == row["object_bytes"]
            and other.get("memory") == row.get("memory")
        ]
        if not rates or not row.get("mb_s") or row["system"].startswith((own, LIMIT)):
            return None
        return float(round(row["mb_s"] / max(rates), 2))

    return [
        {**row, **dict(zip(RATIOS, (ratio(row, own), ratio(row, LIMIT)), strict=True))}
        for row in rows
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table. The rows of compared systems are adjacent."""
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    order = sorted(rows, key=lambda row: (row.get("engine", ""), row["object_bytes"], row["op"]))
    cells = [columns, ["---"] * len(columns)]
    cells += [
        ["" if row.get(name) is None else str(row[name]) for name in columns] for row in order
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the rows as JSON, or write them to FILE (default: print a table)",
    )
    parser.add_argument(
        "--dir",
        default=str(ROOT / "build"),
        help="a directory on the disk to measure (default: build)",
    )
    parser.add_argument(
        "engines",
        nargs="*",
        metavar="ENGINE",
        help=f"engines to run (default: all of {', '.join(ENGINES)})",
    )
    given = parser.parse_args()
    for unknown in set(given.engines) - set(ENGINES):
        parser.error(f"no benchmark of {unknown}: choose from {', '.join(ENGINES)}")
    rows = [row for name in given.engines or ENGINES for row in rows_of(name, given.dir)]
    if given.json in (None, "-"):
        print(json.dumps(rows) if given.json else table(rows))
    else:
        Path(given.json).write_text(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
