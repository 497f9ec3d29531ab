"""Blocks that a load did not fill: no page computed from them stays in vLLM's cache or is saved."""

from typing import Any

import pytest
from scheduler_support import Blocks, keep, request, run, step_of
from scheduler_support import side_of as alone
from test_vllm_composition import Shared, admit, end_step, saved
from test_vllm_composition import side_of as composed
from vllm_shapes import TOKENS, FakeStore, cache_group, identity

from ritornello.vllm.cache_groups import trailing
from ritornello.vllm.load_plan import ASYNC_LOAD_BYTES
from ritornello.vllm.metadata import WorkerReport

WINDOW = cache_group(reach=trailing(2 * TOKENS))


def plan(side: Any, **tokens: int) -> Any:
    return side.plan(step_of(tokens, has_sync_kv_loads=False))


def windowed() -> tuple[Shared, Any, Any]:
    """Returns the block tables and two requests. "r" loads blocks 100 and 101 and computes blocks
    102 to 105 from them. In the same step "s" hits blocks 104 and 105 in vLLM's cache; the blocks
    before them are outside the window of "s".
    """
    blocks, lent, other = Shared(), request(6 * TOKENS), request(8 * TOKENS, "s")
    other.block_hashes[:6] = lent.block_hashes
    blocks.tables["r"] = ([100, 101, 102, 103, 104, 105],)
    blocks.tables["s"] = ([0, 0, 0, 0, 104, 105, 116, 117],)
    return blocks, lent, other


def test_failed_block_outside_window_prevents_saves() -> None:
    store = FakeStore()
    blocks, lent, other = windowed()
    side = alone(store, blocks, identity(WINDOW))
    keep(store, lent, 2)
    assert side.matched_tokens(lent, 0) == (2 * TOKENS, False)
    side.request_admitted(lent, blocks.tables["r"], 2 * TOKENS)
    lent.num_computed_tokens = 2 * TOKENS
    assert side.matched_tokens(other, 6 * TOKENS) == (0, False)
    side.request_admitted(other, blocks.tables["s"], 0)
    other.num_computed_tokens = 6 * TOKENS
    metadata = plan(side, r=4 * TOKENS, s=2 * TOKENS)
    lent.num_computed_tokens, other.num_computed_tokens = TOKENS, 8 * TOKENS
    # The worker skips the saves of a step whose load failed; the scheduler's side offers them
    # again.
    unsaved = [(save.request, 0, save.pages.first) for save in metadata.saves]
    side.complete_step(WorkerReport(failed={"r"}, unsaved=unsaved), {101}, set())
    second = plan(side, r=5 * TOKENS, s=1)
    assert not [save for save in second.saves if save.request == "s"]


def test_foreign_failed_block_outside_window_prevents_saves() -> None:
    """The failed load is of another connector inside MultiConnector."""
    blocks, lent, other = windowed()
    side = composed(blocks, WINDOW)
    admit(side, lent, 2 * TOKENS)
    admit(side, other, 6 * TOKENS)
    scheduled = {"r": 4 * TOKENS, "s": 2 * TOKENS}
    first = side.plan(step_of(scheduled, has_sync_kv_loads=True))
    assert saved(first) == []
    lent.num_computed_tokens, other.num_computed_tokens = TOKENS, 8 * TOKENS
    end_step(side, first, 101)
    second = plan(side, r=5 * TOKENS, s=1)
    assert not [save for save in second.saves if save.request == "s"]


@pytest.mark.parametrize("beside", [False, True])
def test_complete_load_does_not_repair_shared_failed_block(beside: bool) -> None:
    """A step waits for the load of block 101 for request "r", and the load fails. Requests "a" and
    "b" have this block from vLLM's cache, and load further blocks asynchronously. vLLM recomputes
    block 101 for "a", whose load is not complete, and considers the block valid for "b", whose load
    is complete. No page of "b" may be saved. `beside`: the loads are of another connector inside
    MultiConnector, not of Ritornello.
    """
    store, blocks = FakeStore(), Shared()
    model = cache_group(head_bytes=ASYNC_LOAD_BYTES // 8)
    side: Any = composed(blocks) if beside else alone(store, blocks, identity(model))
    lent, one, two = request(3 * TOKENS), request(7 * TOKENS, "a"), request(7 * TOKENS, "b")
    blocks.tables["r"] = ([100, 101, 102],)
    blocks.tables["a"] = ([100, 101, *range(112, 117)],)
    blocks.tables["b"] = ([100, 101, *range(122, 127)],)
    for asked in (one, two):
        asked.block_hashes[:3] = lent.block_hashes
    if beside:
        for asked in (lent, one, two):
            admit(side, asked)
    else:
        keep(store, one, 5)
        keep(store, two, 5)
        assert side.matched_tokens(lent, 0) == (2 * TOKENS, False)
        side.request_admitted(lent, blocks.tables["r"], 2 * TOKENS)
        for asked in (one, two):
            assert side.matched_tokens(asked, 2 * TOKENS) == (3 * TOKENS, True)
            side.request_admitted(asked, blocks.tables[asked.request_id], 3 * TOKENS)
    lent.num_computed_tokens = 2 * TOKENS
    one.num_computed_tokens = two.num_computed_tokens = 5 * TOKENS
    first = side.plan(step_of({"r": TOKENS}, has_sync_kv_loads=beside))
    one.num_computed_tokens = TOKENS
    if beside:
        end_step(side, first, 101)
    else:
        side.complete_step(WorkerReport(failed={"r"}, unsaved=[("r", 0, 1)]), {101}, set())
        side.complete_step(None, set(), {"b"})
    side.request_admitted(two, blocks.tables["b"], 0)
    assert not plan(side, b=2 * TOKENS).saves


def test_abort_evicts_failed_blocks() -> None:
    """The failed blocks of an aborted request are evicted although the request ends before vLLM
    reports the outcome of its last step.
    """
    store, blocks = FakeStore(), Blocks()
    side = alone(store, blocks, identity())
    asked = request(300)
    keep(store, asked, 3)
    metadata = run(side, asked)
    assert metadata.loads[0].pages[0].blocks == (100, 101, 102)
    side.request_finished("r")
    side.complete_step(WorkerReport(failed={"r"}), {101}, set())
    assert {101, 102, 103} <= blocks.evicted
    assert 100 not in blocks.evicted
