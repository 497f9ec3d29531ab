"""Our tier under vLLM's real tiering manager, which moves chunks (here single blocks) between
device, host memory and secondary tiers: answers, bytes, failing loads, aborted requests, resets of
the cache, and a missing store.
"""

from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from conftest import FIRST, SECOND
from explanations import answers, are_hits, decisions, explain
from harness import BLOCK, prompt
from tier_harness import TierEngine
from tier_probes import Digests, fail_loads
from weights import flip

from ritornello.vllm.tier.store import TierStore
from ritornello.vllm.tier.tier import Tier


def cached(asked: list[int]) -> int:
    """Returns the number of a prompt's tokens that vLLM can load: the tokens in the full chunks
    before the prompt's last token.
    """
    return (len(asked) - 1) // BLOCK * BLOCK


def ask(engine: TierEngine, asked: list[int]) -> dict[str, Any]:
    (output,) = engine.ask(asked)
    return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}


def assert_quiet(engine: TierEngine) -> None:
    """Asserts that no job runs, no lease is held, and at most one request is known: the request
    whose end vLLM reports with its next step.
    """
    for _ in range(2):
        engine.ask([1, 2, 3], answer=2)
        engine.tier._jobs.wait(60)
    tier = engine.tier
    leases = tier._store._store.stats()["leases"]
    assert (len(tier._jobs), tier._active_requests, leases) == (0, set(), 0)
    assert len(tier._requests) <= 1


def test_client_finds_its_own_chunks(told: dict[str, Any]) -> None:
    assert [answer["cached"] for answer in told["cold"]] == [0, 0]
    assert [answer["cached"] for answer in told["client"]] == [cached(FIRST), cached(SECOND)]
    assert [a["tokens"] for a in told["client"]] == [a["tokens"] for a in told["cold"]]
    counts = told["client_counts"]
    # vLLM counts a chunk again if it repeats the lookup, for example because its host tier was
    # full.
    assert counts["tiering_chunk_hits"] >= len(FIRST) // BLOCK + len(SECOND) // BLOCK
    assert "tiering_promotion_job_failures" not in counts
    assert "ritornello_errors" not in counts


def test_owner_death_costs_no_answer(told: dict[str, Any]) -> None:
    first, fresh = told["killed"]
    assert first["tokens"] == told["cold"][0]["tokens"]
    assert first["cached"] == cached(FIRST)
    assert fresh["cached"] == 0


def test_chunks_of_other_process_are_found(engine: TierEngine, told: dict[str, Any]) -> None:
    before = engine.offloaded()
    assert ask(engine, FIRST) == {"tokens": told["cold"][0]["tokens"], "cached": cached(FIRST)}
    assert ask(engine, SECOND) == {"tokens": told["cold"][1]["tokens"], "cached": cached(SECOND)}
    after = engine.offloaded()
    assert after["disk"] - before["disk"] == cached(FIRST) + cached(SECOND)
    # The chunks that the other process put after the death of the store's owner are found as well.
    assert ask(engine, prompt(3, 400))["cached"] == cached(prompt(3, 400))


def test_request_needs_one_lookup(engine: TierEngine) -> None:
    before = engine.offloaded()
    ask(engine, SECOND)
    after = engine.offloaded()
    # The prompt needs one lookup. The short prompt that makes vLLM report the counts has no full
    # chunk, so it needs no lookup.
    assert after["ritornello_lookups"] - before["ritornello_lookups"] == 1
    assert after["tiering_chunk_hits"] - before["tiering_chunk_hits"] == len(SECOND) // BLOCK


def test_request_is_explained_by_the_returned_id(engine: TierEngine, store_path: Path) -> None:
    asked = prompt(16, 300)
    chunks = len(asked) // BLOCK
    cold = engine.ask(asked)[0]
    engine.forget_all()
    entry = explain(store_path, cold.request_id)
    assert decisions(entry) == [("missed", chunks, 0, 0)]
    assert are_hits(entry, chunks), answers(entry)
    warm = engine.ask(asked)[0]
    assert warm.num_cached_tokens == cached(asked)
    # vLLM repeats the lookup while it waits for the chunks.
    entry = explain(store_path, warm.request_id)
    assert decisions(entry) == [("loaded", chunks, chunks, chunks)]
    engine.forget_all()
    refused = engine.ask(asked, params={"ritornello.no_load": True})[0]
    assert decisions(explain(store_path, refused.request_id)) == [("not_cacheable", chunks, 0, 0)]
    short = engine.ask(asked[: BLOCK - 1])[0]
    assert decisions(explain(store_path, short.request_id)) == [("too_short", 0, 0, 0)]


