"""The calls that vLLM's connector makes to a cache over tiers."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import keys_of, pages_of
from vllm_shapes import cache_group, identity

from ritornello.errors import RetryError
from ritornello.vllm.cache_groups import ObjectId
from ritornello.vllm.cache_store import CacheStore
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import PromptLength, StoreHit

WAIT = 60.0
PAGE = 64 << 10
IDENTITY = identity(
    cache_group(head_ranges=((0, 1),), stages=(("l.0",),), kv_heads=1, head_bytes=PAGE)
)
OBJECT = ObjectId(0, 0, 0)
KEYS = keys_of("prompt", 5)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[CacheStore]:
    """The cache of a machine that has no pages itself. Another machine has written the prompt to
    the remote of both machines.
    """

    def machine(name: str) -> CacheStore:
        tiers = [f"host 64MiB {tmp_path}/{name}", f"file://{tmp_path}/far"]
        return CacheStore(
            Settings.parse({"tiers": tiers, "gate": "always", "prefetch": "wait_complete"}),
            StepMeter(),
        )

    (tmp_path / "far").mkdir()
    one = machine("one")

    def put(cache: Any) -> int:
        scope = one._scope_for(IDENTITY, OBJECT)
        pages = cache.submit_put(scope, KEYS, pages_of(KEYS, PAGE)).wait(WAIT).pages
        cache.flush()
        return int(pages)

    assert one.call("put", put, 0) == len(KEYS)
    one.close()
    two = machine("two")
    yield two
    two.close()


def test_written_pages_are_counted_once(elsewhere: CacheStore) -> None:
    meter = StepMeter()
    elsewhere._meter = meter
    keys = keys_of("other", 3)

    def put(cache: Any) -> None:
        scope = elsewhere._scope_for(IDENTITY, OBJECT)
        cache.submit_put(scope, keys, pages_of(keys, PAGE)).wait(WAIT)
        cache.flush()

    elsewhere.call("put", put, None)
    told: dict[str, float] = {}
    for _ in range(3):
        elsewhere._counts._taken_at = 0.0
        elsewhere.report_stats()
        for name, amount in (meter.take() or {}).items():
            told[name] = told.get(name, 0) + amount
    assert told["tier_written_pages:remote"] == len(keys)
    assert told["remote_calls:calls"] > 0
    assert len(keys) * PAGE < told["remote_written_bytes"] < (len(keys) + 1) * PAGE
    assert "remote_read_bytes" not in told
    assert not {name for name in told if "dropped" in name or "lost" in name}


def match(cache: CacheStore, *, loads: bool) -> StoreHit:
    prompt = PromptLength(0, len(KEYS) * IDENTITY.groups[0].page_tokens + 1, loads)
    hit = cache.lookup(IDENTITY, [OBJECT], KEYS, WAIT, prompt)
    assert hit is not None
    return hit


def prefetches(cache: CacheStore) -> int:
    return cache.call("stats", lambda each: int(each.stats()["prefetch"]["started"]), -1)


def test_pages_of_request_that_opts_out_are_not_prefetched(elsewhere: CacheStore) -> None:
    hit = match(elsewhere, loads=False)
    assert (hit.pages, hit.present, hit.pending) == (0, 0, False)
    assert prefetches(elsewhere) == 0


def test_pages_of_request_that_loads_are_prefetched(elsewhere: CacheStore) -> None:
    until = time.monotonic() + WAIT
    while (hit := match(elsewhere, loads=True)).pending:
        assert time.monotonic() < until
        time.sleep(0.002)
    assert (hit.pages, list(hit.tiers)) == (len(KEYS), [("remote", len(KEYS))])
    assert prefetches(elsewhere) == 1
    assert match(elsewhere, loads=False).pages == 0


class FailingCache:
    """A cache whose second lookup fails."""

    def __init__(self) -> None:
        self.lookups = 0
        self.released: list[Any] = []

    def lookup(self, *args: Any, **named: Any) -> Any:
        self.lookups += 1
        if self.lookups == 2:
            raise RetryError("made by the test")
        return SimpleNamespace(state="ready", load=5, local=5, leases=[("disk", self.lookups)])

    def release(self, lease: Any) -> None:
        self.released.append(lease)


def test_failed_lookup_keeps_no_leases(
    elsewhere: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FailingCache()
    monkeypatch.setattr(elsewhere, "_store", cache)
    prompt = PromptLength(0, 100, True)
    assert elsewhere.lookup(IDENTITY, [OBJECT, OBJECT], KEYS, WAIT, prompt) is None
    assert cache.released == [("disk", 1)]
    monkeypatch.undo()
