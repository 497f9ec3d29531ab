"""Prefix lengths that can be restored if a page has parts in several of SGLang's host pools."""

import itertools

import pytest

from ritornello.sglang.hits import ALL, GROUPS, TRAILING, Presence, restorable_prefixes


def side(policy: str, present: str, window: int = 1, pool: str = "side") -> Presence:
    return Presence(pool, policy, window, [page == "1" for page in present])


def test_every_length_is_restorable_without_side_pools() -> None:
    found = restorable_prefixes("kv", 3, [])
    assert (found.pages, found.restorable, found.pools) == (3, [1, 2, 3], {"kv": 3})
    assert restorable_prefixes("kv", 0, []).pools == {}


@pytest.mark.parametrize(
    ("policy", "present", "window", "restorable"),
    [
        (ALL, "11011", 1, [1, 2]),
        (ALL, "01111", 1, []),
        (TRAILING, "00101", 1, [3, 5]),
        (TRAILING, "01101", 2, [3]),
        (TRAILING, "11101", 2, [1, 2, 3]),
        (TRAILING, "11111", 0, [1, 2, 3, 4, 5]),
        (GROUPS, "00000", 1, [1, 2, 3, 4, 5]),
        ("unknown_policy", "11111", 1, []),
    ],
)
def test_hit_policy_of_side_pool_limits_restorable_lengths(
    policy: str, present: str, window: int, restorable: list[int]
) -> None:
    found = restorable_prefixes("kv", 5, [side(policy, present, window)])
    assert found.restorable == restorable
    assert found.pages == max(restorable, default=0)


def test_restorable_length_must_suit_all_pools() -> None:
    sides = [side(TRAILING, "0110", pool="mamba"), side(ALL, "1101", pool="indexer")]
    found = restorable_prefixes("kv", 4, sides)
    assert found.restorable == [2]
    assert found.pools == {"kv": 4, "mamba": 3, "indexer": 2}


def test_pool_of_block_groups_does_not_limit_prefix() -> None:
    assert restorable_prefixes("kv", 2, [side(GROUPS, "11", pool="c4")]).pools == {"kv": 2}


def test_trailing_window_must_be_present_at_prefix_end() -> None:
    for bits in itertools.product("01", repeat=6):
        for window in range(1, 7):
            present = "".join(bits)
            expected = [
                pages for pages in range(1, 7) if "0" not in present[max(0, pages - window) : pages]
            ]
            assert (
                restorable_prefixes("kv", 6, [side(TRAILING, present, window)]).restorable
                == expected
            )
