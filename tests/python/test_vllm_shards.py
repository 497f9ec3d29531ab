"""Scheduler's and workers' sides over a real store, with arrays as the engine's memory: pages that
some number of workers stored are found by another number, byte for byte.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from scheduler_support import step_of
from vllm_shapes import TOKENS, Tensor

from ritornello import Store
from ritornello.connector.identity import ModelIdentity
from ritornello.vllm.cache_groups import (
    ALL,
    CacheGroup,
    ObjectId,
    Reach,
    head_ranges_of,
    heads_of,
    trailing,
)
from ritornello.vllm.handshake import ShardFacts, group_layouts
from ritornello.vllm.identity import Identity
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import VllmStore
from ritornello.vllm.worker import WorkerSide

BLOCKS = 16
HEADS = 4
# Bytes of one head of one layer in a block: large enough that every head is an object.
HEAD_BYTES = 16 << 10
LAYERS = 4
PAGES = 5


class Cluster:
    """One engine: `ranks` workers in each of `stages` pipeline stages. Cache group `g` has the
    reach `reaches[g]` and the layers `g.0` to `g.3`. `interleaved`: bytes of all heads alternate in
    a block, so that no range of heads can be cut out.
    """

    def __init__(
        self,
        path: Path,
        ranks: int,
        stages: int = 1,
        reaches: tuple[Reach, ...] = (ALL,),
        *,
        interleaved: bool = False,
    ) -> None:
        self.ranks, self.stages = ranks, stages
        self.memory: dict[tuple[int, int], dict[str, Any]] = {}
        self.workers: dict[tuple[int, int], WorkerSide] = {}
        share = max(HEADS // ranks, 1)
        for stage in range(stages):
            names = [
                [f"{g}.{n}" for n in range(LAYERS) if n * stages // LAYERS == stage]
                for g in range(len(reaches))
            ]
            for rank in range(ranks):
                shape = (BLOCKS, HEAD_BYTES, share) if interleaved else (BLOCKS, share, HEAD_BYTES)
                held = {
                    name: numpy.zeros(shape, numpy.uint8) for layers in names for name in layers
                }
                worker = WorkerSide(
                    self._store(path),
                    BLOCKS,
                    [(layers, share) for layers in names],
                    StepMeter(),
                    (stage, rank),
                )
                worker.register({name: Tensor(array) for name, array in held.items()})
                self.memory[stage, rank], self.workers[stage, rank] = held, worker
        facts: dict[tuple[int, int], ShardFacts] = {p: w.facts() for p, w in self.workers.items()}
        found = group_layouts(facts, stages, ranks, len(reaches))
        cache_groups = []
        for reach, group in zip(reaches, found, strict=True):
            head_ranges, shared = head_ranges_of(
                HEADS, ranks, LAYERS * group.head_bytes, sliceable=group.head_major
            )
            order = "heads" if group.head_major else "interleaved"
            cache_groups.append(
                CacheGroup(
                    reach,
                    TOKENS,
                    HEADS,
                    64,
                    group.head_bytes,
                    "uint8",
                    f"test/{order}",
                    "",
                    head_ranges,
                    shared,
                    group.stages,
                )
            )
        model = ModelIdentity("m", b"w", hash_algorithm="sha256")
        self.identity = Identity(model, TOKENS, TOKENS, tuple(cache_groups), ranks)
        self.side = SchedulerSide(self._store(path), self.identity, StepMeter(), asynchronous=True)
        self.blocks = tuple(list(range(1 + 7 * g, 7 + 7 * g)) for g in range(len(reaches)))
        pool: Any = SimpleNamespace(null_block=SimpleNamespace(block_id=0))
        self.side.bind_cache(
            SimpleNamespace(
                block_pool=pool,
                get_block_ids=lambda request: self.blocks,
                evict_blocks=lambda blocks: None,
            )
        )

    @staticmethod
    def _store(path: Path) -> VllmStore:
        store = VllmStore(Settings(str(path), "1GiB"), StepMeter())
        assert store.open()
        return store

    def fill(self, seed: int) -> None:
        """Fills the KV memory of all workers, in place of the engine's computation: each head of
        each layer of each block has its own bytes, which follow from `seed`.
        """
        for (_, rank), held in self.memory.items():
            for name, array in held.items():
                array[:] = expected(array.shape, name, rank, self.ranks, seed)

    def step(self, request: Any, scheduled: int) -> set[int]:
        """Runs one step of all workers, waits until the step's loads have ended, and reports the
        results to the scheduler's side as vLLM does. Returns the blocks that were not filled.
        """
        tokens = {request.request_id: scheduled} if scheduled else {}
        metadata = self.side.plan(step_of(tokens))
        waiting = set(self.workers if metadata.loads else ())
        for worker in self.workers.values():
            worker.load(metadata)
            worker.save(metadata)
        deadline = time.monotonic() + 30
        while waiting and time.monotonic() < deadline:
            waiting -= {place for place in waiting if self.workers[place].take_completed_loads()[0]}
            time.sleep(0.001)
        assert not waiting
        bad: set[int] = set()
        for worker in self.workers.values():
            bad |= worker.results.take_failed_blocks()
            self.side.complete_step(worker.results.take_report(), set(), set())
        self.side.complete_step(None, bad, {load.request for load in metadata.loads})
        return bad

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.side.close()


def expected(shape: Any, name: str, rank: int, ranks: int, seed: int) -> Any:
    group, layer = (int(part) for part in name.split("."))
    first, end = heads_of(rank, ranks, HEADS)
    whole = numpy.random.default_rng([seed, group, layer]).integers(
        0, 256, (BLOCKS, HEADS, HEAD_BYTES), numpy.uint8
    )
    mine = whole[:, first:end]
    return mine if mine.shape == shape else mine.transpose(0, 2, 1)


def request(name: str = "r") -> Any:
    return SimpleNamespace(
        request_id=name,
        block_hashes=[f"page {place:02}".encode() * 4 for place in range(PAGES)],
        num_tokens=PAGES * TOKENS + 1,
        num_computed_tokens=0,
        skip_reading_prefix_cache=False,
        kv_transfer_params=None,
    )


def write(cluster: Cluster) -> None:
    asked = request()
    cluster.fill(1)
    assert cluster.side.matched_tokens(asked, 0) == (0, False)
    cluster.side.request_admitted(asked, cluster.blocks, 0)
    cluster.step(asked, asked.num_tokens)
    cluster.side.request_finished("r")
    cluster.close()


def read(cluster: Cluster) -> int:
    """Looks up and loads the prompt on an engine, and checks every loaded byte. Closes the engine.
    Returns the number of tokens found.
    """
    asked = request()
    tokens, asynchronous = cluster.side.matched_tokens(asked, 0)
    assert tokens is not None
    cluster.side.request_admitted(asked, cluster.blocks, tokens)
    if tokens:
        assert asynchronous
        assert cluster.step(asked, 0) == set()
    for number, group in enumerate(cluster.identity.groups):
        filled = [cluster.blocks[number][page] for page in group.needed(tokens)]
        for (_, rank), held in cluster.memory.items():
            for name, array in held.items():
                if name.startswith(f"{number}."):
                    right = expected(array.shape, name, rank, cluster.ranks, 1)
                    assert (array[filled] == right[filled]).all(), (name, rank)
    cluster.side.request_finished("r")
    cluster.close()
    return tokens


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    # The store stays open during the test, so that the engines are clients of the same owner.
    keeper = Cluster._store(tmp_path / "store")
    yield tmp_path / "store"
    keeper.close()


@pytest.mark.parametrize("writers", [1, 2, 8])
def test_other_worker_count_finds_every_byte(store: Path, writers: int) -> None:
    write(Cluster(store, writers))
    for readers in (1, 2, 4, 8):
        assert read(Cluster(store, readers)) == PAGES * TOKENS


def test_pages_of_two_stages_need_two_stages(store: Path) -> None:
    write(Cluster(store, 2, stages=2))
    assert read(Cluster(store, 4, stages=2)) == PAGES * TOKENS
    assert read(Cluster(store, 1)) == 0


def test_interleaved_heads_need_same_worker_count(store: Path) -> None:
    write(Cluster(store, 2, interleaved=True))
    assert read(Cluster(store, 2, interleaved=True)) == PAGES * TOKENS
    for readers in (1, 4):
        assert read(Cluster(store, readers, interleaved=True)) == 0
    assert read(Cluster(store, 2)) == 0


def test_windows_are_restored_with_full_attention(store: Path) -> None:
    reaches = (ALL, trailing(TOKENS + 2))
    write(Cluster(store, 2, reaches=reaches))
    assert read(Cluster(store, 1, reaches=reaches)) == PAGES * TOKENS


def test_missing_object_shortens_hit(store: Path) -> None:
    write(Cluster(store, 2))
    cluster = Cluster(store, 1)
    forget(store, cluster, HEADS - 1, 2)
    assert read(cluster) == 2 * TOKENS


def test_failed_load_is_recomputed_on_all_workers(store: Path) -> None:
    write(Cluster(store, 2))
    cluster = Cluster(store, 2)
    asked = request()
    tokens, _ = cluster.side.matched_tokens(asked, 0)
    assert tokens == PAGES * TOKENS
    cluster.side.request_admitted(asked, cluster.blocks, tokens)
    forget(store, cluster, HEADS - 1, 3)
    assert cluster.step(asked, 0) == set(cluster.blocks[0][3:PAGES])
    # vLLM continues from the loaded pages without a further lookup.
    asked.num_computed_tokens = 3 * TOKENS
    cluster.side.request_admitted(asked, cluster.blocks, 0)
    cluster.fill(1)
    cluster.step(asked, asked.num_tokens - 3 * TOKENS)
    cluster.side.request_finished("r")
    cluster.close()
    assert read(Cluster(store, 1)) == PAGES * TOKENS


def forget(store: Path, cluster: Cluster, head_range: int, pages: int) -> None:
    """Deletes the objects of the range `head_range` of KV heads in all pages after the first
    `pages` pages.
    """
    with Store.open(store) as opened:
        scope = cluster.identity.scope(ObjectId(0, 0, head_range))
        assert opened.delete(scope, request().block_hashes[pages:]) > 0
