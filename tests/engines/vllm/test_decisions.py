"""`ritornello explain --request`: requests of vLLM are explained by the ids that vLLM returned."""

from pathlib import Path

from explanations import answers, decisions, explain
from harness import BLOCK, Engine, prompt

from ritornello import Store

# Pages that can be loaded for a prompt of 300 tokens: the full pages of its first 299 tokens.
PAGES = 299 // BLOCK


def evict_all(path: Path) -> None:
    with Store.open(path) as store:
        for scope, _, _ in store.scopes():
            store.configure(scope, quota=4096)
            store.configure(scope)


def test_request_is_explained_by_the_returned_id(engine: Engine, store_path: Path) -> None:
    asked = prompt(241)
    cold = engine.ask(asked)[0]
    engine.forget()
    entry = explain(store_path, cold.request_id)
    assert decisions(entry) == [("missed", PAGES, 0, 0)]
    assert answers(entry) == [("hit", "", PAGES)]
    warm = engine.ask(asked)[0]
    assert warm.num_cached_tokens == PAGES * BLOCK
    entry = explain(store_path, warm.request_id)
    assert decisions(entry) == [("loaded", PAGES, PAGES, PAGES)]
    # A put that is in progress would keep the pages before it from eviction.
    engine.forget()
    evict_all(store_path)
    entry = explain(store_path, warm.request_id)
    assert decisions(entry) == [("loaded", PAGES, PAGES, PAGES)]
    assert answers(entry) == [("evicted", "quota", PAGES)]
    short = engine.ask(asked[: BLOCK // 2])[0]
    assert decisions(explain(store_path, short.request_id)) == [("too_short", 0, 0, 0)]
