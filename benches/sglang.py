"""Compares Ritornello with SGLang's file backend, called by SGLang's controller functions:

    build/env/sglang/bin/python benches/sglang.py [--json FILE] [--dir DIR] [--total 1GiB]

Each call moves 128 pages of a real host pool, as SGLang's calls do. The file backend gets copies of
pages (`_generic_page_set/get`), Ritornello the pool's memory (`_page_set/get_zero_copy`).
Rows: `system`, `object_bytes`, `op`, `mb_s`, `p50_us`, `cpu_s_gib` (seconds of processor time per
GiB: 1074 divided by this number is the MB/s that one idle core allows). `p50_us` is the median
duration of a call in microseconds. Exceptions: of `put_synced`, the duration of all calls with the
sync; of `transfer_cold`, the duration of the operation divided by the number of its batches.
Operations:

    put           until the calls return: then the file backend's bytes are in the page cache,
                  Ritornello's are on the disk
    put_synced    `put`, then the bytes are made durable: `fsync` of every file, or `flush`
    get_cold      the file backend's files are dropped from the page cache before; Ritornello does
                  not use the page cache
    transfer_cold the pages of `get_cold`, dropped from the page cache again, in one operation of
                  SGLang for all batches (`_page_transfer`); Ritornello reads the next batch ahead
    exists        `batch_exists` of the keys of 128 stored pages

`disk` is the limit in the same rounds: four threads move the pool's memory in direct operations of
1 MiB. Systems take turns, round by round; each figure of a row is its median over the rounds.
The printed `ratio` is Ritornello's rate divided by the file backend's rate; of `exists`, the file
backend's duration divided by Ritornello's.
"""

import argparse
import json
import logging
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")
ROOT = Path(__file__).resolve().parents[1]
# Replace this folder on the module path: otherwise `import sglang` would find this file instead of
# the package.
sys.path[:1] = [str(ROOT / "tests/engines/sglang"), str(ROOT)]

import torch  # noqa: E402
from hosts import config, controller, fill, mha, operation, slots  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile  # noqa: E402

from benches.disk_limit import OPERATION, DiskLimit  # noqa: E402
from ritornello.connector.identity import ModelIdentity  # noqa: E402
from ritornello.sglang import RitornelloStorage, storage  # noqa: E402
from ritornello.sglang.identity import Engine  # noqa: E402

# Number of pages of a call, and number of calls of `exists` in a round.
BATCH = 128
EXISTS = 200
# Arguments of `mha` in tests/engines/sglang/hosts.py: Qwen2.5-0.5B with pages of 16
# tokens, Llama-3.2-1B with pages of 8, Llama-3-8B with pages of 64.
SHAPES: dict[str, dict[str, Any]] = {
    "192 KiB": {"page": 16, "layers": (0, 24), "heads": 2, "head_dim": 64},
    "256 KiB": {"page": 8, "layers": (0, 16), "heads": 8, "head_dim": 64},
    "8 MiB": {"page": 64, "layers": (0, 32), "heads": 8, "head_dim": 128},
}
Row = dict[str, Any]


class System:
    """A backend under SGLang's controller, and how its bytes are made durable."""

    name: str

    def __init__(self, host: Any, backend: Any) -> None:
        self.host, self.backend = host, backend
        backend.register_mem_pool_host(host)
        self.control = controller(host, backend)
        self.control.prefetch_sync_queue = SimpleNamespace(put=lambda report: None)

    def sync(self) -> None: ...
    def drop_cache(self) -> None: ...
    def clear(self) -> None:
        self.backend.clear()


class Files(System):
    name = "hicache_file"

    def __init__(self, host: Any, folder: Path) -> None:
        self.folder = folder
        super().__init__(host, HiCacheFile(config({}), str(folder)))
        self.put = self.control._generic_page_set
        self.get = self.control._generic_page_get

    def sync(self) -> None:
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def drop_cache(self) -> None:
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Ritornello(System):
    name = "ritornello"

    def __init__(self, host: Any, folder: Path, capacity: int) -> None:
        extra = {"path": str(folder), "capacity": capacity, "interface_v1": 1}
        super().__init__(host, RitornelloStorage(config(extra), {}))
        self.put = self.control._page_set_zero_copy
        self.get = self.control._page_get_zero_copy

    def sync(self) -> None:
        store = self.backend._store._store
        assert store is not None
        store.flush()


