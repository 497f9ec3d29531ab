"""Measures puts to and gets from a store on throttled disks of different rates, call by call: the
first put gives the disks equal shares, later puts give shares by the rates that the store has
measured.

Makes loop devices with ext4 and limits them with a cgroup (v1, as root):

    python -m benches.uneven_volumes [--rates 400,100] [--calls 8] [--dir DIR]

The devices' files in DIR are sparse, and take the space of the pages that are put, of an index and
of the file systems.
"""

import argparse
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import ritornello as rt
from servers.loop_device import (
    BLKIO,
    READS,
    WRITES,
    DeviceUnavailableError,
    Disk,
    Throttle,
    check_disks,
    check_throttle,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE_BYTES = 8 << 20
PAGES = 32
CALL_BYTES = PAGES * PAGE_BYTES
# Capacity of the store as a multiple of the bytes of all puts. The store must not fill up: the
# disks of a full store hold equal shares, whatever their rates.
SPACE = 2


def keys_of(call: int) -> list[bytes]:
    return [b"%016d%016d" % (call, page) for page in range(PAGES)]


def measure(disks: Sequence[Disk], calls: int) -> dict[str, list[int]]:
    """Returns the rate of each put, with its flush, and of each get, in MB/s."""
    scope = rt.Scope.opaque("uneven volumes", PAGE_BYTES, chained=True)
    memory = mmap.mmap(-1, CALL_BYTES)
    pages = [memoryview(memory)[page * PAGE_BYTES :][:PAGE_BYTES] for page in range(PAGES)]
    for page in pages:
        page[:] = os.urandom(PAGE_BYTES)
    capacity = SPACE * calls * CALL_BYTES
    rates: dict[str, list[int]] = {"put": [], "get": []}
    with rt.Store.open([str(disk.path / "kv") for disk in disks], capacity=capacity) as store:
        for what, measured in rates.items():
            for call in range(calls):
                began = time.monotonic()
                if what == "put":
                    moved = store.put_batch(scope, keys_of(call), pages)
                    store.flush()
                else:
                    moved = store.get_batch(scope, keys_of(call), pages)
                if moved != PAGES:
                    raise SystemExit(f"{what} {call} moved {moved} of {PAGES} pages")
                measured.append(round(CALL_BYTES / 1e6 / (time.monotonic() - began)))
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--rates",
        default="400,100",
        help="MB/s of each disk, separated by commas (default: 400,100)",
    )
    parser.add_argument(
        "--calls", type=int, default=8, help="number of puts and of gets (default: 8)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "build",
        help="directory of the disks' files (default: build)",
    )
    given = parser.parse_args()
    rates = [int(rate) for rate in given.rates.split(",")]
    # MiB of each disk: room for the pages of all puts, which a single disk may get, and 1 GiB for a
    # segment, the index and the file system.
    size = (given.calls * CALL_BYTES >> 20) + 1024
    try:
        check_disks()
        check_throttle()
        with ExitStack() as undo:
            folder = undo.enter_context(tempfile.TemporaryDirectory("-volumes", dir=given.dir))
            disks = []
            for number in range(len(rates)):
                disks.append(Disk(Path(folder) / f"disk-{number}", size))
                undo.callback(disks[-1].detach)
            throttle = Throttle(disks, "uneven")
            undo.callback(throttle.remove)
            for disk, rate in zip(disks, rates, strict=True):
                for file in (WRITES, READS):
                    (throttle.group / file).write_text(f"{disk.number()} {rate * 10**6}")
            throttle.add(os.getpid())
            undo.callback((BLKIO / "cgroup.procs").write_text, str(os.getpid()))
            found = measure(disks, given.calls)
    except DeviceUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"disks of {given.rates} MB/s, {sum(rates)} in all; calls of {CALL_BYTES >> 20} MiB:")
    for what, measured in found.items():
        print(what, *measured, "MB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
