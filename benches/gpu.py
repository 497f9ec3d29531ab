"""Measures the data path between a store and the memory of a GPU.

    python3 benches/gpu.py [--budget 480] [--out DIR] [--dir DIR] [CELL...]

Needs PyTorch, a wheel of this project, and the folder `benches`. A cell is one benchmark. The rows
of a cell are written to `OUT/gpu.json` when it ends without an error, and a cell whose rows the
file has is skipped: after an interruption, run the same command again. No cell begins once the
budget of seconds is spent. The tables are in `OUT/gpu.md`.

With `--emulated` the cells move fewer bytes, over the emulated device of `make emulated`, to test
this script: the measured rates say nothing about GPUs.
"""

# ruff: noqa: E402
import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

# Replace this folder on the module path: `import sglang` would find the file sglang.py in this
# folder instead of the package.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benches.gpu_cells import copies, correctness, loads, prefill, probe
from benches.gpu_cells.report import Report
from benches.gpu_cells.rig import GIB, Rig, Rows

# The cells, in the order in which they run: the most useful first. `link` and `disk` measure the
# limits with which later cells compare their rates.
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


def measure(cells: Sequence[str], rig: Rig, report: Report, budget: float) -> list[str]:
    """Runs the cells that the report lacks. Returns the cells that failed, or did not begin within
    `budget` seconds.
    """
    deadline = monotonic() + budget
    missing: list[str] = []
    for cell in cells:
        if cell in report.cells:
            continue
        began = monotonic()
        if began > deadline:
            print(f"{cell}: no time left; run the command again to continue", file=sys.stderr)
            missing.append(cell)
            continue
        rig.limits = report.limits()
        try:
            rows = CELLS[cell](rig)
        except Exception:
            traceback.print_exc()
            missing.append(cell)
            continue
        report.add(cell, rows)
        print(f"{cell}: {monotonic() - began:.1f} s\n{report.table(cell)}", flush=True)
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cells",
        nargs="*",
        metavar="CELL",
        help=f"cells to run (default: all of {', '.join(CELLS)})",
    )
    parser.add_argument(
        "--budget", type=float, default=480, help="seconds after which no cell begins (default 480)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-report"),
        help="folder of the report (default gpu-report)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="a directory on the disk to measure (default: the system's directory for temporary "
        "files)",
    )
    parser.add_argument("--emulated", action="store_true", help="measure the emulated device")
    args = parser.parse_args()
    if unknown := [cell for cell in args.cells if cell not in CELLS]:
        parser.error(f"unknown cell {unknown[0]}: choose from {', '.join(CELLS)}")
    command = " ".join(["benches/gpu.py", *sys.argv[1:]])
    report = Report(args.out, "gpu", command, {"correctness": correctness.by_layout})
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        staging = (64 << 20) if args.emulated else 2 * GIB
        rig = Rig.open(Path(folder), emulated=args.emulated, staging=staging)
        missing = measure(args.cells or list(CELLS), rig, report, args.budget)
    if missing:
        print(f"not measured: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