def hashes(name: str, pages: int) -> list[str]:
    found, last = [], name.encode()
    for _ in range(pages):
        last = sha256(last).digest()
        found.append(last.hex())
    return found


def batches(keys: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(keys), BATCH):
        yield keys[at : at + BATCH]


@dataclass
class Calls:
    """Seconds of each call, and processor seconds of all calls together."""

    seconds: list[float]
    cpu: float

    @property
    def total(self) -> float:
        return sum(self.seconds)


def timed(calls: Iterator[Callable[[], Any]]) -> Calls:
    """Times the calls; every call must succeed."""
    seconds, cpu = [], process_time()
    for call in calls:
        begun = perf_counter()
        done = call()
        seconds.append(perf_counter() - begun)
        assert done, "a call did not process its whole batch"
    return Calls(seconds, process_time() - cpu)


def check(system: System, batches: int) -> None:
    """The first `BATCH` pages of the host pool hold the bytes that were put. Asserts that each of
    the next `batches` batches of pages has the same bytes, and clears all pages after the first
    batch.
    """
    memory = system.host.kv_buffer.view(torch.int16)
    for n in range(1, batches + 1):
        same = torch.equal(memory[:, :BATCH], memory[:, n * BATCH : (n + 1) * BATCH])
        assert same, f"{system.name} returned wrong bytes"
    memory[:, BATCH:] = 0


