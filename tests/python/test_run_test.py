"""`.cargo/run_test.py`, the runner of Rust's test binaries, on stand-ins for these binaries that
print what libtest prints.
"""

import subprocess
import sys
import time
from pathlib import Path

RUNNER = Path(__file__).parents[2] / ".cargo/run_test.py"


def run(tmp_path: Path, body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs, under the runner, a binary that executes `body`. The runner kills a binary that prints
    nothing for one second.
    """
    binary = tmp_path / "binary"
    binary.write_text(f"#!{sys.executable}\nimport subprocess, sys, time\n{body}\n")
    binary.chmod(0o755)
    return subprocess.run(
        [sys.executable, RUNNER, binary, *arguments],
        env={"TEST_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_hanging_binary_is_killed_and_its_test_named(tmp_path: Path) -> None:
    child = tmp_path / "child"
    body = f"""
print("test fast ... ok", flush=True)
for name in "fast", "slow", "stuck":
    print(f"test {{name}} has been running for over 60 seconds", flush=True)
print("test slow ... ok", flush=True)
process = subprocess.Popen(["sleep", "300"])
open({str(child)!r}, "w").write(str(process.pid))
process.wait()
"""
    done = run(tmp_path, body.replace('"fast", ', ""), "--quiet")
    assert done.returncode == 124
    assert "printed nothing for 1 s. Running: stuck\n" in done.stderr
    assert "... ok" not in done.stdout
    state = Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().rsplit(")")[-1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child was not ended"
        time.sleep(0.05)


def test_hanging_test_is_named_by_its_unfinished_line(tmp_path: Path) -> None:
    # With one thread libtest begins a test's line when the test starts.
    body = 'print("test stuck - should panic ... ", end="", flush=True); time.sleep(300)'
    done = run(tmp_path, body)
    assert (done.returncode, "Running: stuck\n" in done.stderr) == (124, True), done.stderr


def test_binary_that_closes_its_output_is_killed(tmp_path: Path) -> None:
    done = run(tmp_path, "import os; os.close(1); time.sleep(300)")
    assert (done.returncode, "Running: unknown; threads: " in done.stderr) == (124, True)


def test_output_and_status_pass_through(tmp_path: Path) -> None:
    body = """
assert "--quiet" not in sys.argv and sys.argv[1:] == ["name"]
print("running 2 tests\\ntest good ... ok\\ntest bad ... FAILED\\nno newline", end="")
sys.exit(101)
"""
    done = run(tmp_path, body, "--quiet", "name")
    assert done.stdout == "running 2 tests\ntest bad ... FAILED\nno newline"
    assert (done.returncode, done.stderr) == (101, "")


def test_binary_that_prints_outlives_the_limit(tmp_path: Path) -> None:
    body = "for turn in range(6): print(turn, flush=True); time.sleep(0.4)"
    done = run(tmp_path, body)
    assert (done.returncode, done.stdout.split()) == (0, list("012345"))
