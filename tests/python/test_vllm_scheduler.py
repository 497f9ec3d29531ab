"""The scheduler's side of vLLM's connector, with a stand-in for the store: pages promised to vLLM,
leases, saves, resets.
"""

from typing import Any

import pytest
from scheduler_support import BLOCKS, Blocks, keep, request, run, side_of, step, step_of
from vllm_shapes import TOKENS, FakeStore, cache_group, identity

from ritornello.vllm.cache_groups import ObjectId, trailing
from ritornello.vllm.load_plan import ASYNC_LOAD_BYTES
from ritornello.vllm.metadata import IDLE, WorkerReport
from ritornello.vllm.scheduler import SchedulerSide


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def side(store: FakeStore, blocks: Blocks) -> SchedulerSide:
    return side_of(store, blocks, identity())


def test_plan_names_requests_that_lost_their_blocks() -> None:
    side = side_of(FakeStore(), Blocks(), identity())
    assert side.plan(step_of({})).freed == ()
    ended = step_of({}, finished_req_ids={"a"}, preempted_req_ids={"b"})
    assert side.plan(ended).freed == ("a", "b")


def test_step_with_saves_names_requests_that_lost_their_blocks(side: SchedulerSide) -> None:
    asked = request(200)
    assert side.matched_tokens(asked, 0) == (0, False)
    side.request_admitted(asked, BLOCKS, 0)
    metadata = side.plan(step_of({"r": 200}, finished_req_ids={"a"}, preempted_req_ids={"b"}))
    assert metadata.saves
    assert metadata.freed == ("a", "b")


def test_last_token_is_never_claimed(side: SchedulerSide, store: FakeStore) -> None:
    for tokens, claimed in ((4 * TOKENS, 3), (4 * TOKENS + 1, 4), (TOKENS, 0), (1, 0)):
        asked = request(tokens, name=f"n{tokens}")
        keep(store, asked, 4)
        assert side.matched_tokens(asked, 0)[0] == claimed * TOKENS
        side.request_finished(asked.request_id)
    assert not store.leases


