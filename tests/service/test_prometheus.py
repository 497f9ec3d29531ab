"""A real Prometheus scrapes the service and runs every query of the dashboard and of the alerts."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from service_process import PAGES, READ, get, serving

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
DASHBOARD = PACKAGING / "grafana/ritornello.json"
# Metrics that only a store with the index `lsm` has.
OF_OTHER_STORES = ("ritornello_index_size_ratio", "ritornello_index_runs_per_level")


def dashboard_queries() -> Iterator[str]:
    """Yields the queries of all panels, with values for the dashboard's variables."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            query = str(target["expr"]).replace("$__rate_interval", "5m")
            yield query.replace("$instance", ".*").replace("$store", ".*")


@contextmanager
def scraping(root: Path, service: str) -> Iterator[str]:
    """Runs Prometheus with the packaged alerts. Yields its address after several scrapes of the
    service.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    token = root / "prometheus-token"
    token.write_text(READ)
    config = root / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(PACKAGING / "prometheus/alerts.yaml")],
                "scrape_configs": [
                    {
                        "job_name": "ritornello",
                        "authorization": {"credentials_file": str(token)},
                        "static_configs": [{"targets": [service.removeprefix("http://")]}],
                    }
                ],
            }
        )
    )
    words = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={root / 'tsdb'}"]
    log = root / "prometheus.log"
    with log.open("w") as err:
        process = subprocess.Popen([*words, f"--web.listen-address={address}"], stderr=err)
    try:
        deadline = time.monotonic() + 60
        while count(f"http://{address}", 'count_over_time(up{job="ritornello"}[1h])') < 4:
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.5)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def answer(prometheus: str, query: str) -> list[Any]:
    """Returns the series of a query."""
    given = urllib.parse.urlencode({"query": query})
    found = get(f"{prometheus}/api/v1/query?{given}")
    assert found["status"] == "success", found
    result: list[Any] = found["data"]["result"]
    return result


def count(prometheus: str, query: str) -> float:
    """Returns the value of a query, or zero while Prometheus starts or has no value."""
    try:
        series = answer(prometheus, query)
    except OSError:
        return 0
    return float(series[0]["value"][1]) if series else 0


def test_prometheus_scrapes_metrics_and_runs_all_queries(tmp_path: Path) -> None:
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    with serving(tmp_path) as service, scraping(tmp_path, service) as prometheus:
        assert count(prometheus, "ritornello_up") == 1
        assert count(prometheus, "ritornello_hit_pages_total") == PAGES
        # The counter began when `serve` opened the store: it does not count the pages put before.
        assert count(prometheus, "ritornello_stored_pages_total") == PAGES
        models = {
            series["metric"]["model"] for series in answer(prometheus, "ritornello_scope_pages")
        }
        assert models == {"a model", 'a "model"\N{REPLACEMENT CHARACTER}'}
        target = get(f"{prometheus}/api/v1/targets")["data"]["activeTargets"][0]
        assert (target["health"], target["lastError"]) == ("up", "")
        kinds = get(f"{prometheus}/api/v1/metadata?metric=ritornello_hit_pages")["data"]
        assert kinds["ritornello_hit_pages"][0]["type"] == "counter"

        queries = list(dashboard_queries())
        assert len(queries) > 30
        for query in queries:
            series = answer(prometheus, query)
            is_expected = not query.startswith(OF_OTHER_STORES)
            assert bool(series) == is_expected, f"{query}: {series}"

        groups = get(f"{prometheus}/api/v1/rules")["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) >= 14
        for rule in rules:
            assert rule["health"] == "ok" and rule["state"] == "inactive", rule
