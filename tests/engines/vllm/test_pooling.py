"""Pooling models: with LAST pooling prefixes are loaded, and with MEAN pooling, which needs the
hidden states of all tokens, each prompt is computed whole, on both data paths of the connector.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import BLOCK, prompt
from programs import ask_program

# The second prompt begins like the first.
SHARED = 7 * BLOCK
FIRST = prompt(1)
PROMPTS = [FIRST, FIRST[:SHARED] + prompt(2, 60), FIRST]
REFUSED = "vLLM supports no prefix caching for this pooling model; pages are neither loaded nor"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_prefixes_are_loaded_for_last_but_not_for_mean_pooling(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def embed(pooling: str, **options: Any) -> Any:
        question = {"model": str(model), "pooling": pooling, "prompts": PROMPTS, **options}
        return ask_program("pool.py", json.dumps(question), log=log, timeout=600)

    store = str(tmp_path / "store")
    loaded = embed("LAST", store=store)
    assert [one["cached"] for one in loaded] == [0, SHARED, (len(FIRST) - 1) // BLOCK * BLOCK]
    assert loaded[2]["vector"] == pytest.approx(loaded[0]["vector"], abs=1e-4)
    computed = embed("MEAN")
    # An engine on CPUs that looked up its prompts would find the pages of the first engine.
    for offloads in (False, True):
        whole = embed("MEAN", store=store, offloads=offloads)
        assert log.read_text().count(REFUSED) == 1
        for one, expected in zip(whole, computed, strict=True):
            assert one["cached"] == 0
            assert one["vector"] == pytest.approx(expected["vector"], abs=1e-4)
