"""Two real SGLang servers, each with its own disk, share one bucket of a real S3 server."""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_servers import prompt, raised

from servers.environment import ROOT
from servers.s3 import S3Server
from servers.sglang import PAGE, SGLangServer, Told, storage

pytestmark = pytest.mark.long

LENGTH, ANSWER, WAIT = 300, 16, 60.0
CLAIMED = (LENGTH - 1) // PAGE * PAGE
PREFIX = "sglang:ritornello_"


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    with S3Server(ROOT / "build/s3/versitygw", tmp_path / "objects", tmp_path / "s3.log") as server:
        yield server


@pytest.fixture
def servers(tmp_path: Path, model: Path, s3: S3Server) -> Iterator[list[SGLangServer]]:
    def made(name: str) -> SGLangServer:
        tiers = [f"disk {tmp_path}/{name} 640MiB", s3.address("kv")]
        return SGLangServer(
            name=name,
            program=Path(sys.executable),
            model=model,
            log=tmp_path / f"{name}.log",
            max_tokens=1024,
            connector=storage(tiers=tiers, gate="always", prefetch="wait_complete"),
            extra_environment=S3Server.environment(),
            metrics=True,
        )

    both = [made("one"), made("two")]
    with ThreadPoolExecutor() as pool:
        list(pool.map(SGLangServer.__enter__, both))
    yield both
    with ThreadPoolExecutor() as pool:
        list(pool.map(SGLangServer.stop, both))
    for server in both:
        assert raised(server.log.read_text()) == []


def counted(server: SGLangServer, name: str, **labels: str) -> float:
    return server.counters().total(f"{PREFIX}{name}_total", **labels)


def wait_until_counted(server: SGLangServer, least: int, name: str, **labels: str) -> None:
    """Waits until a counter has reached `least`. Sends short requests in between, because a server
    updates its counters only when it serves a request, and at most once a second.
    """
    deadline = time.monotonic() + WAIT
    while (amount := counted(server, name, **labels)) < least:
        assert time.monotonic() < deadline, f"{name} {labels} is {amount}, not yet {least}"
        time.sleep(0.3)
        server.generate(prompt(9, 2 * PAGE), 1)


def test_servers_serve_what_the_other_computed(servers: list[SGLangServer]) -> None:
    one, two = servers
    computed: list[Told] = []
    for server, seed in ((one, 1), (two, 2)):
        computed.append(server.generate(prompt(seed), ANSWER))
        assert computed[-1].tokens["computed"] == LENGTH
    # The number of full pages in the prompt and the answer, without the answer's last token, whose
    # KV is not computed.
    stored = (LENGTH + ANSWER - 1) // PAGE
    for server in servers:
        wait_until_counted(server, stored, "tier_written_pages", reason="remote")
    for server, seed in ((two, 1), (one, 2)):
        # A short prompt first loads eight pages, which the remote has in one object. SGLang then
        # has these pages in memory, so it looks up only the later pages of the whole prompt.
        begin = 8 * PAGE
        short = server.generate(prompt(seed, begin + 8), 1)
        assert short.tokens["storage"] == begin
        told = server.generate(prompt(seed), ANSWER)
        assert told.tokens["storage"] == CLAIMED - begin
        assert told.tokens["computed"] == LENGTH - CLAIMED
        other = (one, two)[seed - 1].generate(prompt(seed), ANSWER)
        assert other.tokens["computed"] == LENGTH - CLAIMED
        assert told.answer.tokens in {other.answer.tokens, computed[seed - 1].answer.tokens}
        wait_until_counted(server, 2, "prefetches", reason="completed")
        assert counted(server, "errors") == 0
    check_gate(one)


def check_gate(server: SGLangServer) -> None:
    """Attaches the server's storage again with the gate "auto", and waits until the gate decides,
    which it does only after a prefill was measured.
    """
    assert counted(server, "gate_decisions") == 0
    server.admin("DELETE", "/hicache/storage-backend")
    server.forget()
    attach: dict[str, Any] = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(
            {**(server.connector or {}), "gate": "auto"}
        ),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    server.admin("PUT", "/hicache/storage-backend", attach)
    server.forget()
    asked, saved = prompt(5), counted(server, "saved_pages")
    server.generate(asked, ANSWER)
    deadline = time.monotonic() + WAIT
    while counted(server, "saved_pages") < saved + CLAIMED // PAGE:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    while not counted(server, "gate_decisions"):
        assert time.monotonic() < deadline
        server.forget()
        server.generate(asked, 1)
        time.sleep(0.3)
