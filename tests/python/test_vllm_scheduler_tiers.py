"""The scheduler's side of vLLM's connector over several tiers: pending lookups, loads that are
slower than computing, and the tiers from which tokens are loaded.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_support import Blocks, keep, request, run, side_of, step
from vllm_shapes import TOKENS, FakeStore, cache_group, identity

from ritornello.vllm.cache_groups import ObjectId, trailing
from ritornello.vllm.identity import Identity
from ritornello.vllm.metadata import WorkerReport
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.store import StoreHit


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def side(store: FakeStore, blocks: Blocks) -> SchedulerSide:
    return side_of(store, blocks, identity())


def test_pending_lookup_is_repeated(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    store.pending = True
    assert side.matched_tokens(asked, 0) == (None, False)
    assert side.matched_tokens(asked, 0) == (None, False)
    store.pending = False
    assert side.matched_tokens(asked, TOKENS)[0] == 2 * TOKENS
    assert [prompt.computed for prompt in store.prompts] == [0, 0, TOKENS]
    side.request_finished("r")
    assert not store.cancelled


def test_aborted_request_cancels_pending_lookup(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    store.pending = True
    side.matched_tokens(asked, 0)
    side.request_finished("r")
    assert store.cancelled == [tuple(asked.block_hashes)]


@pytest.mark.parametrize("pages", [6, 5])
def test_pending_window_is_repeated_and_cancelled(blocks: Blocks, pages: int) -> None:
    """This machine has the first `pages` pages of the full-attention group, of a prompt of seven. A
    remote has the two pages of the window group that a prefix of five pages needs; while they are
    fetched, the lookup is pending.
    """

    class WindowPending(FakeStore):
        hides_windows = False

        def lookup(self, identity: Identity, object_ids: Sequence[ObjectId], *rest: Any) -> Any:
            hit = super().lookup(identity, object_ids, *rest)
            if hit is None or not object_ids[0].group or not self.hides_windows:
                return hit
            self.leases.discard(hit.lease)
            return StoreHit(0, 0, pending=hit.pages == len(rest[0]))

    store = WindowPending()
    groups = (cache_group(), cache_group(trailing(2 * TOKENS), stages=(("l.2",),)))
    side = side_of(store, blocks, identity(*groups))
    asked = request(7 * TOKENS)
    store.keep(asked.block_hashes[:pages], ObjectId(0, 0, 0))
    store.keep(asked.block_hashes[3:5], ObjectId(1, 0, 0))
    store.hides_windows = True
    assert side.matched_tokens(asked, 0) == (None, False)
    assert not store.leases
    store.hides_windows = False
    assert side.matched_tokens(asked, 0)[0] == 5 * TOKENS
    store.hides_windows = True
    other = request(7 * TOKENS, "other")
    store.keep(other.block_hashes[:pages], ObjectId(0, 0, 0))
    store.keep(other.block_hashes[3:5], ObjectId(1, 0, 0))
    assert side.matched_tokens(other, 0) == (None, False)
    side.request_finished("other")
    assert store.cancelled[-1] == (*other.block_hashes[3:5],)


def test_pending_lookup_times_out(
    side: SchedulerSide, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(300)
    store.pending = True
    assert side.matched_tokens(asked, 0) == (None, False)
    monkeypatch.setattr("ritornello.vllm.load_plan.WAIT_SECONDS", 0.0)
    assert side.matched_tokens(asked, 0) == (0, False)


def test_pages_not_worth_loading_are_computed(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    store.worth_loading = 1
    metadata = run(side, asked)
    assert [pages.keys for load in metadata.loads for pages in load.pages] == [
        (asked.block_hashes[0],)
    ]
    (save,) = metadata.saves
    assert save.pages.first == 3


def test_claimed_tokens_are_counted_by_tier(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 4)
    store.tiers = [("host", 2), ("disk", 1), ("remote", 1)]
    run(side, asked, local=TOKENS)
    expected = {"host": TOKENS, "disk": TOKENS, "remote": TOKENS}
    assert side.sources(asked, 3 * TOKENS) == expected
    assert side.sources(asked, 7) == {}


def test_slow_load_is_asynchronous(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    store.decision = SimpleNamespace(estimate=(0.2, 0.1, 0.9), alternatives=(0.3, 0.9))
    assert side.matched_tokens(asked, 0) == (3 * TOKENS, True)
    side.request_finished("r")
    store.decision = SimpleNamespace(estimate=(0.1, 0.2, 0.9), alternatives=(0.3, 0.9))
    assert side.matched_tokens(asked, 0) == (3 * TOKENS, False)


def test_timings_are_recorded_if_wanted(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 2)
    store.wants_timings = True
    store.decision = SimpleNamespace(estimate=None, alternatives=None)
    metadata = run(side, asked)
    assert metadata.prefill == (2 * TOKENS, 300 - 2 * TOKENS)
    report = WorkerReport(prefill=(128, 172, 0.5), load_seconds={"r": 0.25})
    side.complete_step(report, set(), set())
    assert store.timings == [(report, {"r": store.decision})]
    assert step(side, asked, 1).prefill is None


def test_only_steps_that_are_mostly_one_long_prefill_are_timed(
    side: SchedulerSide, store: FakeStore
) -> None:
    store.wants_timings = True
    asked = request(300)
    keep(store, asked, 4)
    assert run(side, asked).prefill is None, "a step of 44 tokens must not be timed"
    assert step(side, asked, 8).prefill is None


def test_remote_gets_all_keys_of_prompt(store: FakeStore, blocks: Blocks) -> None:
    side = side_of(store, blocks, identity(), has_remote=True)
    asked = request(300)
    keep(store, asked, 3)
    metadata = run(side, asked, local=TOKENS)
    assert metadata.loads[0].pages[0].before == tuple(asked.block_hashes[:1])
    assert metadata.saves[0].pages.before == tuple(asked.block_hashes[:3])