def test_cold_prompt_is_saved_once(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(200)
    metadata = run(side, asked)
    (save,) = metadata.saves
    assert (save.pages.first, save.pages.blocks, save.pages.parent) == (0, (100, 101, 102), None)
    assert save.pages.keys == tuple(asked.block_hashes)
    assert metadata.loads == []
    assert step(side, asked, 1) is IDLE
    assert not store.leases


def test_warm_prompt_is_loaded_under_lease(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    metadata = run(side, asked, local=TOKENS)
    (load,) = metadata.loads
    assert not load.asynchronous
    (pages,) = load.pages
    assert (pages.first, pages.blocks) == (1, (101, 102))
    assert pages.keys == tuple(asked.block_hashes[1:3])
    assert store.leases == {1}
    (save,) = metadata.saves
    assert (save.pages.first, save.pages.parent) == (3, asked.block_hashes[2])
    side.complete_step(None, set(), set())
    assert not store.leases


def test_unstored_engine_prefix_is_saved(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 1)
    metadata = run(side, asked, local=3 * TOKENS)
    assert metadata.loads == []
    assert metadata.saves[0].pages.first == 1
    assert not store.leases


def test_pages_filled_by_decoding_are_saved(side: SchedulerSide) -> None:
    asked = request(127)
    assert len(run(side, asked).saves[0].pages.keys) == 1
    asked.block_hashes.append(b"second page" * 3)
    asked.num_tokens = 128
    (save,) = step(side, asked, 1).saves
    assert (save.pages.first, save.pages.parent) == (1, asked.block_hashes[0])


def test_page_without_hash_is_not_saved(side: SchedulerSide) -> None:
    asked = request(100)
    run(side, asked)
    assert step(side, asked, 60) is IDLE


def test_waiting_request_is_looked_up_once(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 2)
    assert [side.matched_tokens(asked, 0) for _ in range(5)] == [(2 * TOKENS, False)] * 5
    assert store.lookups == 1
    side.request_finished("r")
    assert not store.leases


def test_old_lease_is_renewed(
    side: SchedulerSide, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(300)
    keep(store, asked, 2)
    side.matched_tokens(asked, 0)
    monkeypatch.setattr("ritornello.vllm.load_plan.monotonic", lambda: 1e12)
    side.matched_tokens(asked, 0)
    assert store.lookups == 2
    assert store.leases == {2}


def test_request_options_are_honoured(side: SchedulerSide, store: FakeStore) -> None:
    silent = request(300, kv_transfer_params={"ritornello.no_store": True})
    assert run(side, silent) is IDLE
    proud = request(300, name="p", kv_transfer_params={"ritornello.no_load": True})
    keep(store, proud, 2)
    metadata = run(side, proud)
    assert metadata.loads == []
    assert metadata.saves[0].pages.first == 2
    logprobs = request(300, name="l", skip_reading_prefix_cache=True)
    keep(store, logprobs, 2)
    assert side.matched_tokens(logprobs, 0) == (0, False)


def test_retained_request_has_end_time(
    side: SchedulerSide, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ritornello.vllm.save_plan.time", lambda: 1000.0)
    asked = request(300, kv_transfer_params={"ritornello.retain": 60})
    assert run(side, asked).saves[0].retain_until == 1060.0
    assert run(side, request(300, name="q")).saves[0].retain_until is None


def test_unpermitted_retention_is_ignored(side: SchedulerSide, store: FakeStore) -> None:
    store.permits = False
    asked = request(300, kv_transfer_params={"ritornello.retain": 60})
    keep(store, asked, 2)
    (save,) = run(side, asked).saves
    assert save.retain_until is None and save.pages.first == 2
    assert (side._meter.take() or {})["ignored_retentions"] == 1


def test_retaining_stored_prefix_puts_last_page(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(4 * TOKENS + 1, kv_transfer_params={"ritornello.retain": 60})
    keep(store, asked, 4)
    (save,) = run(side, asked).saves
    assert (save.pages.first, save.pages.keys) == (3, tuple(asked.block_hashes[3:4]))
    assert save.pages.parent == asked.block_hashes[2]


def test_read_only_saves_nothing(store: FakeStore, blocks: Blocks) -> None:
    side = side_of(store, blocks, identity(), read_only=True)
    assert run(side, request(300)) is IDLE


def test_preempted_request_starts_over(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    run(side, asked)
    keep(store, asked, 2)
    asked.num_computed_tokens = 0
    metadata = run(side, asked)
    assert metadata.loads[0].pages[0].keys == tuple(asked.block_hashes[:2])
    assert metadata.saves[0].pages.first == 2


def test_unsaved_pages_are_offered_again(side: SchedulerSide) -> None:
    asked = request(300)
    run(side, asked)
    side.complete_step(WorkerReport(unsaved=[("r", 0, 1), ("gone", 0, 0)]), set(), set())
    assert step(side, asked, 1).saves[0].pages.first == 1


def test_failed_blocks_are_evicted_from_engine(side: SchedulerSide, blocks: Blocks) -> None:
    run(side, request(300))
    side.complete_step(None, {103}, set())
    assert blocks.evicted == set(range(103, 140))


def test_reset_changes_epoch(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    assert side.matched_tokens(asked, 0)[0]
    assert side.reset()
    assert not store.leases
    assert side.matched_tokens(asked, 0)[0] == 0
    metadata = run(side, asked)
    assert len(metadata.identity.model.epoch) == 16
    assert metadata.identity.model.name == identity().model.name


def test_reset_with_used_blocks_stops_serving(
    side: SchedulerSide, store: FakeStore, blocks: Blocks
) -> None:
    asked = request(300)
    keep(store, asked, 3)
    blocks.free = 40
    assert not side.reset()
    assert run(side, asked) is IDLE
    blocks.free = 49
    assert side.reset()
    assert run(side, asked).saves


def test_worker_refusal_stops_serving(side: SchedulerSide, store: FakeStore) -> None:
    side.complete_step(
        WorkerReport(unsupported_reason="its KV cache is in cuda memory"), set(), set()
    )
    asked = request(300)
    keep(store, asked, 3)
    assert run(side, asked) is IDLE


def test_serving_pauses_while_a_worker_has_not_registered_its_memory(
    side: SchedulerSide, store: FakeStore
) -> None:
    waits, ready = {(0, 0): "not yet", (0, 1): "not yet"}, [{(0, 1): ""}, {(0, 0): ""}]
    asked = request(300)
    keep(store, asked, 3)
    side.complete_step(WorkerReport(unregistered=waits), set(), set())
    for unregistered in ready:
        assert run(side, asked) is IDLE
        side.complete_step(WorkerReport(unregistered=unregistered), set(), set())
    assert run(side, asked).loads


def test_pages_computed_while_memory_is_not_registered_are_saved_later(
    side: SchedulerSide, store: FakeStore
) -> None:
    asked, ended = request(200), request(200, name="ended")
    side.complete_step(WorkerReport(unregistered={(0, 0): "not yet"}), set(), set())
    assert run(side, ended) is IDLE
    side.request_finished(ended.request_id)
    assert run(side, asked) is IDLE
    assert step(side, asked, 1) is IDLE
    side.complete_step(WorkerReport(unregistered={(0, 0): ""}), set(), set())
    (save,) = step(side, asked, 1).saves
    assert (save.request, save.pages.first, save.pages.blocks) == ("r", 0, (100, 101, 102))
    assert step(side, asked, 1) is IDLE


def test_clean_reset_keeps_worker_refusal(
    side: SchedulerSide, store: FakeStore, blocks: Blocks
) -> None:
    side.complete_step(
        WorkerReport(unsupported_reason="its KV cache is in cuda memory"), set(), set()
    )
    asked = request(300)
    for free in (49, 40, 49):
        blocks.free = free
        assert side.reset() == (free == 49)
        keep(store, asked, 3, side._epoch.identity.model.epoch)
        assert run(side, asked) is IDLE
    assert store.lookups == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_close_releases_every_lease(store: FakeStore, blocks: Blocks, asynchronous: bool) -> None:
    side = side_of(store, blocks, identity(), asynchronous=asynchronous)
    claimed, loading = request(300, name="claimed"), request(300, name="loading")
    for asked in (claimed, loading):
        keep(store, asked, 3)
        assert side.matched_tokens(asked, 0) == (3 * TOKENS, asynchronous)
    side.request_admitted(loading, BLOCKS, 3 * TOKENS)
    assert len(side.plan(step_of({})).loads) == 1
    assert len(store.leases) == 2
    side.close()
    assert store.closed
    assert not store.leases


def test_identity_is_sent_first_and_after_change(side: SchedulerSide) -> None:
    assert run(side, request(300)).identity is not None
    assert run(side, request(300, name="q")).identity is None
    assert side.reset()
    assert len(run(side, request(300, name="s")).identity.model.epoch) == 16


def test_large_load_is_asynchronous(store: FakeStore, blocks: Blocks) -> None:
    large = cache_group(head_bytes=ASYNC_LOAD_BYTES // 8)
    side = side_of(store, blocks, identity(large))
    small, asked = request(200, name="small"), request(300)
    keep(store, small, 2)
    keep(store, asked, 3)
    assert side.matched_tokens(small, 0) == (2 * TOKENS, False)
    assert side.matched_tokens(asked, 0) == (3 * TOKENS, True)


@pytest.fixture
def async_side(store: FakeStore, blocks: Blocks) -> SchedulerSide:
    return side_of(store, blocks, identity(), asynchronous=True)


def begin_async_load(side: SchedulerSide, asked: Any) -> Any:
    """Plans one step that begins an asynchronous load for a request and computes nothing. Returns
    the step's metadata.
    """
    external, asynchronous = side.matched_tokens(asked, 0)
    assert external is not None
    assert asynchronous
    side.request_admitted(asked, BLOCKS, external)
    asked.num_computed_tokens = external
    return side.plan(step_of({}))


def test_async_load_keeps_leases_until_done(async_side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    metadata = begin_async_load(async_side, asked)
    assert metadata.loads[0].asynchronous
    assert metadata.saves == []
    async_side.complete_step(None, set(), set())
    assert len(store.leases) == 1
    async_side.complete_step(None, set(), {"r"})
    assert not store.leases
    # vLLM admits the request a second time to compute its remaining tokens. The loaded pages are
    # not saved again.
    async_side.request_admitted(asked, BLOCKS, 0)
    (save,) = step(async_side, asked, 300 - 3 * TOKENS).saves
    assert save.pages.first == 3


def test_aborted_request_keeps_leases_of_load(async_side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300)
    keep(store, asked, 3)
    begin_async_load(async_side, asked)
    async_side.request_finished("r")
    assert len(store.leases) == 1
    async_side.complete_step(None, set(), {"r"})
    assert not store.leases


def test_pages_after_failed_load_are_computed_and_saved(
    async_side: SchedulerSide, store: FakeStore
) -> None:
    asked = request(300)
    keep(store, asked, 3)
    begin_async_load(async_side, asked)
    report = WorkerReport(unsaved=[("r", 0, 1)], failed={"r"})
    # vLLM keeps the blocks before the failed block.
    asked.num_computed_tokens = TOKENS
    async_side.complete_step(report, {101}, {"r"})
    async_side.request_admitted(asked, BLOCKS, 0)
    (save,) = step(async_side, asked, 300 - TOKENS).saves
    assert save.pages.first == 1
    # vLLM looks a request up again if none of its tokens was loaded. This lookup must find no
    # tokens.
    asked.num_computed_tokens = 0
    assert async_side.matched_tokens(asked, 0) == (0, False)


def test_hit_requires_all_objects_of_page(store: FakeStore, blocks: Blocks) -> None:
    split = cache_group(head_ranges=((0, 1), (1, 2)), stages=(("l.0",), ("l.1",)))
    side = side_of(store, blocks, identity(split, ranks=2), asynchronous=True)
    asked = request(300)
    for stage in (0, 1):
        for head_range in (0, 1):
            store.keep(asked.block_hashes[: 4 - stage - head_range], ObjectId(0, stage, head_range))
    metadata = begin_async_load(side, asked)
    assert asked.num_computed_tokens == 2 * TOKENS
    assert len(metadata.loads[0].pages) == 1
    assert (store.lookups, len(store.leases)) == (1, 1)
    side.complete_step(None, set(), {"r"})
    assert not store.leases


WINDOWED = (cache_group(), cache_group(trailing(2 * TOKENS), stages=(("l.2",),)))


def test_window_group_loads_only_pages_of_its_window(store: FakeStore, blocks: Blocks) -> None:
    side = side_of(store, blocks, identity(*WINDOWED), asynchronous=True)
    asked = request(6 * TOKENS)
    store.keep(asked.block_hashes[:5], ObjectId(0, 0, 0))
    # Page 3 of the windowed group is missing, which prefixes of five and of four pages need.
    store.keep([asked.block_hashes[page] for page in (0, 1, 2, 4)], ObjectId(1, 0, 0))
    metadata = begin_async_load(side, asked)
    assert asked.num_computed_tokens == 3 * TOKENS
    whole, window = metadata.loads[0].pages
    assert (whole.group, whole.blocks) == (0, (100, 101, 102))
    assert (window.group, window.first, window.blocks) == (1, 1, (201, 202))
    assert len(store.leases) == 2
    # The windowed group is saved starting at its missing page, although the store has pages 3 and 4
    # of the group with full attention.
    side.complete_step(None, set(), {"r"})
    side.request_admitted(asked, BLOCKS, 0)
    saves = step(side, asked, 3 * TOKENS).saves
    assert [(save.pages.group, save.pages.first) for save in saves] == [(0, 5), (1, 3)]
    assert [save.pages.parent is None for save in saves] == [False, True]


def test_blocks_outside_window_are_not_saved(store: FakeStore, blocks: Blocks) -> None:
    side = side_of(store, blocks, identity(*WINDOWED), asynchronous=True)
    asked = request(5 * TOKENS)
    blocks.behind = 3
    saves = run(side, asked).saves
    assert [(save.pages.group, save.pages.first) for save in saves] == [(0, 0), (1, 3)]
    blocks.behind = 5
    assert len(run(side, request(5 * TOKENS, name="q")).saves) == 1


def test_key_of_page_is_its_last_block_hash(store: FakeStore, blocks: Blocks) -> None:
    model = identity(cache_group(tokens=2 * TOKENS), hash_tokens=TOKENS)
    side = side_of(store, blocks, model)
    asked = request(5 * TOKENS)
    store.keep([asked.block_hashes[1]])
    metadata = run(side, asked)
    assert metadata.loads[0].pages[0].keys == (asked.block_hashes[1],)
    (save,) = metadata.saves
    assert save.pages.keys == (asked.block_hashes[3],)
    assert save.pages.parent == asked.block_hashes[1]


def test_request_is_examined_only_when_page_fills(
    side: SchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(TOKENS + 1)
    run(side, asked)
    looked = 0
    save_filled = side._save_plan._add_saves

    def watched(*given: Any) -> None:
        nonlocal looked
        looked += 1
        save_filled(*given)

    monkeypatch.setattr(side._save_plan, "_add_saves", watched)
    saved = []
    for tokens in range(TOKENS + 1, 3 * TOKENS + 1):
        asked.num_tokens = tokens
        asked.block_hashes = request(tokens).block_hashes
        saved += [(save.pages.first, tokens) for save in step(side, asked, 1).saves]
    assert saved == [(1, 2 * TOKENS), (2, 3 * TOKENS)]
    assert looked < 5


def test_failing_store_is_miss(side: SchedulerSide, store: FakeStore) -> None:
    store.broken = True
    assert side.matched_tokens(request(300), 0) == (0, False)
    assert not store.leases


def test_malformed_request_is_miss(side: SchedulerSide, store: FakeStore) -> None:
    asked = request(300, num_tokens="many")
    assert side.matched_tokens(asked, 0) == (0, False)
    assert len(store.failed) == 1 and not store.leases
    side.request_finished("r")
    assert side.matched_tokens(request(300), 0) == (0, False)
    assert len(store.failed) == 1
