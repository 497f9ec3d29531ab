"""One vLLM in this process for all tests of this folder; a tiny model; one store for the
session.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="2",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

# Makes the helpers in this file's directory, and the servers, importable.
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[3])]

from harness import ROOT, Engine  # noqa: E402

Ask = Callable[..., dict[str, Any]]


def made(shape: str) -> Path:
    folder = ROOT / "build/models" / shape
    maker = ROOT / "engines/vllm/make_model.py"
    subprocess.run([sys.executable, maker, shape, folder], check=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def model() -> Path:
    return made("tiny")


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Runs a separate vLLM for a few prompts, with one store for a test; see `ask.py`."""
    asked = 0

    def answers(
        seeds: list[int], shape: str = "tiny", bad: list[int] | None = None, **options: Any
    ) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        log, where = tmp_path / f"{asked}.log", Path(__file__).parent
        question = {
            "model": str(made(shape)),
            "store": str(tmp_path / "store"),
            "seeds": seeds,
            "options": options,
            "bad": bad or [],
        }
        with log.open("w") as output:
            subprocess.run(
                [sys.executable, str(where / "ask.py"), json.dumps(question)],
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=900,
                check=False,
            )
        text = log.read_text()
        line = next((line for line in text.splitlines() if line.startswith("ANSWERS ")), None)
        assert line is not None, f"no answer; the end of its log:\n{text[-3000:]}"
        found: dict[str, Any] = json.loads(line.removeprefix("ANSWERS "))
        assert found["counts"]["errors"] == 0
        return {**found, "log": text}

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
