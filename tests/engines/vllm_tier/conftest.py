"""One vLLM with its own offloading in this process, our tier below it, and a store that another
process has filled. These tests have a separate folder, because a process can have a single
connector.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# Makes the modules in `tests/engines/vllm` and `tests/engines/sources`, and the package `servers`,
# importable.
SHARED = (HERE.parent / "vllm", HERE.parent / "sources")
sys.path[:0] = [str(HERE), *map(str, SHARED), str(HERE.parents[2])]

from harness import REPLY, prompt, set_environment  # noqa: E402
from tier_harness import TierEngine, ritornello_tier  # noqa: E402

import ritornello as rt  # noqa: E402
from servers.child import Child, owner_of  # noqa: E402
from servers.environment import shared_model  # noqa: E402

set_environment(OMP_NUM_THREADS="2")

# The capacity is so small that tests can fill the store.
STORE: dict[str, Any] = {"capacity": "64MiB", "segment_bytes": 4 << 20}
# Prompts of the other process; vLLM's host tier has no room for both prompts.
FIRST, SECOND = prompt(1), prompt(2, 500)


class Obedient(Child):
    """An engine in another process, controlled by orders on its standard input, one per line."""

    def __call__(self, order: str, **words: Any) -> Any:
        self.send(json.dumps({"do": order} | words))
        assert self.stdout is not None
        for line in self.stdout:
            if line.startswith(REPLY):
                return json.loads(line.removeprefix(REPLY))
        raise AssertionError("the engine's process ended without a reply")

    def end(self) -> None:
        self.communicate(timeout=120)
        assert self.returncode == 0


class Other(Obedient):
    """A `TierEngine` in another process, with vLLM's secondary tiers `tiers`."""

    def __init__(self, model: Path, *tiers: dict[str, Any], **options: Any) -> None:
        asked = {"model": str(model), "tiers": tiers, "options": options}
        super().__init__(HERE / "tier_harness.py", json.dumps(asked))


def reply_of(engine: Child, question: dict[str, Any]) -> dict[str, Any]:
    """Returns the engine's reply to `question` and its log."""
    engine.send(json.dumps(question))
    assert engine.stdout is not None
    log: list[str] = []
    for line in engine.stdout:
        if line.startswith(REPLY):
            engine.communicate(timeout=120)
            assert engine.returncode == 0
            return {"log": log, **json.loads(line.removeprefix(REPLY))}
        log.append(line.rstrip())
    raise AssertionError(
        "\n".join(["the engine ended without a reply; the end of its log:", *log[-40:]])
    )


@pytest.fixture(scope="session")
def model() -> Path:
    return shared_model("tiny")


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ritornello") / "store"
    rt.Store.open(path, **STORE).close()
    return path


def reported_decisions(path: Path) -> dict[str, int]:
    """Returns the owner's counters after it has received the decisions to load two prompts."""
    end = monotonic() + 30
    with rt.Store.open(path) as store:
        while (counts := store.stats()["counters"])["decisions_loaded"] < 2:
            assert monotonic() < end, counts
            sleep(0.1)
    return dict(counts)


@pytest.fixture(scope="session")
def told(model: Path, store_path: Path) -> dict[str, Any]:
    """Returns the answers of an engine in another process. This engine was a client of the store's
    owner, and the owner was killed before the last answers.
    """
    with owner_of(store_path) as owner, Other(model, ritornello_tier(store_path)) as other:
        said = {"cold": [other("ask", prompt=asked) for asked in (FIRST, SECOND)]}
        other("forget")
        said["client"] = [other("ask", prompt=FIRST), other("ask", prompt=SECOND)]
        said["client_counts"] = other("counts")
        said["client_decisions"] = reported_decisions(store_path)
        other("flush")
        owner.kill()
        owner.wait(60)
        other("forget")
        said["killed"] = [other("ask", prompt=FIRST), other("ask", prompt=prompt(3, 400))]
        said["killed_counts"] = other("counts")
        other("stop")
        other.end()
    return said


@pytest.fixture(scope="session")
def shared_engine(model: Path, store_path: Path, told: dict[str, Any]) -> Iterator[TierEngine]:
    engine = TierEngine(model, [ritornello_tier(store_path)])
    yield engine
    engine.stop()


@pytest.fixture
def engine(shared_engine: TierEngine) -> TierEngine:
    shared_engine.forget_all()
    return shared_engine
