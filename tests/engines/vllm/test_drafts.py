"""Speculative decoding with a draft model: answers equal the answers without drafts, and drafts
made from loaded KV are accepted as often as drafts made from computed KV.
"""

from typing import Any

import pytest
from ask import LENGTH
from conftest import Ask
from harness import BLOCK

from servers.environment import shared_model

CLAIMED = (LENGTH - 1) // BLOCK * BLOCK
DRAFTED = 3


def speculating(method: str, shape: str, tokens: int = DRAFTED) -> dict[str, Any]:
    asked = {"method": method, "model": str(shared_model(shape)), "num_speculative_tokens": tokens}
    # In float32 a step that verifies several drafts gives the same answer as steps of one token.
    return {"speculative_config": asked, "dtype": "float32"}


def test_stored_draft_kv_is_useful_and_stale_draft_kv_is_harmless(ask: Ask) -> None:
    """The draft model is the target model, so all drafts made from correct KV are accepted."""
    found = ask([1, 2], spoils_drafts=True, **speculating("draft_model", "tiny"))
    assert len(found["draft_layers"]) == 4
    for answer in found["answers"]:
        assert answer["first_hits"] == 0
        assert answer["stored_hits"] == answer["stale_hits"] == CLAIMED
        assert answer["first"] == answer["stored"] == answer["stale"]
        assert answer["stored_accepted"] == answer["first_accepted"] > 0
        assert answer["stale_accepted"] < answer["first_accepted"]
    assert found["counts"]["failed_pages"] == 0


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("target", "drafting"),
    [
        ("shallow", [("draft_model", "shallow", 1), ("eagle", "eagle", 1)]),
        ("mtp", [("mtp", "mtp", 1)]),
    ],
    ids=["shallow", "mtp"],
)
def test_drafts_from_stored_kv_are_accepted_and_change_no_answer(
    ask: Ask, target: str, drafting: list[tuple[str, str, int]]
) -> None:
    """`drafting`: for each engine its method, its draft model, and the model's number of layers.
    The models are made so that drafts from correct KV are often accepted.
    """
    plain = ask([1, 2], target, dtype="float32")
    expected = [answer["first"] for answer in plain["answers"]]
    for method, draft, layers in drafting:
        drafts = speculating(method, draft, 1)
        # Pages with the KV of a draft model have their own scopes, so the pages of the plain
        # engine, and of another draft model, are misses.
        found = ask([1, 2], target, spoils_drafts=True, **drafts)
        assert len(found["draft_layers"]) == layers
        for answer, tokens in zip(found["answers"], expected, strict=True):
            assert answer["first_hits"] == 0
            assert answer["stored_hits"] == answer["stale_hits"] == CLAIMED
            assert answer["first"] == answer["stored"] == answer["stale"] == tokens
            assert answer["stored_accepted"] == answer["first_accepted"] > 0
            assert answer["stale_accepted"] < answer["first_accepted"]
        again = ask([1, 2], target, **drafts)
        for before, after in zip(found["answers"], again["answers"], strict=True):
            assert after["first_hits"] == CLAIMED
            assert after["first"] == before["first"]
            assert after["first_accepted"] == before["first_accepted"]
