"""vLLM with the connector on several tiers: each start of vLLM stands for a different machine, or
for the same machine after a restart.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Ask
from harness import BLOCK

from servers.vllm import connector

# Tokens of a prompt of 300 tokens that vLLM can load: the full blocks before its last token.
CLAIMED = 299 // BLOCK * BLOCK
SEEDS = [301, 302]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.fixture
def remote_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "far"
    folder.mkdir()
    return folder


def over(*tiers: str, **settings: Any) -> dict[str, Any]:
    return {"kv_transfer_config": connector(tiers=list(tiers), **settings)}


def hits(answers: dict[str, Any], name: str) -> list[float]:
    return [one[f"{name}_hits"] for one in answers["answers"]]


def tokens(answers: dict[str, Any], name: str) -> list[list[int]]:
    return [one[name] for one in answers["answers"]]


def test_every_tier_restores_pages(ask: Ask, tmp_path: Path, remote_folder: Path) -> None:
    def machine(name: str) -> dict[str, Any]:
        here = tmp_path / name
        tiers = (f"host 64MiB {here}/host", f"disk {here}/disk 256MiB", f"file://{remote_folder}")
        return over(*tiers, prefetch="wait_complete", gate="always")

    first = ask(SEEDS, processes=True, **machine("one"))
    assert hits(first, "first") == [0, 0]
    assert hits(first, "stored") == [CLAIMED, CLAIMED]
    assert first["counts"]["host"] == 2 * CLAIMED
    assert tokens(first, "first") == tokens(first, "stored")

    # Restart the machine: its memory is lost, and its disk is kept.
    shutil.rmtree(tmp_path / "one/host")
    again = ask(SEEDS, **machine("one"))
    assert hits(again, "first") == [CLAIMED, CLAIMED]
    assert again["counts"]["disk"] == 2 * CLAIMED
    # The pages that were read from the disk are in memory now.
    assert again["counts"]["host"] == 2 * CLAIMED

    # Another machine finds the pages in the remote.
    other = ask(SEEDS, **machine("two"))
    assert hits(other, "first") == [CLAIMED, CLAIMED]
    assert other["counts"]["external_unspecified"] == 2 * CLAIMED
    for name in ("first", "stored"):
        assert tokens(again, name) == tokens(other, name) == tokens(first, "first")


def test_unreachable_remote_keeps_local_hits(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    # No server listens on this port.
    nowhere = "s3://bucket?endpoint=http://127.0.0.1:9&region=us-east-1"
    answers = ask(SEEDS, **over(f"host 64MiB {tmp_path}/host", nowhere, gate="always"))
    assert hits(answers, "first") == [0, 0]
    assert hits(answers, "stored") == [CLAIMED, CLAIMED]
    assert tokens(answers, "first") == tokens(answers, "stored")


def test_everything_is_computed_if_gate_is_never(ask: Ask, tmp_path: Path) -> None:
    answers = ask(SEEDS, **over(f"host 64MiB {tmp_path}/host", gate="never"))
    assert hits(answers, "stored") == [0, 0]
    assert answers["counts"]["loaded_pages"] == 0
    assert answers["counts"]["saved_pages"] > 0


def test_several_workers_share_tiers(ask: Ask, tmp_path: Path, remote_folder: Path) -> None:
    def machine(name: str, ranks: int) -> dict[str, Any]:
        tiers = (f"host 64MiB {tmp_path}/{name}", f"file://{remote_folder}")
        exact = {"dtype": "float32", "block_size": 64, "tensor_parallel_size": ranks}
        return over(*tiers, prefetch="wait_complete", gate="always") | exact

    claimed = 299 // 64 * 64
    two = ask(SEEDS, **machine("one", 2))
    assert hits(two, "stored") == [claimed, claimed]
    alone = ask(SEEDS, **machine("two", 1))
    assert hits(alone, "first") == [claimed, claimed]
    assert alone["counts"]["external_unspecified"] == 2 * claimed
    assert tokens(alone, "first") == tokens(two, "stored")
