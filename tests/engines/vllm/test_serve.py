"""`vllm serve`: scheduler and worker are different processes and share one directory."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import prompt

from servers.environment import program
from servers.vllm import VLLMServer, connector, tokens_by_source

LENGTH = 700
BLOCK = 64
CLAIMED = (LENGTH - 1) // BLOCK * BLOCK


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Callable[..., VLLMServer]:
    def start(name: str, **settings: Any) -> VLLMServer:
        extra = {"path": str(tmp_path / "store"), "capacity": "1GiB", **settings}
        return VLLMServer(
            name=name,
            program=program("vllm", "vllm"),
            model=model,
            log=tmp_path / f"{name}.log",
            max_tokens=1024,
            connector=connector(**extra),
        )

    return start


def cached(server: VLLMServer, asked: list[int], params: dict[str, bool] | None = None) -> int:
    """Asks a question, and returns how many tokens of its prompt came from the store."""
    before = tokens_by_source(server.counters())
    body = {"model": "demo", "prompt": asked, "max_tokens": 4, "kv_transfer_params": params or {}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200
    after = tokens_by_source(server.settled(sum(before.values()) + len(asked)))
    return after["external"] - before["external"]


def test_new_process_answers_from_store(serve: Callable[..., VLLMServer]) -> None:
    first, second, third = (prompt(seed, LENGTH) for seed in (31, 32, 33))
    with serve("cold") as server:
        assert cached(server, first) == 0
        cold = server.ask(second, 24)
        local = server.ask(second, 24)
        assert cached(server, third, {"ritornello.no_store": True}) == 0
        counters = server.counters()
        assert counters.total("vllm:ritornello_saved_pages_total") > 0
        assert counters.total("vllm:ritornello_step_seconds_total") > 0
        assert counters.total("vllm:ritornello_errors_total") == 0
    with serve("warm", read_only=True) as server:
        assert cached(server, first) == CLAIMED
        before = tokens_by_source(server.counters())
        warm = server.ask(second, 24)
        moved = tokens_by_source(server.settled(sum(before.values()) + LENGTH))
        assert moved["external"] - before["external"] == CLAIMED
        assert moved["local"] == before["local"]
        assert cached(server, third) == 0
    assert warm.tokens == local.tokens
    assert len(cold.tokens) == 24
