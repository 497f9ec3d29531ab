"""The files that deploy the service: each is checked by the tool that reads it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
DOCUMENTED = set(
    re.findall(r"^\| `(ritornello_\w+)`", (ROOT / "docs/service.md").read_text(), re.M)
)


def run(tool: str, *words: str | Path) -> str:
    """Runs a tool, and asserts that the tool succeeds. Returns its output."""
    path = os.environ.get(tool.upper().replace("-", "_")) or shutil.which(tool)
    if not path:
        pytest.skip(f"{tool} is not installed")
    ran = subprocess.run([path, *words], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_alerts_fire_for_bad_stores_only() -> None:
    assert "15 rules found" in run(
        "promtool", "check", "rules", PACKAGING / "prometheus/alerts.yaml"
    )
    scrape = PACKAGING / "prometheus/scrape.yaml"
    assert "SUCCESS" in run("promtool", "check", "config", "--syntax-only", scrape)
    tests = PACKAGING / "prometheus/alerts_test.yaml"
    assert "SUCCESS" in run("promtool", "test", "rules", tests)
    names = re.findall(r"alert: (\w+)", (PACKAGING / "prometheus/alerts.yaml").read_text())
    tested = re.findall(r"alertname: (\w+)", tests.read_text())
    assert tested == names
    document = (ROOT / "docs/operations.md").read_text()
    assert all(f"`{name}`" in document for name in names)


def test_queries_use_documented_metrics() -> None:
    assert len(DOCUMENTED) > 80
    dashboard = json.loads((PACKAGING / "grafana/ritornello.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    text = (PACKAGING / "prometheus/alerts.yaml").read_text()
    text += " ".join(target["expr"] for panel in panels for target in panel["targets"])
    # A query names the buckets of a histogram (`NAME_bucket`), and the document lists only `NAME`.
    used = {name.removesuffix("_bucket") for name in re.findall(r"\britornello_\w+", text)}
    assert used <= DOCUMENTED, used - DOCUMENTED


def test_status_panels_show_current_values_only() -> None:
    panels = json.loads((PACKAGING / "grafana/ritornello.json").read_text())["panels"]
    stats = [panel for panel in panels if panel["type"] == "stat"]
    assert len(stats) >= 4
    # After the last scrape of a store, a panel with a range query keeps showing its last value.
    for panel in stats:
        for target in panel["targets"]:
            assert (target.get("instant"), target.get("range")) == (True, False), panel["title"]


def test_unit_is_valid(tmp_path: Path) -> None:
    unit = (PACKAGING / "systemd/ritornello.service").read_text()
    command = "/usr/local/bin/ritornello"
    assert f"ExecStart={command} serve" in unit
    # `systemd-analyze` requires that the command exists, and tests do not install `ritornello`
    # under this path.
    copy = tmp_path / "ritornello.service"
    for text in (unit, unit.replace("\n#ReadWritePaths=/nvme0\n", "\nReadWritePaths=/nvme0\n")):
        copy.write_text(text.replace(command, sys.executable))
        assert run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", copy) == ""


def test_unit_names_writable_directories() -> None:
    unit = (PACKAGING / "systemd/ritornello.service").read_text()
    # With this setting the store's own directory must be named as writable.
    assert "\nProtectSystem=strict\n" in unit
    assert re.search(r"^#ReadWritePaths=/", unit, re.M)
    assert "`ReadWritePaths`" in (ROOT / "docs/operations.md").read_text()


def test_manifest_is_valid() -> None:
    manifest = PACKAGING / "kubernetes/daemonset.yaml"
    assert "passed" in run("kubernetes-validate", "--strict", manifest)
    assert "--tokens=/tokens/tokens" in manifest.read_text()
