"""Asynchronous loads, for which no step of vLLM's engine waits: answers, failures, aborts, and
blocks that are not reused while a load fills them.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from harness import BLOCK, BLOCKS, Engine, prompt
from probes import Digests, evict_after_match, fail_loads, slow_loads

from ritornello.vllm.worker import WorkerSide

# Tokens of a prompt of 300 tokens that vLLM can load: the full blocks before its last token.
CLAIMED = 299 // BLOCK * BLOCK


@pytest.fixture
def async_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine in which every load is asynchronous, however small."""
    side = engine.scheduler.connector.data_path._scheduler
    monkeypatch.setattr(side._load_plan, "_async_load_tokens", 0)
    yield engine
    # After every test, no load is pending and no lease is held.
    assert not side._load_plan._async_leases
    assert not side._load_plan._step_leases


def record_async_loads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list that gets, for each load that begins, whether it is asynchronous."""
    seen: list[bool] = []
    begin = WorkerSide._start_load

    def watched(worker: WorkerSide, load: Any) -> Any:
        seen.append(load.asynchronous)
        return begin(worker, load)

    monkeypatch.setattr(WorkerSide, "_start_load", watched)
    return seen


def test_answer_equals_answer_of_engine_cache(
    async_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, seen = Digests(monkeypatch), record_async_loads(monkeypatch)
    asked = prompt(101)
    async_engine.ask(asked)
    local = async_engine.ask(asked)[0]
    async_engine.forget()
    before = async_engine.external_tokens()
    warm = async_engine.ask(asked)[0]
    assert seen == [True]
    assert async_engine.external_tokens() - before == CLAIMED
    assert warm.outputs[0].token_ids == local.outputs[0].token_ids
    assert len(digests.loaded) == CLAIMED // BLOCK
    assert digests.all_came_back()


@pytest.mark.parametrize("bad", [[3, 5], [0], list(range(CLAIMED // BLOCK))])
def test_failed_pages_are_recomputed_with_same_answer(
    async_engine: Engine, monkeypatch: pytest.MonkeyPatch, bad: list[int]
) -> None:
    asked = prompt(102 + len(bad))
    expected = async_engine.tokens(asked)
    async_engine.forget()
    before = async_engine.count("vllm:ritornello_failed_pages")
    with monkeypatch.context() as broken:
        fail_loads(broken, bad)
        assert async_engine.tokens(asked) == expected
    assert async_engine.tokens(asked) == expected
    assert async_engine.count("vllm:ritornello_failed_pages") - before == len(bad)
    async_engine.forget()
    assert async_engine.tokens(asked) == expected


def test_eviction_before_load_costs_time_only(
    async_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt(112)
    expected = async_engine.tokens(asked)
    async_engine.forget()
    with monkeypatch.context() as broken:
        evict_after_match(broken, keep=4)
        assert async_engine.tokens(asked) == expected
    async_engine.forget()
    again = async_engine.ask(asked)[0]
    assert again.num_cached_tokens == CLAIMED
    assert list(again.outputs[0].token_ids) == expected[0]


def test_other_requests_run_during_slow_load(
    async_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = prompt(113), prompt(114, BLOCK)
    expected = async_engine.tokens(slow)
    expected_quick = async_engine.tokens(quick)
    async_engine.forget()
    slow_loads(monkeypatch, 1.0)
    finished = []
    engine = async_engine.llm.llm_engine
    for name, asked in (("slow", slow), ("quick", quick)):
        engine.add_request(name, {"prompt_token_ids": asked}, sampling(24))
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    assert [output.request_id for output in finished] == ["quick", "slow"]
    assert [list(output.outputs[0].token_ids) for output in finished] == [
        expected_quick[0],
        expected[0],
    ]


def test_aborted_request_keeps_blocks_until_load_ends(
    async_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, others = prompt(115), [prompt(seed, 600) for seed in (116, 117)]
    async_engine.ask(asked)
    expected = async_engine.tokens(*others)
    async_engine.forget()
    engine, pool = async_engine.llm.llm_engine, async_engine.scheduler.kv_cache_manager.block_pool
    with monkeypatch.context() as late:
        slow_loads(late, 1.0)
        engine.add_request("aborted", {"prompt_token_ids": asked}, sampling(24))
        engine.step()
        (held,) = worker_side()._async_loads
        taken = set(held.load.pages[0].blocks)
        assert len(taken) == CLAIMED // BLOCK
        engine.abort_request(["aborted"])
        engine.step()
        assert pool.get_num_free_blocks() <= BLOCKS - 1 - len(taken)
        # The other requests need more blocks than are free: they must wait, and must not use the
        # blocks of the load.
        assert async_engine.tokens(*others) == expected
    drain(async_engine)
    assert pool.get_num_free_blocks() == BLOCKS - 1
    assert async_engine.tokens(asked)


def test_prompt_is_computed_in_chunks_after_load(
    async_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = prompt(118, 200)
    longer = [*stem, *prompt(119, 400)]
    async_engine.ask(stem)
    monkeypatch.setattr(async_engine.scheduler.scheduler_config, "long_prefill_token_threshold", 64)
    expected = async_engine.tokens(longer)
    async_engine.forget()
    stored = async_engine.ask(longer)[0]
    assert stored.num_cached_tokens == 599 // BLOCK * BLOCK
    assert list(stored.outputs[0].token_ids) == expected[0]


def test_preempted_requests_load_their_pages(
    async_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, seen = Digests(monkeypatch), record_async_loads(monkeypatch)
    asked = [prompt(seed, 300) for seed in (120, 121, 122)]
    async_engine.tokens(*asked, answer=1)
    alone = [async_engine.tokens(one, answer=150)[0] for one in asked]
    async_engine.forget()
    before = async_engine.count("vllm:num_preemptions")
    # The time of a load decides which requests share a step, and thus the last bits of the computed
    # pages. The test therefore checks the bytes that these loads delivered, not the tokens.
    assert [len(answer) for answer in async_engine.tokens(*asked, answer=150)] == [150] * len(asked)
    assert async_engine.count("vllm:num_preemptions") > before, (
        "no request was preempted: the test has no effect"
    )
    assert len(seen) > len(asked)
    assert all(seen)
    assert digests.all_came_back()
    async_engine.forget()
    assert [async_engine.tokens(one, answer=150)[0] for one in asked] == alone


def worker_side() -> WorkerSide:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side: WorkerSide = get_kv_transfer_group().data_path._worker
    return side


def sampling(answer: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)


def drain(engine: Engine) -> None:
    """Runs steps, by asking at most 20 short questions, until no load is in progress."""
    for seed in range(200, 220):
        engine.ask(prompt(seed, 40), answer=2)
        if not worker_side()._async_loads:
            break
    engine.forget()
