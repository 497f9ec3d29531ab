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

from harness import prompt, set_environment  # noqa: E402
from programs import INTERPRETERS, Dialogue  # noqa: E402
from tier_harness import TierEngine, ritornello_tier  # noqa: E402

import ritornello as rt  # noqa: E402
from servers.child import owner_of  # noqa: E402
from servers.environment import shared_model  # noqa: E402

set_environment()

# The capacity is so small that tests can fill the store.
STORE: dict[str, Any] = {"capacity": "64MiB", "segment_bytes": 4 << 20}
# Prompts of the other process; vLLM's host tier has no room for both prompts.
FIRST, SECOND = prompt(1), prompt(2, 500)


class Obedient(Dialogue):
    """An engine in another process, controlled by orders on its standard input, one per line."""

    def __call__(self, order: str, **words: Any) -> Any:
        self.send(json.dumps({"do": order} | words))
        return self.reply()


class Other(Obedient):
    """A `TierEngine` in another process, with vLLM's secondary tiers `tiers`."""

    def __init__(self, model: Path, *tiers: dict[str, Any], log: Path, **options: Any) -> None:
        asked = {"model": str(model), "tiers": tiers, "options": options}
        super().__init__(HERE / "tier_harness.py", json.dumps(asked), log=log)


def run_engine(question: dict[str, Any], log: Path) -> dict[str, Any]:
    """Returns the reply of a `ConnectorEngine` in another process, with the lines of its log as
    `log`; its errors go to the file `log`.
    """
    with Dialogue(HERE / "connector_engine.py", log=log) as engine:
        engine.send(json.dumps(question))
        said: dict[str, Any] = engine.reply()
        engine.end()
    return {"log": engine.lines, **said}


@pytest.fixture(scope="session", autouse=True)
def interpreters() -> Iterator[None]:
    yield
    INTERPRETERS.end()


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
    log = store_path.with_name("other.log")
    with (
        owner_of(store_path) as owner,
        Other(model, ritornello_tier(store_path), log=log) as other,
    ):
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
