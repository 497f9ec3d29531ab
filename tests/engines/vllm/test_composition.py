"""Ritornello and another connector inside vLLM's MultiConnector."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ask_composed import composed
from harness import prompt
from programs import ask_program

from servers.vllm import VLLMServer

LENGTH = 300
CLAIMED = (LENGTH - 1) // 32 * 32


def found(tmp_path: Path, model: Path, order: list[str]) -> dict[str, Any]:
    asked = {"store": str(tmp_path / "store"), "model": str(model), "order": order}
    log = tmp_path / "vllm.log"
    answers = ask_program("ask_composed.py", json.dumps(asked), log=log, timeout=600)
    return {**answers, "log": log.read_text()}


@pytest.mark.parametrize("order", [["ritornello", "lender"], ["lender", "ritornello"]])
def test_answers_survive_failed_foreign_load(tmp_path: Path, model: Path, order: list[str]) -> None:
    answers = found(tmp_path, model, order)
    said, hits = answers["said"], answers["hits"]
    assert answers["errors"] == 0
    assert "neither loaded nor saved" not in answers["log"]
    # The other connector filled blocks for three requests; for "broken repaired" it reported a
    # failed load.
    assert answers["lent"] == [CLAIMED // 32] * 3
    assert said["broken repaired"] == said["broken computed"]
    assert said["lent"] == said["lent computed"]
    assert said["once"] == said["once computed"][:1]
    # All pages of these prompts were saved, and lead to the same answers.
    for name in ("broken", "lent", "once"):
        assert said[f"{name} stored"] == said[f"{name} computed"]
        assert hits[f"{name} stored"] == CLAIMED
    # A failed load fails no request, although `kv_load_failure_policy` was not set.
    assert said["lent with a failure"] == said["lent computed"]
    assert "kv_load_failure_policy" in answers["log"]


@pytest.mark.long
@pytest.mark.parametrize("order", [["ritornello", "nixl"], ["nixl", "ritornello"]])
def test_vllm_serves_with_nixl(tmp_path: Path, model: Path, order: list[str]) -> None:
    pytest.importorskip("nixl", reason="`pip install nixl nixl-cu13` has not been run")
    server = VLLMServer(
        name="beside nixl",
        program=Path(sys.executable).with_name("vllm"),
        model=model,
        log=tmp_path / "vllm.log",
        max_tokens=1024,
        connector=composed(str(tmp_path / "store"), order),
    )
    with server:
        answers = [server.ask(prompt(64, 700), 8).tokens for _ in range(2)]
        counters = server.counters()
    assert answers[0] == answers[1]
    assert counters.total("vllm:ritornello_saved_pages_total") >= 10
    assert counters.total("vllm:ritornello_errors_total") == 0
