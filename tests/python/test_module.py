"""The package: its stubs, its command, its imports and licences."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ritornello as rt

ROOT = Path(__file__).resolve().parents[2]
PERMISSIVE = {
    *(
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "ISC",
        "MIT",
    ),
    *("MIT-0", "Unicode-3.0", "Unlicense", "Zlib"),
}


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


def test_dependencies_have_permissive_licences() -> None:
    """Every linked crate comes from the registry or this repository, under a licence that requires
    only that its text is included.
    """
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform"]
    found = run(*command, "x86_64-unknown-linux-gnu", "--manifest-path", ROOT / "Cargo.toml")
    assert found.returncode == 0, found.stderr
    for package in json.loads(found.stdout)["packages"]:
        expression = re.sub(
            r"[\w.-]+( WITH [\w.-]+)?",
            lambda name: {"OR": "or", "AND": "and"}.get(name[0], str(name[0] in PERMISSIVE)),
            package["license"].replace("/", " OR "),
        )
        assert eval(expression), (package["id"], package["license"])
        assert package["source"] is None or package["source"].startswith("registry+"), package["id"]
