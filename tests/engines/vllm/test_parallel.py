"""Real engines of several worker processes: pages that one engine stored are found by another.

Each engine runs as a separate program (`ask.py`), because vLLM cannot change its number of workers.
Engines whose answers are compared run in float32, so that the answers do not depend on the order in
which workers add up.
"""

from typing import Any

import pytest
from ask import LENGTH
from conftest import Ask

BLOCK = 64
CLAIMED = (LENGTH - 1) // BLOCK * BLOCK
FLOAT = {"dtype": "float32", "block_size": BLOCK, "forks_workers": True}
# Bytes of one head of one layer in a block: keys and values in float32, head dimension 64.
HEAD_BYTES = 2 * BLOCK * 64 * 4

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


def hits(found: dict[str, Any]) -> list[float]:
    return [answer["first_hits"] for answer in found["answers"]]


def test_worker_counts_share_pages_but_stage_counts_do_not(ask: Ask) -> None:
    stages = ask([4], **FLOAT, pipeline_parallel_size=2)
    assert [answer["stored_hits"] for answer in stages["answers"]] == [CLAIMED]
    again = ask([4, 5], **FLOAT, pipeline_parallel_size=2)
    assert hits(again) == [CLAIMED, 0]
    assert again["answers"][0]["first"] == stages["answers"][0]["stored"]
    cold = ask([1, 2], **FLOAT, tensor_parallel_size=2)
    assert hits(cold) == [0, 0]
    assert [answer["stored_hits"] for answer in cold["answers"]] == [CLAIMED] * 2
    expected = [answer["stored"] for answer in cold["answers"]]
    assert [answer["first"] for answer in cold["answers"]] == expected
    # The engine with one worker does not find the pages of two stages. The engine with four workers
    # also answers a prompt that is not stored.
    for ranks, seed in ((1, 4), (4, 3)):
        warm = ask([1, 2, seed], **FLOAT, tensor_parallel_size=ranks)
        assert hits(warm) == [CLAIMED, CLAIMED, 0], f"{ranks} workers"
        said = [answer["first"] for answer in warm["answers"][:2]]
        assert said == expected, f"{ranks} workers"
        assert warm["counts"]["failed_pages"] == 0
    # With four workers each head is on two workers, and only one of them stores it.
    layers, heads = 4, 2
    filled = (LENGTH + 24 - 1) // BLOCK
    assert warm["counts"]["saved_bytes"] == filled * layers * heads * HEAD_BYTES


def test_inseparable_heads_are_logged_once(ask: Ask) -> None:
    small = ask([1], tensor_parallel_size=2, forks_workers=True)
    assert small["log"].count("not found at another tensor parallel size than 2") == 1
    assert [answer["stored_hits"] for answer in small["answers"]] == [(LENGTH - 1) // 32 * 32]
    assert hits(ask([1])) == [0]
