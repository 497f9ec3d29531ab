"""`lmcache bench l2`, with verification on, through both kinds of `AdapterKind`."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness import AdapterKind

PROGRAM = Path(sys.executable).parent / "lmcache"


@pytest.mark.parametrize("kib", [256, 100])
def test_lmcache_bench_l2_serves_every_object(adapter_kind: AdapterKind, kib: int) -> None:
    # Our adapter and our client refuse hashes shorter than 32 bytes, unless the store's policy
    # permits weak hashes. The benchmark's hashes have 16 bytes.
    adapter_kind.path.mkdir(parents=True)
    (adapter_kind.path / "policy.toml").write_text("allow_weak_hashes = true")
    command = [
        *(str(PROGRAM), "bench", "l2", "--l2-adapter", adapter_kind.json()),
        *("--num-keys", "8", "--in-flight", "2", "--rounds", "3", "--data-size-kb", str(kib)),
        *("--lookup-max-hit-rate", "0.5", "--no-skip-verify"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 16 keys data verified OK" in done.stdout
    said = [
        line.split(":")[1].strip() for line in done.stdout.splitlines() if "Total success" in line
    ]
    assert said == ["48", "24", "48"], done.stdout
