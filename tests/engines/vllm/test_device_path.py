"""Engines on CUDA whose KV memory our own copies must not touch get neither hits nor saves."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_policy import FullAttentionSpec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ritornello.vllm import RitornelloConnector
from ritornello.vllm.device_choice import EMULATED, VARIABLE
from ritornello.vllm.device_path import DevicePath


@pytest.mark.parametrize(
    ("sleeps", "clears", "reason"),
    [(True, False, "sleep mode"), (False, True, "KV memory that vLLM clears")],
)
def test_memory_that_moves_or_is_cleared_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sleeps: bool,
    clears: bool,
    reason: str,
) -> None:
    monkeypatch.setenv(VARIABLE, EMULATED)
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"path": str(tmp_path / "kv"), "capacity": "1GiB"},
            kv_load_failure_policy="",
        ),
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", block_size=16
        ),
        speculative_config=None,
    )
    group = SimpleNamespace(layer_names=["l.0"], kv_cache_spec=FullAttentionSpec(block_size=16))
    caches: Any = SimpleNamespace(
        kv_cache_groups=[group], hash_block_size=16, num_blocks=8, needs_kv_cache_zeroing=clears
    )
    with caplog.at_level(logging.WARNING, "vllm.ritornello"):
        made = RitornelloConnector(config, KVConnectorRole.SCHEDULER, caches).data_path
    assert isinstance(made, DevicePath)
    assert f"{reason} is not served" in caplog.text
    assert made._unsupported_reason
    worker: Any = RitornelloConnector(config, KVConnectorRole.WORKER, caches).data_path
    assert worker._worker is None
    made.shutdown()
