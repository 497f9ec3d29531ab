"""Counters of the storage in the registry that SGLang's `/metrics` shows."""

from typing import Any

import pytest
from conftest import Attach
from hosts import hashes, mha, page_bytes, slots
from prometheus_client import REGISTRY

from ritornello.sglang import metrics
from ritornello.sglang.metrics import COUNTERS, REASONS

FROM, TO = [3, 1, 4, 2, 0], [5, 11, 6, 8, 7]


def exported(name: str, **labels: str) -> float:
    """Returns the value of a counter that this process exports with the labels of a single rank."""
    ranks = ("tp_rank", "dp_rank", "pp_rank", "attn_cp_rank")
    known = {"storage_backend": "dynamic", "pp_size": "1", "attn_cp_size": "1"}
    labels = {**known, **dict.fromkeys(ranks, "0"), **labels}
    value = REGISTRY.get_sample_value(f"sglang:ritornello_{name}_total", labels)
    return value or 0.0


def test_counters_are_exported(attach: Attach) -> None:
    host = mha("page_first")
    keys = hashes("exported")
    names = ("probed_pages", "hit_pages", "loaded_pages", "loaded_bytes", "saved_pages", "errors")
    before = {name: exported(name) for name in names}
    missed = exported("missed_pages", reason="not_found")
    # The second storage uses the counters of the first.
    for storage in (attach(host), attach(host)):
        storage.batch_exists(keys)
        storage.batch_set_v1(keys, slots(host, FROM))
        storage.batch_get_v1(keys, slots(host, TO))
        assert {name.partition(":")[0] for name in storage.counts()} <= {*COUNTERS, *REASONS}
    storage.batch_get_v1(hashes("never"), slots(host, TO))
    storage.batch_exists_v2(keys)
    after = {name: exported(name) - before[name] for name in names}
    assert after.pop("loaded_bytes") == 10 * len(page_bytes(host, 0))
    assert after == {
        "probed_pages": 15,
        "hit_pages": 10,
        "loaded_pages": 10,
        "saved_pages": 10,
        "errors": 0,
    }
    assert exported("missed_pages", reason="not_found") - missed == 5


@pytest.mark.parametrize("enabled", [True, False])
def test_storage_serves_without_exported_counters(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, enabled: bool
) -> None:
    def broken(config: Any) -> Any:
        raise AttributeError("no tp_rank")

    monkeypatch.setattr(metrics, "_labels", broken)
    host = mha("page_first")
    keys = hashes(f"unexported {enabled}")
    storage = attach(host, enable_storage_metrics=enabled)
    assert all(storage.batch_set_v1(keys, slots(host, FROM)))
    assert storage.counts()["saved_pages"] == len(keys)
    assert caplog.text.count("no counters on SGLang's /metrics (no tp_rank)") == int(enabled)
