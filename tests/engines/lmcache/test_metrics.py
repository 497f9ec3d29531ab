"""The adapter's counters among LMCache's metrics, through OpenTelemetry's real interface."""

from pathlib import Path
from typing import Any

import pytest
from harness import AdapterKind, Memory, fill, keys_of, load, lookup, store
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from ritornello.lmcache.metrics import COUNTERS, PREFIX, REASONS

SHAPE = (2, 4, 64, 64)
OBJECT = 2 * 4 * 64 * 64 * 2


@pytest.fixture(scope="module")
def reader() -> InMemoryMetricReader:
    reader = InMemoryMetricReader()
    # LMCache's server also sets OpenTelemetry's global provider at its start. Counters that were
    # created before the provider was set use it as well.
    metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
    return reader


def read(reader: InMemoryMetricReader, store: str) -> dict[str, Any]:
    """Returns the values of one store's counters. The key of a value is the counter's name without
    `PREFIX`, or "name:reason" if the value has the attribute `reason`.
    """
    data = reader.get_metrics_data()
    amounts = {}
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    attributes = dict(point.attributes)
                    if metric.name.startswith(PREFIX) and attributes.get("store") == store:
                        reason = attributes.get("reason")
                        name = metric.name.removeprefix(PREFIX)
                        amounts[f"{name}:{reason}" if reason else name] = point.value
    return amounts


def move(adapter: Any, memory: Memory, count: int) -> None:
    keys = keys_of(count)
    objects = memory.objects(count, SHAPE)
    fill(objects, keys)
    assert store(adapter, keys, objects).is_successful()
    assert lookup(adapter, keys_of(count + 1)) == [True] * count + [False]
    assert not all(load(adapter, keys_of(count + 1), memory.objects(count + 1, SHAPE)))


def test_each_store_has_its_counters(
    reader: InMemoryMetricReader, tmp_path: Path, memory: Memory
) -> None:
    one = AdapterKind("plugin", tmp_path / "one").open(memory)
    tiers = {"tiers": [f"disk {tmp_path}/two 256MiB"]}
    two = AdapterKind("plugin", tmp_path / "two").open(memory, params=tiers)
    move(one, memory, 4)
    move(two, memory, 2)
    for adapter, name, count in ((one, "one", 4), (two, "two", 2)):
        found = read(reader, str(tmp_path / name))
        assert found.keys() >= COUNTERS.keys()
        assert {found[name] for name in ("saved_pages", "loaded_pages", "hit_pages")} == {count}
        assert found["probed_pages"] == count + 1
        assert found["saved_bytes"] == found["loaded_bytes"] == count * OBJECT
        assert found["load_seconds"] > 0 and found["save_seconds"] > 0
        assert found["missed_pages:not_found"] == 1
        assert found["errors"] == 0
        known = {counter for counter in found if ":" not in counter}
        assert known == set(COUNTERS), "every counter must be published under its name"
        assert {counter.partition(":")[0] for counter in found} - known <= set(REASONS)
        assert adapter.report_status()["counts"].keys() <= found.keys()
    assert "tier_dropped_pages:disk" in read(reader, str(tmp_path / "two"))
    one.close()
    two.close()
