"""The counters of a cache over tiers on the engines' metrics, and their help texts."""

import re
import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ritornello as rt
from ritornello.connector.cache_counts import CACHE_COUNTERS, counts_of, help_by_reason
from ritornello.sglang.metrics import COUNTERS as SGLANG_COUNTERS
from ritornello.sglang.metrics import REASONS as SGLANG_REASONS
from ritornello.vllm.tier.counts import COUNTERS

SGLANG_DOCUMENT = Path(__file__).resolve().parents[2] / "docs/engines/sglang.md"
VLLM_METRICS = Path(rt.__file__).parent / "vllm" / "metrics.py"


def test_every_counter_of_a_cache_has_a_help_text(tmp_path: Path) -> None:
    tiers = [f"disk {tmp_path}/disk 64MiB", f"file://{tmp_path}/far"]
    with rt.Cache.open(tiers) as cache:
        counts = counts_of(cache.stats())
    plain = {name for name in counts if ":" not in name}
    assert plain == CACHE_COUNTERS.keys()
    by_reason = {name.partition(":")[0] for name in counts} - plain
    assert by_reason == help_by_reason("pages").keys()


def test_counts_of_a_remote_keep_their_values(tmp_path: Path) -> None:
    tiers = [f"disk {tmp_path}/disk 64MiB", f"file://{tmp_path}/far"]
    with rt.Cache.open(tiers) as cache:
        stats = cache.stats()
    values = {
        "read_bytes": 1,
        "written_bytes": 2,
        "breaker_openings": 3,
        "breaker_open_seconds": 4.5,
    }
    assert stats["tiers"][1]["remote"].keys() >= values.keys()
    stats["tiers"][1]["remote"] |= values
    counts = counts_of(stats)
    assert {name: counts[f"remote_{name}"] for name in values} == values


def metrics_of_vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the names in `vllm/metrics.py`, with stand-ins for the imported classes of vLLM."""
    parts = ("vllm", "distributed", "kv_transfer", "kv_connector", "v1", "metrics")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
    module.KVConnectorPromMetrics = module.KVConnectorStats = object
    return runpy.run_path(str(VLLM_METRICS))


@pytest.mark.parametrize(
    ("engine", "pages"),
    [("vllm", "objects"), ("tier", "chunks"), ("sglang", "pages"), ("lmcache", "objects")],
)
def test_engines_publish_the_counters_of_a_cache_with_equal_texts(
    monkeypatch: pytest.MonkeyPatch, engine: str, pages: str
) -> None:
    if engine == "tier":
        plain = {name: text for name, (text, by_reason) in COUNTERS.items() if not by_reason}
        reasons = {name: text for name, (text, by_reason) in COUNTERS.items() if by_reason}
    elif engine == "vllm":
        found = metrics_of_vllm(monkeypatch)
        plain, reasons = found["COUNTERS"], found["REASONS"]
    else:
        module = import_module(f"ritornello.{engine}.metrics")
        plain, reasons = module.COUNTERS, module.REASONS
    assert plain.items() >= CACHE_COUNTERS.items()
    assert reasons.items() >= help_by_reason(pages).items()


def test_document_of_sglang_names_the_published_counters() -> None:
    """Counters of Prometheus, and not the counts of a storage, which are only in its last line."""
    text = SGLANG_DOCUMENT.read_text()
    named = re.findall(r"(?:`|`_|sglang:ritornello_)([a-z][a-z_]*)_total\b(\{reason)?", text)
    plain, reasons = SGLANG_COUNTERS.keys(), SGLANG_REASONS.keys()
    assert {name for name, _ in named} == plain | reasons
    assert {name for name, by_reason in named if by_reason} <= reasons
    _, _, symptoms = text.partition("\n## By symptom\n")
    assert re.findall(r"\w+_pages:\w+", symptoms) == []
    assert "skipped_pages" in symptoms and "missed_pages" in symptoms