def round_of(system: System, name: str, pages: int, page_bytes: int) -> list[Row]:
    host, keys = system.host, hashes(name, pages)
    at = slots(host, list(range(BATCH)))
    nothing, others = (slots(host, list(range(n * BATCH, (n + 1) * BATCH))) for n in (1, 2))
    put = timed(lambda b=batch: system.put(b, at) for batch in batches(keys))
    begun, cpu = perf_counter(), process_time()
    system.sync()
    synced = put.total + perf_counter() - begun
    synced_cpu = put.cpu + process_time() - cpu
    system.drop_cache()
    get = timed(
        lambda b=batch: system.get(operation(), b, nothing) == len(b) for batch in batches(keys)
    )
    check(system, 1)
    system.drop_cache()
    whole = operation()
    whole.hash_value, whole.prefix_keys = keys, None
    # Ritornello reads up to two batches at a time, so the batches alternate between two ranges of
    # slots.
    whole.host_indices = torch.cat([nothing, others] * (pages // BATCH))[: pages * host.page_size]
    system.control.page_get_func = system.get
    transfer = timed(iter([lambda: system.control._page_transfer(whole) == pages]))
    check(system, min(pages // BATCH, 2))
    asked = keys[:BATCH]
    exists = timed(lambda: system.backend.batch_exists(asked) == len(asked) for _ in range(EXISTS))
    system.clear()
    size = pages * page_bytes

    def row(op: str, calls: Calls, moves: bool = True, batches: int = 1) -> Row:
        return {
            "system": system.name,
            "object_bytes": page_bytes,
            "op": op,
            "mb_s": size / 1e6 / calls.total if moves else None,
            "p50_us": median(calls.seconds) / batches * 1e6,
            "cpu_s_gib": calls.cpu / size * (1 << 30) if moves else None,
        }

    return [
        row("put", put),
        row("put_synced", Calls([synced], synced_cpu)),
        row("get_cold", get),
        row("transfer_cold", transfer, batches=pages // BATCH),
        row("exists", exists, moves=False),
    ]


class Disk:
    """The limit: one file, written from the pool's memory and read into it by plain system calls.
    Reads return the bytes that the writes before them wrote, so the pool is unchanged.
    """

    name = "disk"

    def __init__(self, host: Any, path: Path, page_bytes: int, total: int) -> None:
        pool = memoryview(host.kv_buffer.view(-1).view(torch.uint8).numpy())
        start = -host.kv_buffer.data_ptr() % mmap.PAGESIZE
        size = min(len(pool) - start, total) // OPERATION * OPERATION
        self.memory = pool[start : start + size]
        self.page_bytes = page_bytes
        self.passes = max(total // size, 1)
        self.limit = DiskLimit(path, size)
        # Unmeasured: the first write to preallocated space also writes metadata.
        self.limit.write(self.memory)

    def round(self) -> list[Row]:
        moved, rows = self.passes * len(self.memory), []
        for op, move in (("put", self.limit.write), ("get_cold", self.limit.read)):
            cpu = process_time()
            seconds = sum(move(self.memory) for _ in range(self.passes))
            rows.append(
                {
                    "system": self.name,
                    "object_bytes": self.page_bytes,
                    "op": op,
                    "mb_s": moved / 1e6 / seconds,
                    "p50_us": None,
                    "cpu_s_gib": (process_time() - cpu) / moved * (1 << 30),
                }
            )
        return rows


def medians(rounds: list[list[Row]]) -> list[Row]:
    found = []
    for rows in zip(*rounds, strict=True):
        made = dict(rows[0])
        for name in ("mb_s", "p50_us", "cpu_s_gib"):
            if made[name] is not None:
                made[name] = round(median(row[name] for row in rows), 3)
        found.append(made)
    return found


def measure(folder: Path, total: int, rounds: int) -> list[Row]:
    found: list[Row] = []
    for name, shape in SHAPES.items():
        host = mha("page_first_direct", pages=3 * BATCH, **shape)
        fill(host, 1)
        page_bytes = host.size_per_token * host.page_size
        pages = max(total // page_bytes // BATCH, 1) * BATCH
        files = Files(host, folder / f"files {name}")
        ours = Ritornello(host, folder / f"store {name}", 2 * pages * page_bytes + (1 << 30))
        disk = Disk(host, folder / "disk", page_bytes, pages * page_bytes)
        taken: dict[str, list[list[Row]]] = {disk.name: [], files.name: [], ours.name: []}
        try:
            for number in range(rounds):
                taken[disk.name].append(disk.round())
                for system in (files, ours):
                    host.kv_buffer[:, BATCH:] = 0
                    prompt = f"{name} {number}"
                    taken[system.name].append(round_of(system, prompt, pages, page_bytes))
        finally:
            disk.limit.close()
            ours.backend.close()
        for rows in taken.values():
            found += medians(rows)
    return found


def show(rows: list[Row]) -> None:
    print(
        f"{'system':14}{'object':>10}{'op':>14}{'MB/s':>10}{'p50 us':>12}"
        f"{'ratio':>8}{'cpu s/GiB':>10}"
    )
    other = {(row["object_bytes"], row["op"]): row for row in rows if row["system"] == Files.name}
    for row in rows:
        rate = f"{row['mb_s']:.0f}" if row["mb_s"] is not None else ""
        ratio = ""
        if row["system"] == Ritornello.name:
            file = other[(row["object_bytes"], row["op"])]
            ratio = f"{file['p50_us'] / row['p50_us']:.1f}"
            if row["mb_s"] is not None:
                ratio = f"{row['mb_s'] / file['mb_s']:.1f}"
        size = f"{row['object_bytes'] // 1024} KiB"
        cpu = f"{row['cpu_s_gib']:.2f}" if row["cpu_s_gib"] is not None else ""
        p50 = f"{row['p50_us']:.0f}" if row["p50_us"] is not None else ""
        print(f"{row['system']:14}{size:>10}{row['op']:>14}{rate:>10}{p50:>12}{ratio:>8}{cpu:>10}")


def bytes_of(text: str) -> int:
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return int(text[:-3]) * units[text[-3:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "build",
        help="a directory on the disk to measure (default: build)",
    )
    parser.add_argument(
        "--total",
        type=bytes_of,
        default=1 << 30,
        help="bytes of each page size per round, in KiB, MiB or GiB (default 1GiB)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each system (default 3)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    # No engine runs in this process, so this description replaces the description that SGLang
    # publishes.
    storage.engine_of = lambda said: Engine(  # type: ignore[assignment]
        "bench", ModelIdentity("bench", b"bench"), 0, (0, 1), (0, 1), (0, 1), False
    )
    folder = Path(tempfile.mkdtemp(prefix="bench-sglang-", dir=options.dir))
    try:
        rows = measure(folder, options.total, options.rounds)
    finally:
        shutil.rmtree(folder)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
