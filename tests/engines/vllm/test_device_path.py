"""`DevicePath`, the data path with Ritornello's own copies between GPU and store: engines that it
does not serve, and saves that must read their blocks before a step overwrites the blocks. The tests
configure the data path with stand-ins for vLLM's configuration.
"""

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
from ritornello.vllm.metadata import StepMetadata


def config(path: Path, **model: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"path": str(path), "capacity": "1GiB"},
            kv_load_failure_policy="",
        ),
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size_local=1),
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", block_size=16
        ),
        speculative_config=None,
    )


def caches(**changes: Any) -> Any:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1)
    group = SimpleNamespace(layer_names=["l.0"], kv_cache_spec=spec)
    fields = {"kv_cache_groups": [group], "hash_block_size": 16, "num_blocks": 8}
    return SimpleNamespace(**(fields | changes))


@pytest.fixture(autouse=True)
def choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, EMULATED)


@pytest.mark.parametrize(
    ("sleeps", "clears", "reason"),
    [(True, False, "sleep mode"), (False, True, "KV memory that vLLM clears")],
)
def test_memory_that_is_unmapped_or_cleared_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sleeps: bool, clears: bool, reason: str
) -> None:
    asked, cache = config(tmp_path, enable_sleep_mode=sleeps), caches(needs_kv_cache_zeroing=clears)
    with caplog.at_level(logging.WARNING, "vllm.ritornello"):
        made = RitornelloConnector(asked, KVConnectorRole.SCHEDULER, cache).data_path
    assert isinstance(made, DevicePath)
    assert f"{reason} is not served" in caplog.text
    worker: Any = RitornelloConnector(asked, KVConnectorRole.WORKER, cache).data_path
    assert worker._worker is None


def test_saves_are_protected_before_the_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When vLLM binds the metadata of a step, before it queues the step's work, the worker protects
    the saves of requests whose blocks the step may overwrite (`freed`): the step's work waits until
    these saves have read their blocks.
    """
    rank = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr("ritornello.vllm.cpu_path.get_pp_group", lambda: rank)
    monkeypatch.setattr("ritornello.vllm.cpu_path.get_tp_group", lambda: rank)
    made = RitornelloConnector(config(tmp_path), KVConnectorRole.WORKER, caches())
    path: Any = made.data_path
    protected: list[str] = []
    save = SimpleNamespace(request="a")
    path._worker._pending_saves.append(
        SimpleNamespace(save=save, is_windowed=False, protect=lambda: protected.append("a"))
    )
    made.bind_connector_metadata(StepMetadata(freed=("b",)))
    assert not protected
    made.bind_connector_metadata(StepMetadata(freed=("a",)))
    assert protected == ["a"]
