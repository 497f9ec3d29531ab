"""The connector uses weak hashes only if the store's policy permits them; the tests configure the
connector with stand-ins for vLLM's configuration.
"""

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ritornello.vllm import RitornelloConnector
from ritornello.vllm.cpu_path import CpuPath


class FullAttentionSpec(SimpleNamespace):
    """Stand-in for vLLM's class, whose name tells the connector the kind of KV cache."""


def connector(store: Path, hashes: str) -> CpuPath:
    """Returns the data path of the scheduler's connector."""
    transfer = SimpleNamespace(
        kv_connector_extra_config={"path": str(store), "capacity": "1GiB"},
        kv_load_failure_policy="",
    )
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo=hashes, block_size=16
        ),
        speculative_config=None,
    )
    group = SimpleNamespace(layer_names=["l.0"], kv_cache_spec=FullAttentionSpec(block_size=16))
    caches: Any = SimpleNamespace(kv_cache_groups=[group], hash_block_size=16, num_blocks=8)
    path = RitornelloConnector(config, KVConnectorRole.SCHEDULER, caches).data_path
    assert isinstance(path, CpuPath)
    return path


def test_weak_hashes_need_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    store = tmp_path / "store"
    with caplog.at_level(logging.WARNING, "vllm.ritornello"):
        refused = connector(store, "xxhash")
    (said,) = [line for line in caplog.messages if line.startswith("ritornello: ")]
    assert "allow_weak_hashes = true" in said
    assert str(store / "policy.toml") in said
    assert said.endswith("serving without the store until it can be opened again")
    assert not refused._store.open()
    caplog.clear()
    (store / "policy.toml").write_text("allow_weak_hashes = true")
    end = time.monotonic() + 30
    # The connector logs this line after the store is in use again.
    while "the store serves again" not in caplog.text:
        assert time.monotonic() < end, refused._store.broken
        time.sleep(0.05)
    assert refused._store.open()
    refused.shutdown()
    caplog.clear()
    for hashes in ("xxhash_cbor", "sha256"):
        served = connector(store, hashes)
        assert served._store.open()
        served.shutdown()
    assert not [line for line in caplog.messages if line.startswith("ritornello: ")]
