"""Fixtures: one vLLM in this process, which all tests with the fixture `engine` share; separate
vLLMs (`ask`); a tiny model; one store for the session.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Makes the modules in this file's folder and in `tests/engines/sources`, and the package `servers`,
# importable.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "sources"), str(HERE.parents[2])]

from harness import Engine, set_environment  # noqa: E402
from programs import INTERPRETERS, ask_program  # noqa: E402

from servers.environment import shared_model  # noqa: E402

set_environment(OMP_NUM_THREADS="2")

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session", autouse=True)
def interpreters() -> Iterator[None]:
    yield
    INTERPRETERS.end()


@pytest.fixture(scope="session")
def model() -> Path:
    return shared_model("tiny")


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Returns a function that runs a separate vLLM for a few prompts; see `ask.py`. All runs of a
    test use one store, except those whose options name another store.
    """
    asked = 0

    def answers(
        seeds: list[int],
        shape: str = "tiny",
        bad: list[list[int]] | None = None,
        spoils_drafts: bool = False,
        processes: bool = False,
        forks_workers: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        log = tmp_path / f"{asked}.log"
        question = {
            "model": str(shared_model(shape)),
            "store": str(tmp_path / "store"),
            "seeds": seeds,
            "options": options,
            "bad": bad or [],
            "spoils_drafts": spoils_drafts,
            "processes": processes,
            "forks_workers": forks_workers,
        }
        found = ask_program("ask.py", json.dumps(question), log=log, timeout=900)
        assert found["counts"]["errors"] == 0
        return {**found, "log": log.read_text()}

    return answers


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ritornello") / "store"
    path.mkdir()
    (path / "policy.toml").write_text("allow_request_retention = true\n")
    return path


@pytest.fixture(scope="session")
def shared_engine(model: Path, store_path: Path) -> Iterator[Engine]:
    engine = Engine(model, store_path)
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    shared_engine.forget()
    return shared_engine
