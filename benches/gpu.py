"""Measures the data path between a store and the memory of a GPU.

    python3 benches/gpu.py [--budget 480] [--out DIR] [--dir DIR] [CELL...]

Needs PyTorch, and a wheel of this project; nothing else of it. Each cell appends its rows to
`DIR/gpu.json` when it ends, and is skipped if they are there, so a run that was interrupted goes on.
A cell does not begin if the budget of seconds is spent. The tables are written to `DIR/gpu.md`.

With `--emulated` the cells run over the emulated device of `make wheel-device`, in small, to test
this script: those rates say nothing about GPUs.
"""

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from gpu_cells import copies, correctness, loads, prefill, probe
from gpu_cells.rig import Rig

Rows = list[dict[str, Any]]
# In the order in which they run: the most useful cells are first.
CELLS: dict[str, Callable[[Rig], Rows]] = {
    "machine": probe.machine,
    "link": probe.link,
    "correctness": correctness.moves,
    "disk": probe.disk,
    "copies": copies.ways,
    "store": loads.store,
    "prefill": prefill.times,
    "interference": copies.interference,
}
# Rows of these cells are the limits with which other cells compare.
LIMITS = {"link": "direction", "disk": "op"}


class Report:
    """The rows of all cells, in a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "gpu.json"
        self.cells: dict[str, Rows] = (
            json.loads(self._path.read_text())["cells"] if self._path.exists() else {}
        )

    def add(self, cell: str, rows: Rows) -> None:
        self.cells[cell] = rows
        report = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": " ".join(["benches/gpu.py", *sys.argv[1:]]),
            "cells": self.cells,
        }
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(report, indent=1))
        written.replace(self._path)
        self._folder.joinpath("gpu.md").write_text(_page(report))


def _page(report: dict[str, Any]) -> str:
    parts = [f"Measured on {report['date']} by `{report['command']}`."]
    for cell, rows in report["cells"].items():
        parts.append(f"## {cell}\n\n{_table(rows)}")
    return "\n\n".join(parts) + "\n"


def _table(rows: Rows) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_shown(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _limits(rig: Rig, report: Report) -> None:
    """Takes the limits from the report, where an earlier run measured them."""
    for row in report.cells.get("link", []):
        rig.link[row["direction"]] = row["gb_s"] * 1e9
    for row in report.cells.get("disk", []):
        rig.link[f"disk {row['op']}"] = row["gb_s"] * 1e9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--budget", type=float, default=480, help="seconds (default 480)")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--dir", type=Path, help="where stores are written (default: a new folder)")
    parser.add_argument("--emulated", action="store_true")
    args = parser.parse_args()
    if unknown := [cell for cell in args.cells if cell not in CELLS]:
        parser.error(f"no cell {unknown[0]}: choose of {', '.join(CELLS)}")
    began = monotonic()
    report = Report(args.out)
    failed: list[str] = []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        staging = (64 << 20) if args.emulated else (2 << 30)
        rig = Rig.open(Path(folder), emulated=args.emulated, staging=staging)
        for cell in args.cells or CELLS:
            if cell in report.cells:
                continue
            if monotonic() - began > args.budget:
                print(f"{cell}: no time left; run again to go on", file=sys.stderr)
                failed.append(cell)
                continue
            _limits(rig, report)
            started = monotonic()
            try:
                rows = CELLS[cell](rig)
            except Exception:
                traceback.print_exc()
                failed.append(cell)
                continue
            report.add(cell, rows)
            print(f"{cell}: {monotonic() - started:.1f} s\n{_table(rows)}", flush=True)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
