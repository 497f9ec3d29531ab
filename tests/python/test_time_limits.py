"""The deadlines that the engines' stores give to transfers: long transfers have more time."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support import keys_of
from vllm_shapes import FIRST
from worker_support import KEYS, loading, outcome, ready

import ritornello as rt
from ritornello.connector.meter import Meter
from ritornello.lmcache import store as lmcache
from ritornello.lmcache.settings import Settings as LMCacheSettings
from ritornello.sglang import store as sglang
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.settings import Settings as SGLangSettings
from ritornello.vllm import worker
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.settings import Settings as VllmSettings
from ritornello.vllm.shard import PageObject
from ritornello.vllm.store import VllmStore
from ritornello.vllm.tier import store as tier

MIB = 1 << 20
# Bytes of the longest page that a store accepts.
PAGE = 512 * MIB
SCOPE = rt.Scope.opaque("long", PAGE)
LONG = keys_of("long", 2)
NO_MEMORY: Any = ()


class RecordingCore:
    """Stand-in for an open store that moves no pages. Its `time_limit` allows one second for each
    MiB of a get, and two seconds for each MiB of a put, in addition to the least time. `timeouts`:
    the timeouts of the gets and puts, in the order of their calls.
    """

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def time_limit(self, nbytes: int, least: float, *, put: bool = False) -> float:
        return least + nbytes / MIB * (2 if put else 1)

    def submit_get(
        self, scope: rt.Scope, keys: Sequence[bytes], pages: Any, *, timeout: float, **_: Any
    ) -> Any:
        self.timeouts.append(timeout)
        moved = outcome(*[True] * len(keys))
        return SimpleNamespace(wait=lambda *_: moved, done=lambda: True)

    submit_put = submit_get

    def close(self) -> None:
        pass


def run_lmcache() -> None:
    store = lmcache.LMCacheStore(LMCacheSettings("/kv"))
    store.submit_get(SCOPE, LONG, NO_MEMORY, staged=False)
    store.submit_put(SCOPE, LONG, NO_MEMORY)
    store.close()


def run_sglang() -> None:
    store = sglang.SGLangStore(SGLangSettings("/kv"), RateMeter())
    store.get(SCOPE, LONG, NO_MEMORY)
    store.put(SCOPE, LONG, NO_MEMORY, None)
    store.close()


def run_tier() -> None:
    store = tier.TierStore(VllmSettings("/kv"), Meter())
    store.submit_get(SCOPE, LONG, NO_MEMORY, staged=False)
    store.submit_put(SCOPE, (), 0, LONG, NO_MEMORY, None)
    store.close()


def run_vllm() -> None:
    meter = StepMeter()
    store = VllmStore(VllmSettings("/kv"), meter)
    pool: Any = SimpleNamespace(page_bytes=PAGE, pages=list)
    side = ready(store, meter, PageObject(FIRST, pool, is_writer=True))
    side.load(loading("a"))
    assert side.results.take_failed_blocks() == set()
    store.close()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (run_lmcache, [lmcache.GET_SECONDS + 1024, lmcache.PUT_SECONDS + 2048]),
        (run_sglang, [sglang.GET_SECONDS + 1024, sglang.PUT_SECONDS + 2048]),
        (run_tier, [tier.LOAD_SECONDS + 1024, tier.STORE_SECONDS + 2048]),
        # The connector of vLLM passes no timeout to its puts: they have the store's default
        # deadline.
        (run_vllm, [worker.LOAD_SECONDS + 512 * len(KEYS)]),
    ],
)
def test_long_pages_have_longer_deadlines(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], None], expected: list[float]
) -> None:
    core = RecordingCore()
    monkeypatch.setattr("ritornello.connector.fail_safe.open_store", lambda *_: core)
    run()
    assert core.timeouts == expected
