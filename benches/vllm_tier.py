"""Compares secondary tiers of vLLM, `RitornelloTier` and vLLM's own `fs`, by the same interface.

    build/env/vllm/bin/python benches/vllm_tier.py --dir build/bench [--json [FILE]]

Chunks go from a host tier in memory to the secondary tier's storage and back, and their bytes are
compared. Systems take turns within a round. A figure is the median of the rounds; a figure of
`lookup` is the median of all lookups, 20 in each round. `lookup`: time on the scheduler's thread
for each key (`us_per_key`) and in all (`p50_us`), for requests of at most 256 stored keys.
`wall_us`: time until a request has all its answers, if its lookups are repeated without a pause.
`submit_us`: CPU time of one job on the scheduler's thread; its wall time is longer if threads that
move bytes use the cores. `disk` is the limit in the same rounds: four threads move the same number
of bytes of one file in operations of 1 MiB, from and into the host tier's memory.

`--memory` is the memory of the host tier: `shm` (vLLM's own: a file in /dev/shm, in pages of 4 KiB;
on some disks `RitornelloTier` loads chunks through the store's staging memory), `in_place` (as
`shm`, but never through staging), `collapsed` (as `in_place`, but the file's pages are huge pages),
`huge` (anonymous memory in huge pages, which a host tier could use).
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benches.disk_limit import DiskLimit
from benches.host_memory import Host
from benches.tier_stand_ins import (
    CHUNK_TOKENS,
    FullAttentionSpec,
    Request,
    engine_of,
    sequence,
    spec_of,
)
from servers.child import owner_of

MIB = 1 << 20
# Maximum number of chunks of one store job or load job, and of keys of one request's lookups.
JOB_CHUNKS = 16
LOOKUP_KEYS = 256


def ours(folder: Path, host: Host, rounds: int = 1) -> Any:
    """Returns a `RitornelloTier`, which finds the engine's configuration on this function's stack
    frame. Its store holds the chunks of all rounds: a full store may evict new chunks first.
    """
    from ritornello.vllm import RitornelloTier

    settings: dict[str, Any] = {}
    vllm_config = engine_of(settings)
    caches = SimpleNamespace(kv_cache_spec=FullAttentionSpec())
    kv_cache_config = SimpleNamespace(kv_cache_groups=[caches])
    tier = RitornelloTier(
        spec_of(settings),
        host.view,
        "RitornelloTier",
        path=str(folder / "ritornello"),
        capacity=f"{(rounds + 1) * host.rows.nbytes // MIB * 5 // 4 + 512}MiB",
    )
    assert tier._tier is not None, (vllm_config, kv_cache_config)
    assert tier._tier._rows is not None
    # Do not look for changed weights: without an engine the weights cannot change.
    tier._tier._guard = None
    if host.kind == "shm":
        print(f"loads go through staging: {tier._tier._rows.staged}", file=sys.stderr)
    else:
        tier._tier._rows.staged = False
    return tier


def fs(folder: Path, host: Host) -> Any:
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    return FileSystemTierManager(spec_of({}), host.view, "fs", root_dir=str(folder / "fs"))


class Bench:
    def __init__(self, host: Host) -> None:
        self.host = host

    def transfer(self, tier: Any, keys: Sequence[bytes], *, load: bool) -> dict[str, float]:
        """Stores or loads the chunks of all keys, in jobs of `JOB_CHUNKS` chunks. All jobs are
        submitted before the first result is awaited.
        """
        from vllm.v1.kv_offload.tiering.base import TransferJob

        begun, busy = time.perf_counter(), cpu()
        submitted: list[float] = []
        for first in range(0, len(keys), JOB_CHUNKS):
            part = list(keys[first : first + JOB_CHUNKS])
            ends = {key: (place + 1) * CHUNK_TOKENS for place, key in enumerate(part)}
            request = Request(f"job-{uuid.uuid4().hex}", None, ends)
            rows = np.arange(first, first + len(part), dtype=np.int32)
            job = TransferJob(first, part, rows, load, request)
            at = time.thread_time()
            (tier.submit_load if load else tier.submit_store)(job)
            submitted.append(time.thread_time() - at)
        jobs = -(-len(keys) // JOB_CHUNKS)
        failed, left = 0, jobs
        while left:
            for result in tier.get_finished_jobs():
                left -= 1
                failed += not result.success
            time.sleep(0.0005)
        seconds = time.perf_counter() - begun
        assert not failed, f"{failed} jobs failed"
        moved = len(keys) * self.host.rows.shape[1]
        return {
            "mb_s": moved / seconds / 1e6,
            "cpu_s_gib": (cpu() - busy) / (moved / (1 << 30)),
            "submit_us": statistics.median(submitted) * 1e6,
        }

    def disk(self, move: Callable[[memoryview], float]) -> dict[str, float]:
        """Measures `move`, which writes or reads a file, with the memory of the whole host tier."""
        busy = cpu()
        rows = memoryview(self.host.rows).cast("B")
        seconds = move(rows)
        return {
            "mb_s": rows.nbytes / seconds / 1e6,
            "cpu_s_gib": (cpu() - busy) / (rows.nbytes / (1 << 30)),
        }

    def lookup(self, tier: Any, keys: list[bytes]) -> dict[str, float]:
        """Looks up all keys in one request, and repeats the lookups until no answer is "retry"."""
        from vllm.v1.kv_offload.base import LookupResult

        ends = {key: (place + 1) * CHUNK_TOKENS for place, key in enumerate(keys)}
        request = Request(f"look-{uuid.uuid4().hex}", None, ends)
        tier.on_new_request(request)
        begun = time.perf_counter()
        spent, steps = 0.0, 0
        while True:
            at = time.perf_counter()
            answers = {tier.lookup(key, request) for key in keys}
            tier.on_schedule_end(None)
            spent += time.perf_counter() - at
            steps += 1
            if LookupResult.RETRY not in answers:
                break
            time.sleep(0)
        wall = time.perf_counter() - begun
        assert answers == {LookupResult.HIT}, answers
        tier.on_request_finished(request)
        # In an engine a step takes more time than a lookup, so a request has the answer "retry" in
        # the first step only. The steps of this loop compute nothing, so several steps have this
        # answer. Charge the time of two average steps.
        charged = spent if steps == 1 else spent / steps * 2
        return {
            "us_per_key": charged / len(keys) * 1e6,
            "p50_us": charged * 1e6,
            "wall_us": wall * 1e6,
        }


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(
    folder: Path, makers: dict[str, Callable[[Path, Host], Any]], hosts: list[Host], rounds: int
) -> list[dict[str, Any]]:
    """Returns one row for each system, kind of memory and operation."""
    figures: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    tiers = [
        (name, host, make(folder / host.kind, host))
        for host in hosts
        for name, make in makers.items()
    ]
    limits = [(host, DiskLimit(folder / f"disk-{host.kind}", host.rows.nbytes)) for host in hosts]
    for turn in range(rounds):
        for host, limit in limits:
            for op, move in (("store", limit.write), ("load", limit.read)):
                found = Bench(host).disk(move)
                figures.setdefault(("disk", host.kind, op), []).append(found)
        for name, host, tier in tiers:
            bench, rows = Bench(host), host.rows
            _, keys = sequence(f"round {turn}", len(rows))
            expected = rows.copy()

            def note(op: str, found: dict[str, float], at: tuple[str, str]) -> None:
                figures.setdefault((*at, op), []).append(found)

            at = (name, host.kind)
            note("store", bench.transfer(tier, keys, load=False), at)
            rows[:] = 0
            note("load", bench.transfer(tier, keys, load=True), at)
            assert (rows == expected).all(), f"{name} returned wrong bytes"
            for _ in range(20):
                note("lookup", bench.lookup(tier, keys[:LOOKUP_KEYS]), at)
    for _, _, tier in tiers:
        tier.shutdown()
    for _, limit in limits:
        limit.close()
    for left in folder.iterdir():
        shutil.rmtree(left)
    return [
        {
            "system": name,
            "memory": kind,
            "object_bytes": hosts[0].rows.shape[1],
            "op": op,
            **{what: median([one[what] for one in found]) for what in found[0]},
        }
        for (name, kind, op), found in figures.items()
    ]


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


def lookups_elsewhere(folder: Path, host: Host, rounds: int) -> list[dict[str, Any]]:
    """Measures lookups of keys whose positions in the prompt the tier does not know, and lookups in
    a store that another process owns.
    """
    bench = Bench(host)
    count = min(LOOKUP_KEYS, len(host.rows))
    _, keys = sequence("elsewhere", count)
    rows: list[dict[str, Any]] = []

    def row(name: str, tier: Any, look: Callable[[Any, list[bytes]], dict[str, float]]) -> None:
        found = [look(tier, keys) for _ in range(20 * rounds)]
        told = {what: median([one[what] for one in found]) for what in found[0]}
        shape = {"memory": host.kind, "object_bytes": host.rows.shape[1], "op": "lookup"}
        rows.append({"system": name, **shape, **told})

    def one_by_one(tier: Any, keys: list[bytes]) -> dict[str, float]:
        request = Request(f"single-{uuid.uuid4().hex}")
        tier.on_new_request(request)
        begun = time.perf_counter()
        for key in keys:
            tier.lookup(key, request)
        tier.on_schedule_end(None)
        spent = time.perf_counter() - begun
        tier.on_request_finished(request)
        return {
            "us_per_key": spent / len(keys) * 1e6,
            "p50_us": spent * 1e6,
            "wall_us": spent * 1e6,
        }

    tier = ours(folder, host)
    bench.transfer(tier, keys, load=False)
    row("ritornello, key by key", tier, one_by_one)
    path = tier._settings.store.path
    namespace = tier._tier._namespace
    tier.shutdown()
    with owner_of(path):
        tier = ours(folder, host)
        # The stand-in engine has dummy weights, so every tier begins a random epoch. This tier
        # takes the first tier's epoch, under which the keys were stored.
        tier._tier._set_namespace(namespace)
        row("ritornello, as client", tier, bench.lookup)
        tier.shutdown()
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("build/bench"),
        help="a directory on the disk to measure (default build/bench)",
    )
    parser.add_argument(
        "--total", type=int, default=512, help="MiB of chunks in the host tier (default 512)"
    )
    parser.add_argument(
        "--chunks",
        default="262144,2097152,8388608",
        help="sizes of chunks in bytes, separated by commas (default 262144,2097152,8388608)",
    )
    parser.add_argument(
        "--memory",
        default="shm",
        help="shm, in_place, collapsed or huge; separate several by commas (default shm)",
    )
    parser.add_argument(
        "--systems",
        default="ritornello,fs",
        help="ritornello or fs; separate several by commas (default ritornello,fs)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each system (default 5)")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print one JSON object per line, or write all rows to FILE",
    )
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    known: dict[str, Callable[[Path, Host], Any]] = {
        "ritornello": partial(ours, rounds=asked.rounds),
        "fs": fs,
    }
    makers = {name: known[name] for name in asked.systems.split(",")}
    folder = asked.dir / f"vllm-tier-{os.getpid()}"
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    try:
        for size in map(int, asked.chunks.split(",")):
            count = asked.total * MIB // size
            hosts = [Host(kind, count, size) for kind in asked.memory.split(",")]
            rows += measure(folder, makers, hosts, asked.rounds)
            if "ritornello" in makers and count >= LOOKUP_KEYS:
                rows += lookups_elsewhere(folder, hosts[0], asked.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.json not in (None, "-"):
        Path(asked.json).write_text(json.dumps(rows) + "\n")
        return
    for row in rows:
        print(json.dumps(row) if asked.json else "  ".join(f"{k}={v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
