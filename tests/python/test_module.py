"""The package as such: its stubs, its command, what it imports."""

import subprocess
import sys
from pathlib import Path

import ritornello as rt

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, check=False
    )


def test_the_stubs_describe_the_module() -> None:
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


def test_importing_brings_no_other_package() -> None:
    found = run(
        sys.executable,
        "-c",
        "import sys, ritornello; print({'numpy', 'torch'} & set(sys.modules), ritornello.__version__)",
    )
    assert found.stdout == f"set() {rt.__version__}\n"


def test_the_command_is_installed() -> None:
    for command in ([sys.executable, "-m", "ritornello"], [Path(sys.executable).parent / "ritornello"]):
        found = run(*command, "--help")
        assert found.returncode == 0, found.stderr
        assert "fsck" in found.stdout
