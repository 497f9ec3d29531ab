"""One vLLM with its own offloading in this process, our tier below it, and a store that another
process has filled. Has its own folder, because a process holds one connector.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(ENVIRONMENT)
# Makes the connector tests' helpers and the servers importable.
sys.path[:0] = [str(HERE), str(HERE.parent / "vllm"), str(HERE.parents[2])]

from harness import ROOT, prompt  # noqa: E402
from tier_harness import REPLY, TierEngine, ritornello_tier  # noqa: E402

import ritornello as rt  # noqa: E402

# Small, so that tests fill it.
STORE: dict[str, Any] = {"capacity": "64MiB", "segment_bytes": 4 << 20}
# Prompts of the other process; the second does not fit in addition to the first.
FIRST, SECOND = prompt(1), prompt(2, 500)

OWNER = """
import sys
import ritornello as rt
store = rt.Store.open(sys.argv[1])
print(store.role, flush=True)
sys.stdin.read()
"""


class Other:
    """The same engine in another process, controlled line by line."""

    def __init__(self, model: Path, store_path: Path) -> None:
        asked = {"model": str(model), "tiers": [ritornello_tier(store_path)]}
        self._process = subprocess.Popen(
            [sys.executable, HERE / "tier_harness.py", json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def __call__(self, order: str, **words: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": order} | words) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(REPLY):
                return json.loads(line.removeprefix(REPLY))
        raise AssertionError("the other engine has ended")

    def end(self) -> None:
        self._process.communicate(timeout=120)
        assert self._process.returncode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)


@pytest.fixture(scope="session")
def model() -> Path:
    folder = ROOT / "build/models/tiny"
    maker = ROOT / "engines/vllm/make_model.py"
    subprocess.run([sys.executable, maker, "tiny", folder], check=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ritornello") / "store"
    rt.Store.open(path, **STORE).close()
    return path


@pytest.fixture(scope="session")
def told(model: Path, store_path: Path) -> dict[str, Any]:
    """Answers of another engine. It was a client of the process that owned the store, which was
    killed before the last answers.
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, store_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "owner\n"
    other = Other(model, store_path)
    try:
        said = {"cold": [other("ask", prompt=asked) for asked in (FIRST, SECOND)]}
        other("forget")
        said["client"] = [other("ask", prompt=FIRST), other("ask", prompt=SECOND)]
        said["client_counts"] = other("counts")
        other("flush")
        owner.kill()
        owner.wait(60)
        other("forget")
        said["killed"] = [other("ask", prompt=FIRST), other("ask", prompt=prompt(3, 400))]
        said["killed_counts"] = other("counts")
        other("stop")
        other.end()
    finally:
        other.kill()
        owner.kill()
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
