"""Decisions that our secondary tier of vLLM's offloading records about prompts that are shorter
than a chunk, for which vLLM looks up nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tier_support import WINDOW, Noted, TierHarness, namespace, offload_keys

import ritornello as rt

KEYS = offload_keys("a", 2)


@pytest.fixture
def rig(where: Path) -> Iterator[TierHarness]:
    made = TierHarness(where)
    yield made
    made.tier.close()


@pytest.fixture
def noted(rig: TierHarness, monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(rig, monkeypatch)


def test_short_prompt_is_recorded_when_it_is_scheduled(rig: TierHarness, noted: Noted) -> None:
    rig.begin("r")
    rig.begin("other")
    rig.tier.end_step()
    assert noted.take() == []
    for _ in range(2):
        rig.tier.end_step(scheduled=["r"])
    assert noted.take() == [("r", "too_short", 0, 0, 0, "")]


@pytest.mark.parametrize("tiers", [False, True])
def test_decision_about_short_prompt_reaches_the_owner(where: Path, tiers: bool) -> None:
    settings: dict[str, Any] = {"tiers": [f"disk {where} 64MiB"]} if tiers else {}
    rig = TierHarness(where, **settings)
    rig.begin("r")
    rig.tier.end_step(scheduled=["r"])
    with rt.Store.open(where) as store:
        assert store.stats()["counters"]["decisions_too_short"] == 1
    rig.tier.close()


def test_prompt_with_a_chunk_is_not_too_short(rig: TierHarness, noted: Noted) -> None:
    # vLLM records the keys of a request when it schedules the request, and further keys for the
    # answer.
    request = rig.begin("r")
    request.over(KEYS[:1])
    rig.tier.end_step(scheduled=["r"])
    short = rig.begin("short")
    rig.tier.end_step(scheduled=["short"])
    short.over(KEYS)
    rig.tier.end_step(scheduled=["short"])
    assert noted.take() == [("short", "too_short", 0, 0, 0, "")]


def test_prompt_is_not_recorded_if_vllm_hides_its_keys(rig: TierHarness, noted: Noted) -> None:
    context: Any = SimpleNamespace(
        req_id="r", kv_transfer_params=None, get_offload_key_position=lambda key: None
    )
    rig.tier.begin_request(context)
    rig.tier.end_step(scheduled=["r"])
    assert noted.take() == []


def test_request_that_ends_before_it_is_scheduled_is_not_recorded(
    rig: TierHarness, noted: Noted
) -> None:
    request = rig.begin("r")
    rig.tier.end_request(request)
    rig.tier.end_step(scheduled=["r"])
    assert noted.take() == []
    assert not rig.tier._decisions._unscheduled


def test_model_without_full_attention_has_no_decisions(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = TierHarness(where, namespace(groups=(WINDOW,)))
    noted = Noted(rig, monkeypatch)
    rig.begin("r")
    rig.tier.end_step(scheduled=["r"])
    assert noted.take() == []
    rig.tier.close()


def test_failure_to_record_does_not_end_the_step_early(
    rig: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("made by the test")

    rig.save(rig.begin("saved", KEYS), KEYS)
    request = rig.begin("warm", KEYS)
    assert rig.hits(request, KEYS) == 2
    assert rig.leases() == 1
    monkeypatch.setattr(rig.store, "note_decision", fail)
    rig.counts.take()
    rig.begin("r")
    rig.tier.end_step(scheduled=["r"])
    assert rig.leases() == 0
    assert rig.counts.take()["errors:note_decision"] == 1