def test_decisions_of_client_reach_the_owner(told: dict[str, Any]) -> None:
    counts = told["client_decisions"]
    assert counts["decisions_loaded"] >= 2
    assert counts["decisions_missed"] >= 2
    assert (counts["decisions_failed"], counts["dropped_decisions"]) == (0, 0)


def test_chunk_bytes_are_restored(engine: TierEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = Digests(engine, monkeypatch)
    asked = prompt(4, 450)
    expected = ask(engine, asked)
    engine.forget_all()
    digests.loaded.clear()
    assert ask(engine, asked) == {"tokens": expected["tokens"], "cached": cached(asked)}
    assert len(digests.loaded) == len(asked) // BLOCK
    assert digests.all_came_back()


def test_longer_prompt_loads_stored_prefix(engine: TierEngine) -> None:
    longer = [*FIRST, *prompt(5, 150)]
    expected = ask(engine, longer)
    assert expected["cached"] == len(FIRST) // BLOCK * BLOCK
    engine.forget_all()
    assert ask(engine, longer) == {"tokens": expected["tokens"], "cached": cached(longer)}


@pytest.mark.parametrize(("places", "kept"), [([4, 6], 4), ([0], 0), (None, 0)])
def test_failed_chunks_are_recomputed_with_same_answer(
    engine: TierEngine,
    told: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    places: list[int] | None,
    kept: int,
) -> None:
    with monkeypatch.context() as broken:
        fail_loads(engine, broken, places)
        answer = ask(engine, FIRST)
    assert answer == {"tokens": told["cold"][0]["tokens"], "cached": kept * BLOCK}
    # The copies in vLLM's host tier and in its own cache are right.
    assert ask(engine, FIRST)["tokens"] == told["cold"][0]["tokens"]
    engine.forget()
    assert ask(engine, FIRST)["tokens"] == told["cold"][0]["tokens"]
    assert_quiet(engine)


def test_requests_sharing_failed_load_answer_same(
    engine: TierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = prompt(6, 256)
    both = [[*stem, *prompt(7, 40)], [*stem, *prompt(8, 40)]]
    expected = engine.tokens(*both)
    engine.forget_all()
    with monkeypatch.context() as broken:
        fail_loads(engine, broken, [1])
        assert engine.tokens(*both) == expected
    engine.forget_all()
    assert engine.tokens(*both) == expected
    assert_quiet(engine)


def test_aborted_requests_leave_no_state(engine: TierEngine) -> None:
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    sampling = SamplingParams(max_tokens=8, temperature=0)
    # Requests are aborted after no step, during the load, and after it. One further request is not
    # aborted.
    for steps in (0, 1, 2, 6):
        llm.add_request(f"gone-{steps}", {"prompt_token_ids": SECOND}, sampling)
        for _ in range(steps):
            llm.step()
        llm.abort_request([f"gone-{steps}"])
        engine.forget_all()
    assert ask(engine, SECOND)["cached"] == cached(SECOND)
    assert_quiet(engine)


def test_request_may_opt_out(engine: TierEngine) -> None:
    (output,) = engine.ask(FIRST, params={"ritornello.no_load": True})
    assert output.num_cached_tokens == 0
    asked = prompt(9, 300)
    engine.ask(asked, params={"ritornello.no_store": True})
    engine.forget_all()
    assert ask(engine, asked)["cached"] == 0


def test_reset_hides_earlier_chunks(engine: TierEngine) -> None:
    asked = prompt(10, 300)
    ask(engine, asked)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    expected = ask(engine, asked)
    assert expected["cached"] == 0
    engine.forget_all()
    assert ask(engine, asked) == {"tokens": expected["tokens"], "cached": cached(asked)}


def test_chunks_of_earlier_weights_are_not_stored(engine: TierEngine) -> None:
    files, known, fresh = engine.tier._namespace, prompt(14, 300), prompt(15, 300)
    expected = ask(engine, known)
    engine.forget_all()
    engine.llm.collective_rpc(flip)
    # Empties only vLLM's own cache. Since `forget_all`, vLLM's host tier has no chunk of `known`,
    # only chunks of the prompt with which `forget_all` fills the host tier.
    engine.forget()
    changed = ask(engine, known)
    assert changed["cached"] == 0
    assert changed["tokens"] != expected["tokens"]
    ask(engine, fresh)
    engine.forget_all()
    assert ask(engine, known) == changed
    # A reset of all caches begins an epoch.
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert ask(engine, known) == changed
    engine.forget_all()
    assert ask(engine, known) == {"tokens": changed["tokens"], "cached": cached(known)}
    # Restores the weights of the model's files and the namespace of these weights, as in an engine
    # that was started again.
    engine.llm.collective_rpc(flip)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.tier._set_namespace(files)
    assert ask(engine, fresh)["cached"] == 0
    assert ask(engine, known) == {"tokens": expected["tokens"], "cached": cached(known)}


def test_chunks_loaded_while_weights_change_are_not_used(
    engine: TierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, known, load = engine.tier._namespace, prompt(16, 300), Tier.load
    before = ask(engine, known)
    engine.forget_all()
    changes: list[int] = []

    def load_and_change(tier: Tier, transfer: Any) -> None:
        load(tier, transfer)
        if not changes:
            changes.append(transfer.job_id)
            engine.llm.collective_rpc(flip)

    with monkeypatch.context() as changing:
        changing.setattr(Tier, "load", load_and_change)
        during = ask(engine, known)
    assert len(changes) == 1
    # Begins an epoch, and empties vLLM's host tier.
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    changed = ask(engine, known)
    assert (during["cached"], changed["cached"]) == (0, 0)
    assert during["tokens"] == changed["tokens"] != before["tokens"]
    assert_quiet(engine)
    # Restores the weights and the namespace of the model's files, as in the test above.
    engine.llm.collective_rpc(flip)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.tier._set_namespace(files)
    assert ask(engine, known) == {"tokens": before["tokens"], "cached": cached(known)}


def test_store_smaller_than_working_set_serves(engine: TierEngine) -> None:
    store = engine.tier._store._store
    store.resize("24MiB")
    for seed in range(100, 140):
        engine.ask(prompt(seed, 500), answer=1)
        engine.tier._jobs.wait(60)
    assert store.stats()["counters"]["evicted_pages"] > 0
    asked = prompt(140, 500)
    expected = ask(engine, asked)
    engine.forget_all()
    assert ask(engine, asked) == {"tokens": expected["tokens"], "cached": cached(asked)}
    assert_quiet(engine)


def test_refusing_store_costs_hits_only(
    engine: TierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, call = prompt(11, 300), TierStore.call

    def refuse_puts(store: TierStore, operation: str, action: Any, default: Any) -> Any:
        return default if operation == "put" else call(store, operation, action, default)

    with monkeypatch.context() as broken:
        broken.setattr(TierStore, "call", refuse_puts)
        broken.setattr(TierStore, "lease_prefix", lambda *a: None)
        expected = ask(engine, asked)
        engine.forget_all()
        assert ask(engine, asked)["tokens"] == expected["tokens"]
    assert_quiet(engine)


def test_raising_tier_costs_hits_only(engine: TierEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_call(*_: Any) -> Any:
        raise RuntimeError("made by the test")

    asked = prompt(12, 300)
    expected = ask(engine, asked)
    engine.forget_all()
    for name in ("lookup", "load", "save", "end_step", "end_request", "begin_request"):
        with monkeypatch.context() as broken:
            broken.setattr(Tier, name, broken_call)
            assert ask(engine, asked)["tokens"] == expected["tokens"], name
        engine.forget_all()
    assert engine.offloaded()["ritornello_errors"] > 0


def test_closed_store_is_reopened(engine: TierEngine) -> None:
    """The engine serves while its store is closed, and uses the store after it is reopened. This
    must be the last test of this file, because it closes the store that all tests share.
    """
    expected = ask(engine, FIRST)
    closed = engine.tier._store._store
    assert closed is not None
    closed.close()
    engine.forget_all()
    assert ask(engine, FIRST)["tokens"] == expected["tokens"]
    until = monotonic() + 60
    while engine.tier._store._store in (None, closed):
        assert monotonic() < until
        sleep(0.01)
    engine.forget_all()
    again = ask(engine, FIRST)
    assert again["tokens"] == expected["tokens"]
    assert again["cached"] > 0
