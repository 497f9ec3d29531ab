"""While the weights differ from the weights of the current epoch, the scheduler's side of the
connector for vLLM reports no hits and starts no saves.
"""

import pytest
from scheduler_support import Blocks, keep, request, run, side_of, step
from vllm_shapes import TOKENS, FakeStore, identity

from ritornello.vllm.metadata import IDLE, WorkerReport
from ritornello.vllm.weights.counters import ChangeCounters
from ritornello.vllm.weights.guard import WeightGuard


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


def watched(changes: int = 0) -> tuple[WeightGuard, ChangeCounters]:
    guard, counters = WeightGuard(), ChangeCounters.private(2)
    for _ in range(changes):
        counters.add(0)
    guard.set_counters(counters)
    return guard, counters


def test_changed_weights_stop_hits_and_saves(store: FakeStore, blocks: Blocks) -> None:
    guard, counters = watched()
    side = side_of(store, blocks, identity(), guard=guard)
    asked = request(200)
    keep(store, asked, 3)
    assert side.matched_tokens(asked, 0)[0] == 3 * TOKENS
    counters.add(0)
    assert side.matched_tokens(asked, 0)[0] == 0
    assert run(side, request(200, name="cold")) is IDLE


def test_running_request_saves_no_changed_page(store: FakeStore, blocks: Blocks) -> None:
    guard, counters = watched()
    side = side_of(store, blocks, identity(), guard=guard)
    asked = request(4 * TOKENS)
    assert len(run(side, asked, computed=2 * TOKENS).saves) == 1
    counters.add(0)
    assert step(side, asked, TOKENS) is IDLE
    assert step(side, asked, TOKENS) is IDLE


def test_emptied_engine_begins_epoch(store: FakeStore, blocks: Blocks) -> None:
    guard, counters = watched(changes=3)
    side = side_of(store, blocks, identity(), guard=guard)
    metadata = run(side, request(200))
    assert (metadata.identity.model.epoch, metadata.covered) == (b"", counters.read())
    side.on_caches_reset()
    assert run(side, request(200, name="s")).identity is None, (
        "no epoch may begin while the weights are unchanged"
    )
    counters.add(0)
    side.on_caches_reset()
    metadata = run(side, request(200, name="t"))
    assert metadata.identity.model.epoch != b""
    assert metadata.covered == counters.read()


def test_reset_with_used_blocks_covers_no_change(store: FakeStore, blocks: Blocks) -> None:
    guard, counters = watched()
    side = side_of(store, blocks, identity(), guard=guard)
    counters.add(1)
    blocks.free -= 5
    side.on_caches_reset()
    assert guard.changed()
    blocks.free += 5
    side.on_caches_reset()
    assert not guard.changed()


def test_changes_on_other_machines_stop_hits(store: FakeStore, blocks: Blocks) -> None:
    guard, _ = watched()
    side = side_of(store, blocks, identity(), guard=guard)
    asked = request(200)
    keep(store, asked, 3)
    both = WorkerReport(changes={0: 0}).aggregate(WorkerReport(changes={1: 1}))
    side.complete_step(both, set(), set())
    assert side.matched_tokens(asked, 0)[0] == 0
