#!/usr/bin/env python3
"""Measures the hooks of the vLLM connector on the scheduler's thread, called as vLLM calls them.

    python benches/vllm_scheduler.py [--json] [--tokens 16384] [--block 64] [--dir FOLDER]

`request`: all hooks of one request, with all its pages in the store (hit) or none of them (miss):
lookup, admission, its first step, its end; of a hit also the step that begins the load, the end of
the load, and a second admission. `step`: planning one step of 100 running
requests, each with one more token; every request fills a page once in `--block` steps. The name
of a model states into which objects its pages are divided: groups of KV heads, pipeline stages, and
KV cache groups with a sliding window. The store is real, and owned by this process.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from ritornello._core import Store
from ritornello.connector.identity import ModelIdentity
from ritornello.vllm.cache_groups import ALL, CacheGroup, object_ids, trailing
from ritornello.vllm.identity import Identity
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import VllmStore

RUNNING = 100
HEAD_BYTES = 32
WINDOW = 1024


def model(block: int, *, head_ranges: int = 1, stages: int = 1, windows: int = 0) -> Identity:
    """Returns a model with small pages, because the length of a page does not affect the result."""
    names = tuple((f"l.{stage}",) for stage in range(stages))
    heads = tuple((head_range, head_range + 1) for head_range in range(head_ranges))
    reaches = [ALL] + [trailing(WINDOW)] * windows
    groups = tuple(
        CacheGroup(
            reach, block, head_ranges, 16, HEAD_BYTES, "bfloat16", "bench", "", heads, True, names
        )
        for reach in reaches
    )
    model = ModelIdentity("bench", b"w", hash_algorithm="sha256")
    return Identity(model, block, block, groups)


MODELS: dict[str, dict[str, int]] = {
    "one object": {},
    "8 head groups": {"head_ranges": 8},
    "8 head groups, 2 stages": {"head_ranges": 8, "stages": 2},
    "full attention and 5 windows": {"windows": 5},
}


def step_of(scheduled: dict[str, int]) -> Any:
    """Returns a step that computes the `scheduled` numbers of tokens, and ends no request."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, finished_req_ids=set(), preempted_req_ids=None
    )


class Engine:
    """The connector's side in the scheduler's process, and the part of vLLM's scheduler that it
    uses.
    """

    def __init__(self, identity: Identity, folder: str, tokens: int) -> None:
        meter = StepMeter()
        self.identity = identity
        self.tokens = tokens
        self.block = identity.alignment
        self.folder = folder
        self.store = VllmStore(Settings(folder, "1GiB"), meter)
        self.store.open()
        self.side = SchedulerSide(self.store, identity, meter, asynchronous=True)
        blocks = tuple(list(range(1, tokens // self.block + 64)) for _ in identity.groups)
        self.blocks = blocks
        pool = SimpleNamespace(null_block=SimpleNamespace(block_id=0))
        self.side.bind_cache(
            SimpleNamespace(block_pool=pool, get_block_ids=lambda request: blocks)  # type: ignore[arg-type]
        )

    def request(self, name: str, hashes: list[bytes]) -> Any:
        return SimpleNamespace(
            request_id=name,
            block_hashes=hashes,
            num_tokens=self.tokens + 1,
            num_computed_tokens=0,
            skip_reading_prefix_cache=False,
            kv_transfer_params=None,
        )

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Puts every object of the pages of these hashes."""
        with Store.open(self.folder) as store:
            for of in object_ids(self.identity.groups):
                scope = self.identity.scope(of)
                store.put_batch(scope, list(hashes), [bytes(scope.page_bytes)] * len(hashes))

    def whole_request(self, name: str, hashes: list[bytes]) -> int:
        side, asked = self.side, self.request(name, hashes)
        tokens, asynchronous = side.matched_tokens(asked, 0)
        side.request_admitted(asked, self.blocks, tokens)
        asked.num_computed_tokens = tokens
        if asynchronous:
            side.plan(step_of({}))
            side.complete_step(None, set(), {name})
            side.request_admitted(asked, self.blocks, 0)
        scheduled = asked.num_tokens - asked.num_computed_tokens
        side.plan(step_of({name: scheduled}))
        side.request_finished(name)
        return tokens

    def steps(self, hashes: list[bytes]) -> Iterator[Callable[[], None]]:
        """Yields functions, each of which plans one step of `RUNNING` requests. The requests have
        reached different positions in a page.
        """
        running = []
        for place in range(RUNNING):
            asked = self.request(f"r{place}", list(hashes))
            asked.num_tokens += place % self.block
            self.side.matched_tokens(asked, 0)
            self.side.request_admitted(asked, self.blocks, 0)
            scheduled = {asked.request_id: asked.num_tokens}
            self.side.plan(step_of(scheduled))
            asked.num_computed_tokens = asked.num_tokens
            running.append(asked)
        step = step_of({asked.request_id: 1 for asked in running})
        while True:
            for asked in running:
                asked.num_tokens += 1
                if asked.num_tokens % self.block == 0:
                    asked.block_hashes.append(os.urandom(32))
            yield lambda: self.side.plan(step) and None
            for asked in running:
                asked.num_computed_tokens += 1


def microseconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - begun) / 1e3


def row(name: str, what: str, times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "model": name,
        "what": what,
        "p50_us": round(statistics.median(ordered), 1),
        "p99_us": round(ordered[len(ordered) * 99 // 100], 1),
    }


def measure(name: str, identity: Identity, folder: str, tokens: int) -> list[dict[str, Any]]:
    engine = Engine(identity, folder, tokens)
    pages = tokens // engine.block
    known = [os.urandom(32) for _ in range(pages)]
    engine.keep(known)
    for turn in range(100):  # warm the caches and the interpreter's specialised instructions
        assert engine.whole_request(f"warm{turn}", known) == tokens
    hits = [
        microseconds(lambda turn=turn: engine.whole_request(f"h{turn}", known))
        for turn in range(1000)
    ]
    strange = [os.urandom(32) for _ in range(pages)]
    misses = [
        microseconds(lambda turn=turn: engine.whole_request(f"m{turn}", strange))
        for turn in range(1000)
    ]
    steps = engine.steps(strange)
    planned = [microseconds(next(steps)) for _ in range(20 * engine.block)][engine.block :]
    engine.side.close()
    return [
        row(name, f"request, {tokens} tokens, hit", hits),
        row(name, f"request, {tokens} tokens, miss", misses),
        {
            **row(name, f"step, {RUNNING} requests", planned),
            "mean_us": round(statistics.mean(planned), 1),
        },
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--tokens", type=int, default=16384, help="tokens of a prompt (default 16384)"
    )
    parser.add_argument("--block", type=int, default=64, help="tokens of a page (default 64)")
    parser.add_argument(
        "--dir",
        default=None,
        help="directory of the stores (default: the system's directory for temporary files)",
    )
    given = parser.parse_args()
    rows = []
    for name, shape in MODELS.items():
        with tempfile.TemporaryDirectory(dir=given.dir) as folder:
            rows += measure(name, model(given.block, **shape), f"{folder}/store", given.tokens)
    if given.json:
        print(json.dumps(rows, indent=1))
        return 0
    for found in rows:
        mean = f"  mean {found['mean_us']:6.1f}" if "mean_us" in found else ""
        print(
            f"{found['model']:30} {found['what']:28} p50 {found['p50_us']:7.1f} µs"
            f"  p99 {found['p99_us']:7.1f}{mean}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
