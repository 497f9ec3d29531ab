"""Two engines, each with its own host memory and disk, over one remote: one with
`RitornelloConnector` and the data path of GPU engines, one with `RitornelloTier` in a list of tiers
that was configured by hand.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Obedient, Other
from connector_engine import CHUNK
from harness import BLOCK, prompt
from programs import Dialogue
from tier_harness import block_bytes

from servers.environment import ROOT
from servers.s3 import S3Server

CHUNK_BLOCKS = CHUNK // BLOCK
# Chunks that the host memory of each engine holds: enough for the longest prompt.
HOST_CHUNKS = 8
# One engine computes the first prompt and loads the second; the other engine does the reverse. Both
# compute the two `OWN` prompts, because the time of an engine's first prefill is not recorded, and
# a gate decides only after the time of a prefill was recorded.
OF_CONNECTOR, OF_TIER = prompt(31, 600), prompt(32, 900)
OWN = [prompt(33, 500), prompt(34, 500)]


@pytest.fixture(
    scope="module",
    params=["directory", pytest.param("s3", marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def remote(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("remote")
    if request.param == "directory":
        yield f"file://{folder}"
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, value in S3Server.environment().items():
            patch.setenv(name, value)
        program = ROOT / "build/s3/versitygw"
        with S3Server(program, folder / "data", folder / "log") as server:
            yield server.address("tiers")


@pytest.fixture(scope="module")
def told(
    model: Path, remote: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Returns, for each engine, the answers to its prompts and its counters."""
    folder = tmp_path_factory.mktemp("tiers")
    settings = {"prefetch": "wait_complete", "gate": "always"}
    tier = {
        "type": "RitornelloTier",
        "module_path": "ritornello.vllm",
        "tiers": [f"disk {folder}/tier 256MiB", remote],
        **settings,
    }
    chunk_bytes = CHUNK_BLOCKS * block_bytes(model)
    tiers = [f"host {HOST_CHUNKS * chunk_bytes}", f"disk {folder}/connector 256MiB", remote]
    question = {"model": str(model), "extra": {"tiers": tiers, **settings}}
    program = Path(__file__).with_name("connector_engine.py")
    sizes = {"host_chunks": HOST_CHUNKS, "blocks_per_chunk": CHUNK_BLOCKS}
    with (
        Obedient(program, log=folder / "connector.log") as connector,
        Other(model, tier, log=folder / "other.log", **sizes) as other,
    ):
        connector.send(json.dumps(question))
        engines = {"connector": connector, "tier": other}
        asked = {"connector": (OF_CONNECTOR, OF_TIER), "tier": (OF_TIER, OF_CONNECTOR)}
        said: dict[str, dict[str, Any]] = {name: {} for name in engines}
        for name, engine in engines.items():
            for own in OWN:
                engine("ask", prompt=own)
            said[name]["computed"] = engine("ask", prompt=asked[name][0])
            engine("flush")
        for name, engine in engines.items():
            said[name]["loaded"] = engine("ask", prompt=asked[name][1])
            said[name]["counts"] = engine("counts")
            engine("stop")
            engine.end()
    return said


def test_each_engine_serves_what_the_other_computed(told: dict[str, dict[str, Any]]) -> None:
    for one, other in (("connector", "tier"), ("tier", "connector")):
        computed, loaded = told[one]["computed"], told[other]["loaded"]
        assert computed["cached"] == 0
        assert loaded["tokens"] == computed["tokens"]
    assert told["tier"]["loaded"]["cached"] == 599 // CHUNK * CHUNK
    assert told["connector"]["loaded"]["cached"] == 899 // CHUNK * CHUNK


def test_gate_decisions_and_prefetches_are_counted(told: dict[str, dict[str, Any]]) -> None:
    for name in told:
        counts = told[name]["counts"]
        assert counts["ritornello_gate_decisions"] >= 1, sorted(counts)
        assert counts["ritornello_prefetches"] >= 1
        assert counts.get("ritornello_failed_chunks", 0) == 0


@pytest.mark.long
def test_aborts_and_preemptions_during_fetches_leak_nothing(model: Path, tmp_path: Path) -> None:
    program = Path(__file__).with_name("held_remote_engine.py")
    with Dialogue(program, model, tmp_path, log=tmp_path / "engine.log") as engine:
        said = engine.reply()
        engine.end()
    aborted, preempted, computed = said["aborted"], said["preempted"], said["computed"]
    nothing = {"jobs": 0, "requests": 0, "blocks": 0}
    tokens = [answer["tokens"] for answer in computed]
    assert aborted["meanwhile"] == {"tokens": tokens[1], "cached": 0}
    assert aborted["left"] == nothing
    full = [(length - 1) // BLOCK * BLOCK for length in (500, 300, 386, 386, 386)]
    assert said["again"] == [{"tokens": tokens[0], "cached": full[0]}]
    # The requests of `preempted` share steps, so their logits may differ in the last bits from the
    # logits of a request that runs alone: only the lengths of their answers are compared. The
    # prompts of `last` run alone, so their tokens are compared.
    assert preempted["waits"], "the remote answered before the preemption"
    assert sorted(preempted["lengths"].values()) == [24, 60, 60, 60]
    assert preempted["left"] == nothing
    assert [answer["tokens"] for answer in said["last"]] == tokens
    assert [answer["cached"] for answer in said["last"]] == full
