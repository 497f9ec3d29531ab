"""Loads that deliver the layers of a page in several groups while the engine computes."""

import pytest
from ask import LENGTH
from conftest import Ask

# A page's object has twelve layers of 32 KiB. A load delivers it in three groups of four layers,
# because a group of layers has at least 128 KiB (`ritornello.vllm.cache_groups`).
SHAPE, BLOCK = "demo", 128
CLAIMED = (LENGTH - 1) // BLOCK * BLOCK

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


def test_layer_loads_give_same_answers(ask: Ask) -> None:
    cold = ask([1, 2], SHAPE, bad=[[0]], block_size=BLOCK)
    assert [answer["stored_hits"] for answer in cold["answers"]] == [CLAIMED] * 2
    assert (cold["counts"]["layer_loads"], cold["counts"]["step_loads"]) == (4, 0)
    assert cold["counts"]["failed_pages"] == 2
    for answer in cold["answers"]:
        assert answer["first"] == answer["stored"] == answer["broken 0"]
    warm = ask([1, 2], SHAPE, bad=[[1]], block_size=BLOCK)
    # Only the load of the first step ends before the first layer: in this step the connector does
    # not know yet that vLLM announces each layer before the layer runs.
    assert (warm["counts"]["layer_loads"], warm["counts"]["step_loads"]) == (5, 1)
    for before, after in zip(cold["answers"], warm["answers"], strict=True):
        assert after["first_hits"] == CLAIMED
        assert after["first"] == after["stored"] == after["broken 0"] == before["stored"]
