"""`RitornelloTier`, called as vLLM's tiering manager calls a secondary tier: results, events,
counts, unsupported engines, and internal failures.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium
from vllm.v1.kv_offload.tiering.base import TransferJob

from benches.host_memory import Host
from benches.tier_stand_ins import FullAttentionSpec, Request, engine_of, sequence, spec_of
from ritornello.vllm import RitornelloTier
from ritornello.vllm.tier.counts import PREFIX
from ritornello.vllm.tier.tier import Tier

ROWS, ROW = 32, 8192


@pytest.fixture
def host() -> Host:
    return Host("shm", ROWS, ROW)


def made(
    path: Path,
    host: Host,
    *,
    hashes: str = "sha256",
    self_describing: bool = True,
    **settings: Any,
) -> RitornelloTier:
    """Returns a tier. It finds the configuration of its engine in this function's stack frame."""
    extra: dict[str, Any] = {}
    vllm_config = engine_of(extra)
    vllm_config.cache_config.prefix_caching_hash_algo = hashes
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())]
    )
    spec = spec_of(extra)
    spec.kv_events_config.enable_kv_cache_events = True
    spec.kv_events_config.self_describing_kv_events = self_describing
    settings = {"path": str(path / "store"), "capacity": "1GiB"} | settings
    tier = RitornelloTier(spec, host.view, "RitornelloTier", **settings)
    # The constructor has read these two variables of this frame.
    assert vllm_config.kv_transfer_config.kv_connector_extra_config is spec.extra_config
    assert kv_cache_config.kv_cache_groups
    if tier._tier is not None:
        # No worker that counts changes of the weights runs here, and without one a `WeightGuard`
        # treats the weights as changed. So remove the tier's guard.
        tier._tier._guard = None
    return tier


@pytest.fixture
def tier(tmp_path: Path, host: Host) -> Iterator[RitornelloTier]:
    opened = made(tmp_path, host, enable_kv_events=True, locality="LOCAL")
    yield opened
    opened.shutdown()


def job(number: int, keys: list[bytes], request: Request, first: int, *, load: bool) -> Any:
    rows = np.arange(first, first + len(keys), dtype=np.int32)
    return TransferJob(number, keys, rows, load, request)


def ended(tier: RitornelloTier) -> Any:
    if tier._tier is not None:
        assert tier._tier._jobs.wait(60)
    (result,) = tier.get_finished_jobs()
    return result


def test_job_has_result_and_event(tier: RitornelloTier, host: Host) -> None:
    request, keys = sequence("a", 8)
    tier.on_new_request(request)
    tier.submit_store(job(1, keys, request, 0, load=False))
    stored = ended(tier)
    assert (stored.job_id, stored.success, stored.successful_keys) == (1, True, None)
    assert stored.transfer_bytes >= 8 * ROW
    assert stored.transfer_time > 0
    (event,) = tier.take_events()
    assert (event.keys, event.medium, event.removed) == (keys, Medium.STORAGE, False)
    assert event.locality.value == "LOCAL"
    # The tier names no owner, because Dynamo drops events whose owner it does not know.
    assert event.ownership is None
    assert list(tier.take_events()) == []
    assert {tier.lookup(key, request) for key in keys} == {LookupResult.HIT}
    tier.submit_load(job(2, keys, request, 16, load=True))
    tier.on_schedule_end(None)
    loaded = ended(tier)
    assert (loaded.success, loaded.successful_keys) == (True, None)
    assert (host.rows[16:24] == host.rows[:8]).all()
    assert list(tier.take_events()) == []


@pytest.mark.parametrize("self_describing", [False, True])
def test_log_names_setting_without_which_events_lack_tokens(
    tmp_path: Path, host: Host, caplog: pytest.LogCaptureFixture, self_describing: bool
) -> None:
    made(tmp_path, host, self_describing=self_describing, enable_kv_events=True).shutdown()
    assert ("self_describing_kv_events" in caplog.text) != self_describing


def test_partial_load_names_loaded_keys(tier: RitornelloTier) -> None:
    request, keys = sequence("b", 8)
    tier.submit_store(job(1, keys, request, 0, load=False))
    assert ended(tier).success
    assert tier._tier is not None
    _, scope = tier._tier._scopes[0]
    tier._tier._store._store.delete(scope, keys[5:])  # type: ignore[union-attr]
    tier.submit_load(job(2, keys, request, 16, load=True))
    loaded = ended(tier)
    assert (loaded.success, loaded.successful_keys) == (False, keys[:5])
    *_, event = tier.take_events()
    assert (event.keys, event.removed) == (keys[5:], True)
    tier.on_new_request(request)
    tier._tier._state_of(request).failed.update(keys[5:])
    assert tier.lookup(keys[5], request) is LookupResult.MISS


def test_job_with_refused_chunks_succeeds(tmp_path: Path, host: Host) -> None:
    """A job whose chunks the store refuses ends with success, because vLLM's back-pressure, if
    configured, may offer a tier fewer chunks after failures.
    """
    tier = made(tmp_path, host, write_budget=0)
    request, keys = sequence("c", 4)
    tier.submit_store(job(1, keys, request, 0, load=False))
    result = ended(tier)
    assert (result.success, result.transfer_bytes) == (True, 0)
    stats = tier.get_stats()
    assert stats is not None
    assert stats.reduce()[f"{PREFIX}skipped_chunks:('write_budget',)"] == 4
    assert tier.get_stats() is None
    tier.shutdown()


