"""Measures a store over several throttled disks, compared with the sum of the disks' rates.

Makes loop devices with ext4, limits reads and writes of each with a cgroup (v1, as root), and runs
`ritornello bench store --paths` on them, for each number of disks:

    python -m benches.volumes [--volumes 2,4] [--rate 250] [--full] [--dir DIR] [--json]

The devices' files are sparse. With the default `--total` they take up to about 7 GiB in DIR (9 GiB
with `--full`), and are written at the sum of the rates: where the disk is slower than this sum,
name a directory in memory, such as /dev/shm.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from servers.loop_device import (
    DeviceUnavailableError,
    Disk,
    Throttle,
    check_disks,
    check_throttle,
)

ROOT = Path(__file__).resolve().parents[1]
# Heads of the table's columns. `sum` is the raw rate of all disks at the same time, of writes or of
# reads.
COLUMNS = (
    "disks",
    "call size",
    "put GiB/s",
    "put / sum",
    "get GiB/s",
    "get / sum",
    "sum, write GiB/s",
    "sum, read GiB/s",
)
# Size of the loop devices: `SPACE` times `--total` (`SPACE_FULL` with `--full`), divided equally,
# plus `DEVICE_MIB` MiB for each device.
SPACE, SPACE_FULL, DEVICE_MIB = 3.5, 4.5, 256


def bench(disks: Sequence[Disk], throttle: Throttle, given: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark in the cgroup. Returns its report."""
    paths = ",".join(str(disk.path) for disk in disks)
    line = [str(given.ritornello), "bench", "store", "--json", "--paths", paths]
    line += ["--total", given.total, "--call-bytes", given.call_bytes, "--runs", str(given.runs)]
    line += ["--full"] if given.full else []
    # Move the program into the cgroup before it starts: the kernel throttles I/O by the cgroup that
    # the issuing thread is in at that time.
    done = subprocess.run(
        line,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: throttle.add(os.getpid()),
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} failed")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def measure(count: int, given: argparse.Namespace) -> dict[str, Any]:
    """Makes `count` disks, and returns the report on them."""
    space = SPACE_FULL if given.full else SPACE
    size = int(mebibytes(given.total) * space) // count + DEVICE_MIB
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory("-volumes", dir=given.dir))
        disks = []
        for number in range(count):
            disks.append(Disk(Path(folder) / f"disk-{number}", size))
            undo.callback(disks[-1].detach)
        throttle = Throttle(disks, "volumes")
        undo.callback(throttle.remove)
        throttle.limit(given.rate * 10**6, given.rate * 10**6)
        return {"disks": count, **bench(disks, throttle, given)}


def mebibytes(size: str) -> int:
    """Returns a size such as `2GiB` in MiB."""
    number, unit = size[:-3], size[-3:]
    if not number.isdecimal() or unit not in ("MiB", "GiB"):
        raise argparse.ArgumentTypeError(f"{size}: expected a size such as 512MiB or 2GiB")
    return int(number) << (10 if unit == "GiB" else 0)


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Returns the figures as a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for report in reports:
        total = report["sum"]
        for calls in report["calls"]:
            figures = [calls[what][of] for what in ("put", "get") for of in ("gib_s", "ratio")]
            figures += [total["write_gib_s"], total["read_gib_s"]]
            head = (str(report["disks"]), f"{calls['call_bytes'] >> 20} MiB")
            lines.append((*head, *(f"{figure:.2f}" for figure in figures)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--volumes", default="2,4", help="numbers of disks, separated by commas (default: 2,4)"
    )
    parser.add_argument("--rate", type=int, default=250, help="MB/s of each disk (default: 250)")
    parser.add_argument(
        "--total", default="2GiB", help="bytes per measurement, in MiB or GiB (default: 2GiB)"
    )
    parser.add_argument(
        "--call-bytes",
        default="256MiB,2GiB",
        help="bytes per call; separate several by commas (default: 256MiB,2GiB)",
    )
    parser.add_argument("--full", action="store_true", help="measure full stores, whose puts evict")
    parser.add_argument(
        "--runs", type=int, default=5, help="rounds; figures are medians (default: 5)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "build",
        help="directory of the disks' files (default: build)",
    )
    parser.add_argument(
        "--ritornello",
        type=Path,
        default=ROOT / ".venv/bin/ritornello",
        help="the command to run (default: .venv/bin/ritornello)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the reports as JSON instead of a table"
    )
    given = parser.parse_args()
    try:
        mebibytes(given.total)
        check_disks()
        check_throttle()
        reports = [measure(int(count), given) for count in given.volumes.split(",")]
    except (argparse.ArgumentTypeError, DeviceUnavailableError) as error:
        parser.error(str(error))
    print(json.dumps(reports) if given.json else table(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
