"""Pages of stand-ins for SGLang's host pools, and invalid pages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_host import PAGES, PIECE, TOKENS, Host, keys, pool_of, slots

from ritornello.sglang.meter import RATES_MAX, RateMeter
from ritornello.sglang.pages import PagesError, page_ids, spans
from ritornello.sglang.settings import Settings
from ritornello.sglang.store import SGLangStore


@pytest.fixture
def meter() -> RateMeter:
    return RateMeter()


@pytest.fixture
def quiet(tmp_path: Path, meter: RateMeter) -> Any:
    store = SGLangStore(Settings(str(tmp_path / "store"), "640MiB"), meter)
    assert store.open()
    yield store
    store.close()


def avoided_tokens(store: SGLangStore) -> int:
    return int(
        store.call("stats", lambda found: found.stats(), {})["counters"]["prefill_avoided_tokens"]
    )


def test_page_pieces_become_spans() -> None:
    host = Host()
    found = spans(lambda page: host.get_page_buffer_meta(slots(page)), PAGES)
    assert [span.base for span in found] == [piece.ctypes.data for piece in host.memory]
    assert {(span.block_bytes, span.stride) for span in found} == {(PIECE, PIECE)}


@pytest.mark.parametrize(
    ("pages", "pieces", "problem"),
    [
        (0, {}, "no pages"),
        (3, {0: ([], []), 1: ([], []), 2: ([], [])}, "names no pieces"),
        (3, {0: ([8], [4]), 1: ([12], [8]), 2: ([16], [4])}, "differ in size"),
        (3, {0: ([8], [4]), 1: ([12], [4]), 2: ([20], [4])}, "not evenly spaced"),
        (2, {0: ([8], [4]), 1: ([10], [4])}, "not evenly spaced"),
        (2, {0: ([8], [4]), 1: ([4], [4])}, "not evenly spaced"),
    ],
)
def test_unusable_page_memory_is_refused(pages: int, pieces: Any, problem: str) -> None:
    with pytest.raises(PagesError, match=problem):
        spans(lambda page: pieces[page], pages)


def test_partial_pages_are_refused() -> None:
    assert page_ids(slots(3, 0), 2, TOKENS) == [3, 0]
    assert page_ids(slots(3, 0), 3, TOKENS) is None
    assert page_ids(slots(3, 0) + 1, 2, TOKENS) is None
    assert page_ids(None, 2, TOKENS) is None


@pytest.mark.parametrize("named", [True, False], ids=["in place", "copied"])
def test_pages_round_trip_in_place_and_copied(
    quiet: SGLangStore, meter: RateMeter, named: bool
) -> None:
    host = Host(named=named)
    pool = pool_of(host, quiet, meter)
    assert pool.in_place is named
    expected = host.memory[:, [5, 2, 7]].copy()
    assert pool.put(keys(3), slots(5, 2, 7), None) == 3
    assert pool.leading(keys(5), None) == 3
    assert pool.prefixes(keys(5), None, []).restorable == [1, 2, 3]
    host.memory[:] = 0
    assert pool.get(keys(5), slots(0, 1, 3, 4, 6)) == 3
    assert np.array_equal(host.memory[:, [0, 1, 3]], expected)
    assert meter.counts()["missed_pages:not_found"] == 2
    assert avoided_tokens(quiet) == 3 * TOKENS


def test_pool_that_sglang_compacts_is_copied(quiet: SGLangStore, meter: RateMeter) -> None:
    host = Host()
    vars(host)["shared_allocation_domain"] = object()
    assert not pool_of(host, quiet, meter).in_place


def test_copies_in_different_order_are_refused(quiet: SGLangStore, meter: RateMeter) -> None:
    host = Host()
    pool = pool_of(host, quiet, meter)
    assert pool.put_flat(keys(1), [host.get_data_page(0)], None) == 0
    assert meter.counts() == {"refused_pages:order": 1}


def test_page_of_different_size_ends_batch(quiet: SGLangStore, meter: RateMeter) -> None:
    host = Host(named=False)
    pool = pool_of(host, quiet, meter)
    pages = [host.get_data_page(0), host.get_data_page(4)[1:], host.get_data_page(8)]
    assert pool.put_flat(keys(3), pages, None) == 1
    assert pool.leading(keys(3), None) == 1
    assert meter.counts()["refused_pages:size"] == 2


def test_closed_store_is_not_called(quiet: SGLangStore, meter: RateMeter) -> None:
    pool = pool_of(Host(), quiet, meter)
    quiet.close()
    assert pool.put(keys(1), slots(0), None) == 0
    assert pool.get(keys(1), slots(0)) == 0
    assert (pool.leading(keys(1), None), pool.prefixes(keys(1), None, []).pages) == (0, 0)
    assert meter.counts() == {}
    assert not quiet.open()


def test_recorded_rates_are_limited_in_number_and_taken_once() -> None:
    meter = RateMeter()
    for _ in range(RATES_MAX + 5):
        meter.moved("loaded", 2, 500, 0.001)
    meter.moved("saved", 0, 500, 1.0)
    rates = meter.take_rates()
    assert rates.prefetch_pages == [2] * RATES_MAX
    assert rates.prefetch_bandwidth[0] == pytest.approx(0.001)
    assert rates.backup_pages == []
    assert meter.take_rates().prefetch_pages == []
    assert meter.counts()["loaded_pages"] == 2 * (RATES_MAX + 5)
    assert meter.counts()["load_seconds"] == pytest.approx(0.001 * (RATES_MAX + 5))
