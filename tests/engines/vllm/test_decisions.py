"""`ritornello explain --request`: requests of vLLM are explained by the ids that vLLM returned.
`ritornello stat`: tokens that vLLM loaded.
"""

from pathlib import Path
from time import monotonic, sleep

from explanations import answers, are_hits, ask, decisions, explain
from harness import BLOCK, Engine, prompt

from ritornello import Store

# Pages that can be loaded for a prompt of 300 tokens: the full pages of its first 299 tokens. vLLM
# always computes the last token.
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
    assert are_hits(entry, PAGES), answers(entry)
    warm = engine.ask(asked)[0]
    assert warm.num_cached_tokens == PAGES * BLOCK
    entry = explain(store_path, warm.request_id)
    assert decisions(entry) == [("loaded", PAGES, PAGES, PAGES)]
    # Wait for the puts: a put in progress would keep the pages before it from eviction.
    engine.forget()
    evict_all(store_path)
    entry = explain(store_path, warm.request_id)
    assert decisions(entry) == [("loaded", PAGES, PAGES, PAGES)]
    assert answers(entry) == [("evicted", "quota by lru", PAGES)]
    short = engine.ask(asked[: BLOCK // 2])[0]
    assert decisions(explain(store_path, short.request_id)) == [("too_short", 0, 0, 0)]


def test_loaded_tokens_count_as_avoided_prefill(engine: Engine, store_path: Path) -> None:
    asked = prompt(242)
    # Compute two prompts: the duration of an engine's first prefill is not recorded if the engine's
    # KV memory is on a device.
    for seed in (243, 244):
        engine.ask(prompt(seed))
    engine.ask(asked)
    engine.forget()
    before = ask("stat", str(store_path))["savings"]
    assert engine.ask(asked)[0].num_cached_tokens == PAGES * BLOCK
    deadline = monotonic() + 30
    while True:
        after = ask("stat", str(store_path))["savings"]
        if after["avoided_tokens"] > before["avoided_tokens"]:
            break
        assert monotonic() < deadline, "the engine reported no loaded tokens"
        sleep(0.2)
    assert after["avoided_tokens"] - before["avoided_tokens"] == PAGES * BLOCK
    assert after["untimed_tokens"] == before["untimed_tokens"]
    assert after["prefill_seconds"] > before["prefill_seconds"]
    assert after["load_seconds"] > before["load_seconds"]
