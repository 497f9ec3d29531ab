"""Compares Ritornello with LMCache's own file adapter (`fs_native`, O_DIRECT).

    build/env/lmcache/bin/python benches/lmcache.py [--json FILE] [--dir DIR] [--rounds N]
        [--object-kib 256|8192]

Uses the functions of `lmcache bench l2`. All adapters get the same keys and memory, and write to
the same disk. They take turns in every round, in an order that changes with the round. Every byte
that an adapter loads is compared.
A row: `system`, `memory`, `object_bytes`, `op`, `mb_s` (10^6 bytes per second in the median round;
null for a lookup), `p50_us` (duration of the median round, or of the median lookup), `cpu_s_gib`
(processor seconds of all threads per GiB, the median of the rounds; null for a lookup).
`ritornello, full` is a store that has written its whole capacity before, like a store in use: its
puts overwrite evicted objects. `disk` is the limit in the same rounds: four threads move the same
number of bytes in operations of 1 MiB. The threads overwrite and read one file, from and into
LMCache's memory (`disk, in place`) and huge pages (`disk, huge pages`). From LMCache's memory they
also write newly allocated space (`disk, new space`), as new stores and new files do.
"""

# ruff: noqa: E402
import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

# Replace this folder on the module path: otherwise `import lmcache` would find this file instead of
# the package.
sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    make_object_keys,
)
from lmcache.cli.commands.bench.l2_adapter_bench.runner import (
    bench_load,
    bench_lookup,
    bench_store,
)
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

from benches.disk_limit import DiskLimit
from benches.engines import table
from servers.lmcache import adapter_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ALIGN = 4096
# Bytes of an object, and number of objects that a call moves: 16 MiB in the first shape; 128 MiB,
# like a long prompt, in the second.
SHAPES = ((256 * KIB, 64), (8 * MIB, 16))
FULL = "ritornello, full"
# Number of lookups of the same keys in a round.
LOOKUPS = 10
# Capacity of each of Ritornello's stores, and bytes that are put into `ritornello, full` before the
# measurement.
CAPACITY, FILLING = "4GiB", 5 << 30
OPERATIONS = ("put", "lookup", "load")
# Names of LMCache's memory, which all adapters use, and of memory that only `disk` uses.
L1, HUGE = "L1", "huge pages"


@dataclass
class System:
    """One adapter, or the disk if `adapter` is None. `seconds`: durations of rounds, or of single
    lookups, by operation. `cpu`: processor seconds of rounds by operation.
    """

    name: str
    adapter: Any
    memory: str = L1
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {operation: [] for operation in OPERATIONS}
    )
    cpu: dict[str, list[float]] = field(
        default_factory=lambda: {operation: [] for operation in OPERATIONS}
    )

    def timed(
        self, operation: str, move: Callable[[memoryview], float], memory: memoryview
    ) -> None:
        """Adds the seconds and processor seconds of one call of `move`."""
        busy = process_time()
        self.seconds[operation].append(move(memory))
        self.cpu[operation].append(process_time() - busy)


class Disk:
    """The limit: one file, written from memory and read into memory by plain system calls."""

    def __init__(self, path: Path, l1: memoryview) -> None:
        self.limit = DiskLimit(path, l1.nbytes)
        self.l1 = l1
        self.again = [
            (System("disk, in place", None), l1),
            (System("disk, huge pages", None, HUGE), huge(l1.nbytes)),
        ]
        self.new = System("disk, new space", None)

    def round(self) -> None:
        for system, memory in self.again:
            system.timed("put", self.limit.write, memory)
            system.timed("load", self.limit.read, memory)
        self.new.timed("put", self.limit.write_new, self.l1)

    @property
    def systems(self) -> list[System]:
        return [system for system, _ in self.again] + [self.new]


