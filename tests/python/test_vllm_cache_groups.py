"""The pages of each KV cache group that a prefix needs so that vLLM can resume after it, and the
workers that hold and store each KV head.
"""

import pytest
from vllm_shapes import TOKENS, cache_group

from ritornello.vllm.cache_groups import (
    ALL,
    HEAD_RANGES_MAX,
    OBJECT_BYTES,
    ObjectId,
    Reach,
    head_ranges_of,
    heads_of,
    held_head_ranges,
    is_writer,
    longest_resumable,
    object_ids,
    trailing,
)

STATE = Reach(1)


@pytest.mark.parametrize(
    ("reach", "needed"),
    [
        (ALL, range(5)),
        (STATE, range(4, 5)),
        # A window includes the next token itself, so the numbers of earlier tokens in these windows
        # are: 0, 1, a page, a page and 1, and 100 pages less 1.
        (trailing(1), range(5, 5)),
        (trailing(2), range(4, 5)),
        (trailing(TOKENS + 1), range(4, 5)),
        (trailing(TOKENS + 2), range(3, 5)),
        (trailing(100 * TOKENS), range(5)),
    ],
)
def test_reach_gives_pages_needed_to_resume(reach: Reach, needed: range) -> None:
    assert list(reach.pages_needed(5, TOKENS)) == list(needed)


def present(pages: str) -> list[bool]:
    return [page == "x" for page in pages]


# `tokens`, the length of the longest resumable prefix, is given in pages.
@pytest.mark.parametrize(
    ("window", "state", "tokens"),
    [
        ("xxxxx", "xxxxx", 5),
        # Only the recurrent state of the third page is stored.
        ("xxxxx", "..x..", 3),
        # A prefix of several pages can be resumed if the window group has its last two pages: in
        # the first case the prefixes of 2 and of 5 pages.
        ("xx.xx", "xxxxx", 5),
        ("xx.x.", "xxxxx", 2),
        ("xx.xx", "xxx..", 2),
        # A prefix of one page can be resumed if the window group has this page.
        ("x.x.x", "xxxxx", 1),
        (".x.x.", "xxxxx", 0),
    ],
)
def test_longest_prefix_that_all_groups_can_resume_is_found(
    window: str, state: str, tokens: int
) -> None:
    groups = (cache_group(), cache_group(trailing(2 * TOKENS)), cache_group(STATE))
    there = {ObjectId(1, 0, 0): present(window), ObjectId(2, 0, 0): present(state)}
    assert longest_resumable(groups, there, 5 * TOKENS, TOKENS) == tokens * TOKENS


def test_resumable_length_is_multiple_of_every_groups_page() -> None:
    groups = (cache_group(), cache_group(trailing(2 * TOKENS), tokens=2 * TOKENS))
    there = {ObjectId(1, 0, 0): present("xx")}
    assert longest_resumable(groups, there, 5 * TOKENS, 2 * TOKENS) == 4 * TOKENS


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "heads"),
    [
        (1, 8, [(0, 8)]),
        (4, 8, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (4, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (2, 1, [(0, 1), (0, 1)]),
    ],
)
def test_worker_holds_its_share_of_heads(
    ranks: int, kv_heads: int, heads: list[tuple[int, int]]
) -> None:
    assert [heads_of(rank, ranks, kv_heads) for rank in range(ranks)] == heads


def test_shared_head_ranges_do_not_depend_on_ranks() -> None:
    for kv_heads in (1, 2, 3, 8, 32):
        made = {
            head_ranges_of(kv_heads, ranks, OBJECT_BYTES, sliceable=True) for ranks in (1, 2, 4)
        }
        if kv_heads != 3:
            assert len(made) == 1
        head_ranges, shared = head_ranges_of(kv_heads, 1, OBJECT_BYTES, sliceable=True)
        assert shared
        assert len(head_ranges) == min(kv_heads, HEAD_RANGES_MAX)
        assert [head for first, end in head_ranges for head in range(first, end)] == list(
            range(kv_heads)
        )


def test_small_heads_are_stored_together() -> None:
    assert head_ranges_of(8, 1, OBJECT_BYTES // 2, sliceable=True)[0] == (
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 8),
    )
    assert head_ranges_of(8, 1, OBJECT_BYTES // 1000, sliceable=True)[0] == ((0, 8),)


def test_ranges_follow_workers_if_heads_cannot_be_shared() -> None:
    head_ranges, shared = head_ranges_of(32, 16, OBJECT_BYTES, sliceable=True)
    assert (len(head_ranges), shared) == (16, False)
    assert head_ranges_of(8, 2, OBJECT_BYTES, sliceable=False) == (((0, 4), (4, 8)), False)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 1), (8, 4), (2, 2), (2, 8), (1, 4), (32, 16)])
def test_every_head_range_has_one_writer(kv_heads: int, ranks: int) -> None:
    head_ranges, _ = head_ranges_of(kv_heads, ranks, OBJECT_BYTES, sliceable=True)
    held = cache_group(head_ranges=head_ranges, kv_heads=kv_heads)
    for head_range in range(len(head_ranges)):
        holders = [
            rank for rank in range(ranks) if head_range in held_head_ranges(held, rank, ranks)
        ]
        assert len(holders) == max(ranks // kv_heads, 1)
        assert [
            rank for rank in range(ranks) if is_writer(held, head_range, rank, ranks)
        ] == holders[:1]


def test_full_attention_groups_come_first() -> None:
    window = cache_group(trailing(64), stages=(("l.0",), ("l.3",)))
    whole = cache_group(head_ranges=((0, 1), (1, 2)), stages=((), ("l.4",)))
    assert object_ids((window, whole)) == [
        ObjectId(1, 1, 0),
        ObjectId(1, 1, 1),
        ObjectId(0, 0, 0),
        ObjectId(0, 1, 0),
    ]


@pytest.mark.parametrize(
    ("layers", "head_bytes", "groups"),
    [
        (2, 1024, (2,)),
        (4, 32 << 10, (2, 4)),
        # The last layer group takes the remaining layers.
        (5, 32 << 10, (2, 5)),
        (7, 32 << 10, (2, 4, 7)),
        (3, 64 << 10, (1, 2, 3)),
        (1, 1 << 20, (1,)),
    ],
)
def test_layers_are_grouped_by_read_size(
    layers: int, head_bytes: int, groups: tuple[int, ...]
) -> None:
    stages = (tuple(f"l.{n}" for n in range(layers)),)
    assert cache_group(head_bytes=head_bytes, stages=stages).layer_groups(0) == groups
