"""Pages that the connector of vLLM looked up and did not load, counted by reason, with a stand-in
for the store.
"""

from typing import Any

import pytest
from scheduler_support import BLOCKS, Blocks, keep, request, side_of
from vllm_shapes import FIRST, TOKENS, FakeStore, cache_group, identity

from ritornello.vllm.cache_groups import ObjectId, trailing
from ritornello.vllm.scheduler import SchedulerSide


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def side(store: FakeStore) -> SchedulerSide:
    return side_of(store, Blocks(), identity())


def counted(
    side: SchedulerSide, asked: Any, local: int = 0, loads: bool = True
) -> dict[str, float]:
    """Admits a request, of which the engine has `local` pages. Returns the counts of pages that
    were looked up. `loads`: vLLM loads the claimed tokens by this connector.
    """
    claimed, _ = side.matched_tokens(asked, local * TOKENS)
    assert claimed is not None
    side.request_admitted(asked, BLOCKS, claimed if loads else 0)
    counts = side._meter.take()
    return {name.removeprefix("missed_pages:"): amount for name, amount in counts.items()}


@pytest.mark.parametrize(
    ("local", "chosen", "expected"),
    [
        (0, 5, {"probed_pages": 7, "hit_pages": 5, "not_found": 2}),
        (0, 3, {"probed_pages": 7, "hit_pages": 3, "declined": 2, "not_found": 2}),
        (0, 0, {"probed_pages": 7, "declined": 5, "not_found": 2}),
        (2, 0, {"probed_pages": 5, "declined": 3, "not_found": 2}),
        (2, 3, {"probed_pages": 5, "hit_pages": 1, "declined": 2, "not_found": 2}),
        (4, 3, {"probed_pages": 3, "declined": 1, "not_found": 2}),
        (6, 0, {"probed_pages": 1, "not_found": 1}),
        (7, 0, {}),
    ],
)
def test_stored_pages_that_the_gate_did_not_choose_are_declined(
    side: SchedulerSide, store: FakeStore, local: int, chosen: int, expected: dict[str, float]
) -> None:
    asked = request(7 * TOKENS + 1)
    keep(store, asked, 5)
    store.worth_loading = chosen
    assert counted(side, asked, local) == expected


@pytest.mark.parametrize(
    ("second_group", "expected"),
    [
        # The gate chose 4 of the 8 small pages, which are 2 of the 4 pages that are counted.
        ((1, 3), {"probed_pages": 4, "hit_pages": 2, "declined": 2}),
        # The second group lacks a page that the gate chose, so the later pages cannot be used.
        ((1,), {"probed_pages": 4, "hit_pages": 1, "not_found": 3}),
    ],
)
def test_groups_with_different_page_lengths_share_one_count(
    store: FakeStore, second_group: tuple[int, ...], expected: dict[str, float]
) -> None:
    wide = cache_group(stages=(("l.2",),), tokens=2 * TOKENS)
    side = side_of(store, Blocks(), identity(cache_group(), wide))
    asked = request(8 * TOKENS + 1)
    keep(store, asked, 8)
    store.keep([asked.block_hashes[place] for place in second_group], ObjectId(1, 0, 0))
    store.worth_loading = 4
    assert counted(side, asked) == expected


def test_pages_before_a_missing_window_are_not_declined(store: FakeStore) -> None:
    groups = (cache_group(), cache_group(trailing(2 * TOKENS), stages=(("l.2",),)))
    side = side_of(store, Blocks(), identity(*groups))
    asked = request(7 * TOKENS + 1)
    store.keep(asked.block_hashes[:6], FIRST)
    # The gate chooses four pages, and the window at their end is missing.
    store.keep(asked.block_hashes[:2], ObjectId(1, 0, 0))
    store.worth_loading = 4
    assert counted(side, asked) == {
        "probed_pages": 7,
        "hit_pages": 2,
        "declined": 2,
        "not_found": 3,
    }


def test_stored_pages_of_request_that_loads_none_are_not_declined(
    side: SchedulerSide, store: FakeStore
) -> None:
    asked = request(7 * TOKENS + 1, kv_transfer_params={"ritornello.no_load": True})
    keep(store, asked, 5)
    # For such a request a cache over tiers chooses no page.
    store.worth_loading = 0
    assert counted(side, asked) == {"probed_pages": 7, "opted_out": 7}


@pytest.mark.parametrize(
    ("chosen", "expected"), [(3, {"other_connector": 7}), (0, {"declined": 5, "not_found": 2})]
)
def test_pages_that_another_connector_loads_are_not_declined(
    store: FakeStore, chosen: int, expected: dict[str, float]
) -> None:
    side = side_of(store, Blocks(), identity(), composed=True)
    asked = request(7 * TOKENS + 1)
    keep(store, asked, 5)
    store.worth_loading = chosen
    assert counted(side, asked, loads=False) == {"probed_pages": 7} | expected