def huge(nbytes: int) -> memoryview:
    memory = mmap.mmap(-1, nbytes + 2 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 * MIB)
    view = memoryview(memory)[start : start + nbytes]
    view[:] = os.urandom(MIB) * (nbytes // MIB)
    return view


def open_adapter(spec: dict[str, Any], desc: Any) -> Any:
    arguments = argparse.Namespace(l2_adapter=[json.dumps(spec)])
    config = parse_args_to_l2_adapters_config(arguments)
    return create_l2_adapter(config.adapters[0], l1_memory_desc=desc)


def specs(folder: Path) -> dict[str, dict[str, Any]]:
    def ours(kind: str, name: str, **more: str) -> dict[str, Any]:
        # Permit weak hashes in the store's policy: the hashes of LMCache's benchmark have 16 bytes,
        # and the adapter otherwise refuses hashes of fewer than 32 bytes.
        path = folder / name
        path.mkdir()
        (path / "policy.toml").write_text("allow_weak_hashes = true")
        return adapter_of(path, kind, capacity=CAPACITY, **more)

    return {
        "fs_native": {
            "type": "fs_native",
            "base_path": str(folder / "files"),
            "use_odirect": True,
        },
        "ritornello": ours("plugin", "plugin"),
        # The policy is LRU, so that objects, each of which is used in one round or only put, are
        # evicted in the order of their puts.
        FULL: ours("plugin", "full", eviction="lru"),
        "ritornello (native_plugin)": ours("native_plugin", "native"),
    }


def fill(system: System, nbytes: int, count: int, buffer: torch.Tensor) -> None:
    """Puts `FILLING` bytes of objects that no round uses, more than the store's capacity, so that
    all its space was written once.
    """
    objects = make_memory_objects(buffer, count, nbytes, 0, fill_offset=0)
    rounds = FILLING // (count * nbytes)

    def keys(number: int) -> list[list[ObjectKey]]:
        return [make_object_keys(count, key_offset=FILLING + number * count)]

    moved = (1, count, nbytes, rounds, keys)
    stored = bench_store(system.adapter, *moved, lambda _: [objects], silent)
    if stored.total_success != stored.total_keys:
        raise SystemExit(f"{system.name}: the store could not be filled before the rounds")


def silent(text: str) -> None:
    pass


def round_of(system: System, number: int, nbytes: int, count: int, buffer: torch.Tensor) -> None:
    """Puts, looks up and loads objects that are new to the system."""
    keys = make_object_keys(count, key_offset=number * count)
    source = make_memory_objects(buffer, count, nbytes, 0, fill_offset=number)
    target = make_memory_objects(buffer, count, nbytes, count * nbytes, fill_offset=number + 1)

    adapter = system.adapter
    moved = (1, count, nbytes, 1, lambda _: [keys])
    calls: tuple[Callable[[], Any], ...] = (
        lambda: bench_store(adapter, *moved, lambda _: [source], silent),
        lambda: bench_lookup(adapter, 1, count, LOOKUPS, lambda _: [keys], silent),
        lambda: bench_load(adapter, *moved, lambda _: [target], silent),
    )
    for operation, call in zip(OPERATIONS, calls, strict=True):
        busy = process_time()
        result = call()
        system.cpu[operation].append(process_time() - busy)
        if result.total_success != result.total_keys:
            done = f"{result.success_counts} of {count} objects succeeded"
            raise SystemExit(f"{system.name}: {operation}: {done}")
        system.seconds[operation] += result.round_durations
    for _ in range(LOOKUPS):
        adapter.submit_unlock(keys)
    for number_of, (stored, loaded) in enumerate(zip(source, target, strict=True)):
        if not torch.equal(stored.raw_data, loaded.raw_data):
            raise SystemExit(f"{system.name}: object {number_of} was loaded with wrong bytes")


def measure(folder: Path, nbytes: int, count: int, rounds: int) -> list[dict[str, Any]]:
    buffer = make_aligned_tensor(2 * count * nbytes, ALIGN)
    buffer.zero_()
    desc = create_l1_memory_desc(buffer, align_bytes=ALIGN)
    systems = [System(name, open_adapter(spec, desc)) for name, spec in specs(folder).items()]
    moved = count * nbytes
    disk = Disk(folder / "disk", memoryview(buffer.numpy())[:moved])
    try:
        fill(next(system for system in systems if system.name == FULL), nbytes, count, buffer)
        for number in range(rounds + 1):
            turn = number % len(systems)
            for system in systems[turn:] + systems[:turn]:
                round_of(system, number, nbytes, count, buffer)
            disk.round()
    finally:
        disk.limit.close()
        for system in systems:
            system.adapter.close()
    rows = []
    for system in systems + disk.systems:
        for operation in OPERATIONS:
            if not system.seconds[operation]:
                continue
            # Leave out the first round, which creates files and scopes.
            warm_up = LOOKUPS if operation == "lookup" else 1
            median = statistics.median(system.seconds[operation][warm_up:])
            moves = operation != "lookup"
            busy = statistics.median(system.cpu[operation][1:])
            rows.append(
                {
                    "system": system.name,
                    "memory": system.memory,
                    "object_bytes": nbytes,
                    "op": operation,
                    "mb_s": round(moved / median / 1e6, 1) if moves else None,
                    "p50_us": round(median * 1e6, 1),
                    "cpu_s_gib": round(busy / moved * GIB, 3) if moves else None,
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--dir", default="build", help="a directory on the disk to measure (default build)"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="rounds of each system, after one warm-up (default 9)"
    )
    parser.add_argument(
        "--object-kib",
        type=int,
        help="objects of this size in KiB only: 256 or 8192 (default both)",
    )
    given = parser.parse_args()
    rows = []
    Path(given.dir).mkdir(parents=True, exist_ok=True)
    for nbytes, count in SHAPES:
        if given.object_kib not in (None, nbytes // KIB):
            continue
        folder = Path(tempfile.mkdtemp(prefix="bench-lmcache-", dir=given.dir))
        try:
            rows += measure(folder, nbytes, count, given.rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        given.json.write_text(json.dumps(rows) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
