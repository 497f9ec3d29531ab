"""The package: its stubs, its command and its imports."""

import subprocess
import sys
from pathlib import Path

import pytest

import ritornello as rt

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, check=False
    )


def test_stubs_match_module() -> None:
    found = run(
        sys.executable,
        "-m",
        "mypy.stubtest",
        "ritornello._core",
        "--allowlist",
        ROOT / "tests/python/stubtest.allow",
        "--mypy-config-file",
        ROOT / "pyproject.toml",
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_import_loads_neither_numpy_nor_torch() -> None:
    found = run(
        sys.executable,
        "-c",
        "import sys, ritornello; print({'numpy', 'torch'} & set(sys.modules))",
    )
    assert found.stdout == "set()\n"


def test_emulated_device_is_not_in_released_wheel() -> None:
    with pytest.raises(rt.errors.InvalidError, match="`make wheel-device`"):
        rt.Device.open(emulated=True)


def test_command_is_installed() -> None:
    script = Path(sys.executable).parent / "ritornello"
    for command in ([sys.executable, "-m", "ritornello"], [script]):
        found = run(*command, "--help")
        assert found.returncode == 0, found.stderr
        assert "fsck" in found.stdout
    assert rt.__version__ in run(script, "--version").stdout
