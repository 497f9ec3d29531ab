"""One vLLM in this process for all tests of this folder; a tiny model; a store per session."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="2",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

# The helpers beside this file, and the demonstration's server.
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[3])]

from harness import ROOT, Engine  # noqa: E402


@pytest.fixture(scope="session")
def model() -> Path:
    folder = ROOT / "build/models/tiny"
    maker = ROOT / "engines/vllm/make_model.py"
    subprocess.run([sys.executable, maker, "tiny", folder], check=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ritornello") / "store"


@pytest.fixture(scope="session")
def shared_engine(model: Path, store_path: Path) -> Iterator[Engine]:
    engine = Engine(model, store_path)
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    shared_engine.forget()
    return shared_engine