def test_failed_shutdown_raises_and_ends_lookups(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed shutdown must raise its error: only then does vLLM keep the host tier's memory."""
    tier = made(tmp_path, host)
    assert tier._tier is not None
    inner, ended_lookups = tier._tier, []
    monkeypatch.setattr(inner._jobs, "wait", lambda seconds=None: 1 / 0)
    tier._async_lookups = SimpleNamespace(shutdown=lambda: ended_lookups.append(True))  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        tier.shutdown()
    assert ended_lookups
    monkeypatch.undo()
    inner.close()
    tier.shutdown()


def test_counts_are_declared(tier: RitornelloTier) -> None:
    declared = RitornelloTier.build_metric_definitions({})
    assert {name.removeprefix(PREFIX) for name in declared} > {"lookups", "failed_chunks"}
    request, keys = sequence("d", 2)
    tier.lookup(keys[0], request)
    stats = tier.get_stats()
    assert stats is not None
    assert set(stats.data["data"]) <= set(declared)


def test_config_info_has_declared_keys(tier: RitornelloTier) -> None:
    config = {"type": "RitornelloTier", "module_path": "ritornello.vllm", "path": "/x"}
    assert tuple(tier.config_info()) == RitornelloTier.config_info_keys(config)


def test_unknown_engine_is_not_served(
    tmp_path: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.ritornello"):
        tier = RitornelloTier(spec_of({}), host.view, "T", path=str(tmp_path / "store"))
    assert [record.getMessage() for record in caplog.records] == [
        "ritornello: vLLM's configuration was not found, so the model of these bytes is unknown; "
        "pages are neither loaded nor stored"
    ]
    request, keys = sequence("e", 2)
    tier.on_new_request(request)
    assert tier.lookup(keys[0], request) is LookupResult.MISS
    tier.submit_store(job(1, keys, request, 0, load=False))
    assert ended(tier).success
    tier.submit_load(job(2, keys, request, 0, load=True))
    assert not ended(tier).success
    tier.touch(keys, request)
    tier.on_schedule_end(None)
    tier.drain_jobs()
    tier.on_request_finished(request)
    tier.shutdown()
    assert not (tmp_path / "store").exists()


def test_weak_hashes_need_permission(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    request, keys = sequence("w", 2)
    with caplog.at_level(logging.WARNING, "vllm.ritornello"):
        tier = made(tmp_path, host, hashes="xxhash")
    (said,) = [record.getMessage() for record in caplog.records if "hash" in record.getMessage()]
    assert "allow_weak_hashes = true" in said
    assert said.endswith("serving without the store until it can be opened again")
    tier.submit_store(job(1, keys, request, 0, load=False))
    ended(tier)
    assert tier.lookup(keys[0], request) is LookupResult.MISS
    tier.shutdown()
    (tmp_path / "store" / "policy.toml").write_text("allow_weak_hashes = true")
    tier = made(tmp_path, host, hashes="xxhash")
    tier.submit_store(job(1, keys, request, 0, load=False))
    assert ended(tier).success
    assert tier.lookup(keys[0], request) is LookupResult.HIT
    tier.shutdown()


def test_configuration_of_other_engine_is_ignored(tmp_path: Path, host: Host) -> None:
    """The tier accepts a configuration of vLLM that it finds in a caller's stack frame only if its
    `kv_connector_extra_config` is the same object as the `extra_config` of the tier's own
    configuration, not only equal.
    """
    vllm_config, kv_cache_config = engine_of({}), SimpleNamespace()
    tier = RitornelloTier(spec_of({}), host.view, "T", path=str(tmp_path / "store"))
    assert tier._tier is None, (vllm_config, kv_cache_config)


def test_internal_failures_do_not_escape(
    tier: RitornelloTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("made by the test")

    names = (
        "begin_request",
        "lookup",
        "load",
        "save",
        "take_finished",
        "end_step",
        "end_request",
        "touch",
        "reset",
    )
    for name in names:
        monkeypatch.setattr(Tier, name, broken)
    request, keys = sequence("f", 2)
    with caplog.at_level(logging.ERROR, "vllm.ritornello"):
        for _ in range(2):
            tier.on_new_request(request)
            assert tier.lookup(keys[0], request) is LookupResult.MISS
            tier.submit_store(job(1, keys, request, 0, load=False))
            tier.submit_load(job(2, keys, request, 0, load=True))
            assert [(r.job_id, r.success) for r in tier.get_finished_jobs()] == [
                (1, False),
                (2, False),
            ]
            tier.on_schedule_end(None)
            tier.touch(keys, request)
            tier.drain_jobs()
            tier.on_request_finished(request)
    assert len(caplog.records) == len(names), "each failing method must be logged once"
    assert tier._failed_requests == set()
    stats = tier.get_stats()
    assert stats is not None
    assert sum(stats.reduce().values()) == 2 * len(names)
    monkeypatch.undo()


def test_constructor_checks_settings(tmp_path: Path, host: Host) -> None:
    with pytest.raises(ValueError, match="unknown key 'n_read_threads'"):
        made(tmp_path, host, n_read_threads=16)
