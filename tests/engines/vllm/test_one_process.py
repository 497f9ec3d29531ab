"""vLLM with scheduler and worker in one process: answers from stored pages, the bytes of loaded
blocks, and failing loads.
"""

from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from harness import BLOCK, Engine, prompt
from probes import Digests, evict_after_match, fail_loads

from ritornello import Store
from ritornello.vllm.store import VllmStore

# Tokens that can be loaded for a prompt of 300 tokens: the full pages of its first 299 tokens.
CLAIMED = 299 // BLOCK * BLOCK


def test_warm_answer_equals_answer_of_engine_cache(engine: Engine) -> None:
    asked = prompt(1)
    engine.ask(asked)
    local = engine.ask(asked)[0]
    engine.forget()
    before = engine.external_tokens()
    warm = engine.ask(asked)[0]
    assert local.num_cached_tokens == warm.num_cached_tokens == CLAIMED
    assert engine.external_tokens() - before == CLAIMED
    assert warm.outputs[0].token_ids == local.outputs[0].token_ids


def test_block_bytes_are_restored(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = Digests(monkeypatch)
    asked = prompt(2, 500)
    engine.ask(asked)
    engine.forget()
    engine.ask(asked)
    assert len(digests.loaded) == 499 // BLOCK
    assert digests.all_came_back()


def test_pages_filled_by_decoding_are_saved(engine: Engine) -> None:
    asked = prompt(3, 40)
    answer = engine.tokens(asked, answer=200)[0]
    engine.forget()
    follow_up = [*asked, *answer, 5, 6, 7]
    # The last token of the answer was sampled, but its KV was never computed, so its page is not
    # saved.
    expected = (len(asked) + len(answer) - 1) // BLOCK * BLOCK
    assert engine.ask(follow_up)[0].num_cached_tokens == expected


def test_last_token_is_never_claimed(engine: Engine) -> None:
    asked = prompt(4, 4 * BLOCK)
    engine.ask(asked)
    engine.forget()
    assert engine.ask(asked)[0].num_cached_tokens == 3 * BLOCK


def test_longer_prompt_loads_missing_pages_only(engine: Engine) -> None:
    asked = prompt(5, 320)
    engine.ask(asked)
    engine.forget()
    engine.ask(asked[:130])
    before = engine.external_tokens()
    assert engine.ask(asked)[0].num_cached_tokens == 288
    assert engine.external_tokens() - before == 288 - 128


def test_failed_pages_are_recomputed_with_same_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt(6)
    expected = engine.tokens(asked)
    engine.forget()
    with monkeypatch.context() as broken:
        fail_loads(broken, [3, 5])
        assert engine.tokens(asked) == expected
    # vLLM recomputed the failed blocks in place, so hits in vLLM's own cache have the right bytes
    # too.
    assert engine.tokens(asked) == expected
    engine.forget()
    assert engine.tokens(asked) == expected


def test_pages_computed_from_failed_load_are_not_saved(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = Digests(monkeypatch)
    asked = prompt(7, 200)
    longer = [*asked, *prompt(8, 200)]
    engine.ask(asked)
    engine.forget()
    with monkeypatch.context() as broken:
        fail_loads(broken, [2])
        wrong_if_saved = engine.tokens(longer)
    engine.forget()
    # The store holds every page of the longer prompt, and none of them was computed from the failed
    # block.
    again = engine.ask(longer)[0]
    assert again.num_cached_tokens == 399 // BLOCK * BLOCK
    assert list(again.outputs[0].token_ids) == wrong_if_saved[0]
    assert digests.all_came_back()


def test_requests_sharing_failed_load_answer_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = prompt(9, 256)
    both = [[*stem, *prompt(10, 40)], [*stem, *prompt(11, 40)]]
    expected = engine.tokens(*both)
    engine.forget()
    with monkeypatch.context() as broken:
        fail_loads(broken, [1])
        assert engine.tokens(*both) == expected
    assert engine.tokens(*both) == expected


def test_eviction_before_load_costs_time_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt(12)
    expected = engine.tokens(asked)
    engine.forget()
    with monkeypatch.context() as broken:
        evict_after_match(broken, keep=4)
        assert engine.tokens(asked) == expected
    engine.forget()
    # The pages that were evicted were saved again.
    again = engine.ask(asked)[0]
    assert again.num_cached_tokens == CLAIMED
    assert list(again.outputs[0].token_ids) == expected[0]


def test_preemption_while_saving_keeps_bytes_right(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = Digests(monkeypatch)
    asked = [prompt(seed, 300) for seed in (13, 14, 15, 16)]
    alone = [engine.tokens(one, answer=150)[0] for one in asked]
    engine.forget()
    before = engine.count("vllm:num_preemptions")
    together = engine.tokens(*asked, answer=150)
    assert engine.count("vllm:num_preemptions") > before, (
        "no request was preempted: the test has no effect"
    )
    # If loads run concurrently with other requests, a preempted request may find fewer pages in the
    # store than it had computed, because the last of these pages are still being stored. A prefill
    # then computes tokens again that decoding had computed, and may round them differently. So the
    # answers are compared only if no load runs concurrently with other requests.
    if not engine.scheduler.connector.data_path._loads_apart():
        assert together == alone
    engine.forget()
    assert [engine.tokens(one, answer=150)[0] for one in asked] == alone
    assert digests.all_came_back()


def test_request_can_opt_out(engine: Engine) -> None:
    secret = prompt(17)
    engine.ask(secret, params={"ritornello.no_store": True})
    engine.forget()
    assert engine.ask(secret, params={"ritornello.no_store": True})[0].num_cached_tokens == 0
    engine.forget()
    engine.ask(secret)
    engine.forget()
    assert engine.ask(secret, params={"ritornello.no_load": True})[0].num_cached_tokens == 0
    engine.forget()
    assert engine.ask(secret)[0].num_cached_tokens == CLAIMED


def test_request_can_retain_pages(engine: Engine, store_path: Path) -> None:
    def retained() -> int:
        with Store.open(str(store_path)) as store:
            store.flush()
            return int(store.stats()["retained_bytes"])

    def grown(before: int) -> int:
        """Waits, at most 30 seconds, until more than `before` bytes are retained: the puts that
        retain pages run in the background. Returns the number of retained bytes.
        """
        deadline = monotonic() + 30
        while (now := retained()) <= before and monotonic() < deadline:
            sleep(0.05)
        return now

    asked, known = prompt(21), prompt(22)
    engine.ask(known)
    before = retained()
    engine.ask(asked, params={"ritornello.retain": 60})
    first = grown(before)
    assert first > before
    engine.forget()
    engine.ask(known, params={"ritornello.retain": 60})
    assert grown(first) > first, "pages stored earlier must be retained as well"


def test_reset_hides_earlier_pages(engine: Engine) -> None:
    asked = prompt(18)
    engine.ask(asked)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.ask(asked)[0].num_cached_tokens == 0
    engine.forget()
    assert engine.ask(asked)[0].num_cached_tokens == CLAIMED


def test_raising_store_costs_hits_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt(19)
    expected = engine.tokens(asked)
    engine.forget()

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the disk failed")

    with monkeypatch.context() as broken:
        broken.setattr(VllmStore, "_ensure_open", lambda store: Broken())
        output = engine.ask(asked)[0]
    assert output.num_cached_tokens == 0
    assert list(output.outputs[0].token_ids) == expected[0]
    engine.forget()
    assert engine.ask(asked)[0].num_cached_tokens == CLAIMED


def test_page_counters_match_lookups_loads_and_saves(engine: Engine) -> None:
    names = ("probed_pages", "hit_pages", "loaded_pages", "saved_pages", "steps", "errors")

    def counts() -> dict[str, float]:
        return {name: engine.count(f"vllm:ritornello_{name}") for name in names}

    asked = prompt(20)
    before = counts()
    engine.ask(asked, answer=2)
    engine.forget()
    engine.ask(asked, answer=2)
    engine.ask(prompt(21, 40), answer=4)
    moved = {name: value - before[name] for name, value in counts().items()}
    pages = CLAIMED // BLOCK
    assert moved["probed_pages"] >= 2 * pages
    assert moved["hit_pages"] == moved["loaded_pages"] == pages
    assert moved["saved_pages"] >= pages
    assert moved["errors"] == 0
    assert engine.count("vllm:ritornello_missed_pages", reason="not_found") >= pages
