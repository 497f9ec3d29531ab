"""`RitornelloConnector` with the data path of GPU engines: vLLM's offloading with the store below
it, built by the settings of the connector; each engine runs in a separate process. Further tests
construct connectors in this process: the choice of the data path, and refused settings.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import run_engine
from connector_engine import CHUNK
from harness import BLOCK, prompt
from tier_harness import block_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ritornello.vllm import RitornelloConnector, data_path, offloading_path
from ritornello.vllm.cpu_path import CpuPath
from ritornello.vllm.metrics import RitornelloStats
from ritornello.vllm.weights.guard import WeightGuard
from servers.environment import shared_model

# Capacity of the host memory in chunks: enough for `FIRST` or for `SECOND`, but not for both.
HOST_CHUNKS = 4
FIRST, SECOND = prompt(21, 600), prompt(22, 900)


def cached(asked: list[int]) -> int:
    """Returns the number of tokens in the full chunks before the prompt's last token."""
    return (len(asked) - 1) // CHUNK * CHUNK


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the replies of two engines that ran in turn with the same store. While the first
    engine starts and answers its first prompt, a file is at the store's path.
    """
    store = tmp_path_factory.mktemp("connector") / "store"
    store.touch()
    host = HOST_CHUNKS * block_bytes(model) * CHUNK // BLOCK
    # On a busy machine the gate may expect that computing these short prompts is faster.
    extra = {"tiers": [f"host {host}", f"disk {store} 1GiB"], "gate": "always"}
    question = {"model": str(model), "extra": extra, "path": str(store)}
    first = run_engine(question | {"prompts": [FIRST, SECOND]}, store.with_name("first.log"))
    asked = {"prompts": [SECOND, FIRST], "changes_weights": True}
    return [first, run_engine(question | asked, store.with_name("second.log"))]


def test_engine_serves_without_store_that_cannot_be_opened(runs: list[dict[str, Any]]) -> None:
    unopened, first, _ = runs[0]["answers"]
    assert (unopened["unopened"]["cached"], unopened["unopened"]["disk"]) == (0, 0)
    assert unopened["unopened"]["tokens"] == first["first"]["tokens"]
    (said,) = [line for line in runs[0]["log"] if "open failed" in line]
    assert said.endswith("serving without the store until it can be opened again")
    assert any("the store serves again" in line for line in runs[0]["log"])


def test_restarted_engine_answers_same_from_disk(runs: list[dict[str, Any]]) -> None:
    _, first, second = runs[0]["answers"]
    assert (first["first"]["disk"], second["first"]["disk"]) == (0, 0)
    restarted_second, restarted_first, _ = runs[1]["answers"]
    for asked, before, after in (
        (FIRST, first, restarted_first),
        (SECOND, second, restarted_second),
    ):
        assert after["first"]["tokens"] == before["first"]["tokens"]
        assert after["first"]["disk"] == after["first"]["cached"] == cached(asked)


def test_chunks_dropped_from_host_memory_come_from_disk(runs: list[dict[str, Any]]) -> None:
    for asked, said in zip((FIRST, SECOND), runs[0]["answers"][1:], strict=True):
        assert said["again"]["tokens"] == said["first"]["tokens"]
        assert said["again"]["disk"] == cached(asked)


def test_chunks_of_earlier_weights_are_not_loaded(runs: list[dict[str, Any]]) -> None:
    *_, said = runs[1]["answers"]
    assert [said[name]["cached"] for name in ("changed", "reset")] == [0, 0]
    assert said["changed"]["tokens"] != runs[0]["answers"][1]["first"]["tokens"]
    assert said["reset"]["tokens"] == said["again"]["tokens"] == said["changed"]["tokens"]
    assert said["again"]["disk"] == cached(FIRST)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_chunks_contain_kv_of_draft_model(tmp_path: Path) -> None:
    """Two engines run in turn, and each answers the prompt twice. The draft model is the target
    model, so that drafts are accepted if their KV is right. `test_model_kinds` has other drafts.
    """
    model = shared_model("tiny")
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    # `block_bytes` counts elements of two bytes, and the four layers of the target model. In this
    # test an element has four bytes, and a block has eight layers.
    host = 4 * HOST_CHUNKS * block_bytes(model) * CHUNK // BLOCK
    store = tmp_path / "store"
    question = {
        "model": str(model),
        "extra": {"tiers": [f"host {host}", f"disk {store} 1GiB"], "gate": "always"},
        "path": str(store),
        "prompts": [FIRST],
        "options": {"speculative_config": drafts, "dtype": "float32"},
    }
    cold: dict[str, Any] | None = None
    for number in range(2):
        (said,) = run_engine(question, tmp_path / f"{number}.log")["answers"]
        cold = cold or said["first"]
        for warm in (said["first"], said["again"]):
            assert warm["tokens"] == cold["tokens"]
            assert warm["accepted"] == cold["accepted"] > 0
            assert warm["disk"] == (0 if warm is cold else cached(FIRST))


def test_sizes_follow_settings_and_model(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        assert run["blocks_per_chunk"] * BLOCK == CHUNK
        (said,) = [line for line in run["log"] if "vLLM offloads chunks" in line]
        assert f"chunks of {CHUNK} tokens" in said
        assert f"({HOST_CHUNKS} chunks)" in said
        assert "of host memory is little" in said
        assert "tiering_chunk_hits" in run["counters"]


def config_of(extra: dict[str, Any]) -> Any:
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra, kv_connector="", kv_connector_module_path=""
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        kv_events_config=None,
        model_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(data_parallel_size_local=2),
    )


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_path, "data_path", lambda: offloading_path.OffloadingPath)


@pytest.mark.parametrize(
    ("extra", "advice"),
    [
        ({}, 'needs "path"'),
        ({"path": "/kv", "cpu_bytes_to_use": 1}, "unknown key 'cpu_bytes_to_use'"),
        ({"tiers": ["gpu 8GiB", "disk /kv"]}, "--gpu-memory-utilization"),
    ],
)
@pytest.mark.parametrize("role", KVConnectorRole)
def test_bad_settings_fail_in_one_line(
    on_gpu: None, role: KVConnectorRole, extra: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ValueError, match=advice) as raised:
        RitornelloConnector(config_of(extra), role, SimpleNamespace())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("role", KVConnectorRole)
def test_host_memory_beyond_the_machine_fails_in_one_line(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, role: KVConnectorRole
) -> None:
    monkeypatch.setattr(offloading_path, "memory_bytes", lambda: 6 << 30)
    monkeypatch.setattr(offloading_path, "shm_bytes", lambda: 64 << 30)
    monkeypatch.setattr(offloading_path, "guard_of_engine", WeightGuard)
    extra = {"tiers": ["host 4GiB", "disk /kv 1GiB"]}
    with pytest.raises(
        ValueError, match=r'4096 MiB for each of 2 engines.*"host 3072MiB"'
    ) as raised:
        RitornelloConnector(config_of(extra), role, SimpleNamespace(kv_cache_groups=[]))
    assert "\n" not in str(raised.value)


def test_class_methods_follow_data_path(on_gpu: None) -> None:
    plain = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None))
    offloading = offloading_path.OffloadingConnector
    assert RitornelloConnector.get_required_kvcache_layout(plain) == (
        offloading.get_required_kvcache_layout(plain)
    )
    stats = type(offloading.build_kv_connector_stats())
    assert isinstance(RitornelloConnector.build_kv_connector_stats(), stats)


@pytest.mark.parametrize(
    ("tiers", "advice"),
    [
        (["gpu 8GiB", "disk /kv"], "VLLM_CPU_KVCACHE_SPACE"),
        (["disk /kv", "host 8GiB"], "first in the list"),
        (["s3://bucket/prefix"], "needs a disk"),
    ],
)
@pytest.mark.parametrize("role", KVConnectorRole)
def test_bad_tiers_on_cpus_fail_in_one_line(
    role: KVConnectorRole, tiers: list[str], advice: str
) -> None:
    with pytest.raises(ValueError, match=advice) as raised:
        RitornelloConnector(config_of({"tiers": tiers}), role, SimpleNamespace())
    assert "\n" not in str(raised.value)


def test_cpu_engine_gets_cpu_data_path() -> None:
    assert data_path.data_path() is CpuPath
    assert RitornelloConnector.get_required_kvcache_layout(SimpleNamespace()) is None
    assert isinstance(RitornelloConnector.build_kv_connector_stats(), RitornelloStats)
