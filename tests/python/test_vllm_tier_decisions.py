"""Decisions that our secondary tier of vLLM's offloading records about the chunks of requests. A
chunk is a page of vLLM's host tier.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from held_remote import Held
from support import SMALL
from tier_support import TOKENS, Noted, Request, TierHarness, offload_keys

from ritornello.vllm.tier.cache import Found, Prompt
from ritornello.vllm.tier.call_thread import Call
from ritornello.vllm.tier.requests import LookupAnswer
from ritornello.vllm.weights.counters import ChangeCounters
from ritornello.vllm.weights.guard import WeightGuard
from servers.child import owner_of

KEYS = offload_keys("a", 8)
WINDOW = offload_keys("a", 8, group=1)


@pytest.fixture
def rig(where: Path) -> Iterator[TierHarness]:
    made = TierHarness(where)
    made.save(made.begin("saved", KEYS), KEYS[:5])
    yield made
    made.tier.close()


@pytest.fixture
def noted(rig: TierHarness, monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(rig, monkeypatch)


class Steps:
    """The steps of vLLM, which copies hits to its host tier, and does not ask our tier about chunks
    that are `copied`.
    """

    def __init__(self, rig: TierHarness) -> None:
        self._rig = rig
        self.copied: set[bytes] = set()

    def run(self, request: Request, keys: Sequence[bytes]) -> list[LookupAnswer]:
        asked = [key for key in keys if key not in self.copied]
        answers = self._rig.answers(request, asked)
        self._rig.tier.end_step()
        hits = zip(asked, answers, strict=False)
        self.copied.update(key for key, answer in hits if answer is LookupAnswer.HIT)
        return answers


@pytest.fixture
def steps(rig: TierHarness) -> Steps:
    return Steps(rig)


def test_found_chunks_are_recorded_once(rig: TierHarness, steps: Steps, noted: Noted) -> None:
    request = rig.begin("r", KEYS)
    assert steps.run(request, KEYS) == [LookupAnswer.HIT] * 5
    for _ in range(3):
        assert steps.run(request, KEYS) == []
    assert noted.take() == [("r", "loaded", 8, 5, 5, "")]
    # vLLM has the first six chunks now.
    steps.run(request, KEYS[6:])
    assert noted.take() == [("r", "missed", 2, 0, 0, "")]


def test_chunks_found_later_are_recorded(rig: TierHarness, steps: Steps, noted: Noted) -> None:
    request = rig.begin("r", KEYS)
    steps.run(request, KEYS)
    rig.save(rig.begin("other", KEYS), KEYS[5:7])
    for _ in range(2):
        steps.run(request, KEYS)
    assert noted.take() == [("r", "loaded", 8, 5, 5, ""), ("r", "loaded", 3, 2, 2, "")]


def test_lookup_repeated_with_same_result_is_recorded_once(
    rig: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(rig, monkeypatch)
    request = rig.begin("r", KEYS)
    rig.counts.take()
    # vLLM's host tier is full: chunks that were found are looked up again in the next step.
    for _ in range(3):
        assert rig.answers(request, KEYS) == [LookupAnswer.HIT] * 5
        rig.tier.end_step()
    assert rig.counts.take()["lookups"] == 3
    assert noted.take() == [("r", "loaded", 8, 5, 5, "")]


def test_keys_without_position_are_not_recorded(
    rig: TierHarness, steps: Steps, noted: Noted
) -> None:
    assert steps.run(rig.begin("r"), KEYS) == [LookupAnswer.HIT] * 5
    assert noted.take() == []


def test_chunks_of_windows_are_not_recorded(rig: TierHarness, steps: Steps, noted: Noted) -> None:
    steps.run(rig.begin("r", KEYS, WINDOW), WINDOW)
    assert noted.take() == []


def test_reason_not_to_load_is_recorded(rig: TierHarness, steps: Steps, noted: Noted) -> None:
    steps.run(rig.begin("r", KEYS, **{"ritornello.no_load": True}), KEYS)
    assert noted.take() == [("r", "not_cacheable", 8, 0, 0, "opted_out")]
    rig.begin("before", KEYS)
    rig.tier.reset()
    steps.run(rig.begin("s", KEYS), KEYS)
    assert noted.take() == [("s", "not_cacheable", 8, 0, 0, "before_reset")]


def test_failed_load_is_recorded_as_reason(rig: TierHarness, steps: Steps, noted: Noted) -> None:
    request = rig.begin("r", KEYS)
    steps.run(request, KEYS)
    assert rig.store._store is not None
    rig.store._store.delete(rig.tier._scopes[0][1], KEYS[3:4])
    assert rig.load(request, KEYS[:5]).ok == [True] * 3 + [False] * 2
    noted.take()
    steps.copied.difference_update(KEYS[3:5])
    steps.run(request, KEYS)
    assert noted.take() == [("r", "not_cacheable", 5, 0, 0, "load_failed")]
    # The failed chunk is stored again, and vLLM's host tier has evicted the chunks before it.
    rig.save(rig.begin("other", KEYS), KEYS[3:5])
    steps.copied.clear()
    steps.run(request, KEYS)
    assert noted.take() == [("r", "loaded", 8, 5, 3, "load_failed")]


def test_failure_to_record_releases_leases(
    rig: TierHarness, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("made by the test")

    monkeypatch.setattr(rig.store, "note_decision", fail)
    rig.counts.take()
    assert steps.run(rig.begin("r", KEYS), KEYS) == [LookupAnswer.HIT] * 5
    assert rig.leases() == 0
    assert rig.counts.take()["errors:note_decision"] == 1


@pytest.fixture
def client(where: Path) -> Iterator[TierHarness]:
    """A tier whose store another process owns. Five chunks are stored."""
    with owner_of(where, **SMALL):
        made = TierHarness(where, capacity=None)
        made.save(made.begin("saved", KEYS), KEYS[:5])
        yield made
        made.tier.close()


def confirm(rig: TierHarness, request: Request, found: Sequence[bool]) -> list[LookupAnswer]:
    """Passes on the results of the lookup thread, as vLLM does: up to the first miss."""
    answers: list[LookupAnswer] = []
    for key, ok in zip(KEYS, found, strict=True):
        assert rig.tier.lookup(key, request) is LookupAnswer.PENDING
        answers.append(rig.tier.confirm_lookup(key, request, ok))
        if answers[-1] is LookupAnswer.MISS:
            break
    rig.tier.end_step()
    return answers


def test_lookup_of_a_client_is_recorded_by_its_lookup_thread(
    client: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, request = Noted(client, monkeypatch), client.begin("r", KEYS)
    assert client.answers(request, KEYS) == [LookupAnswer.PENDING] * 8
    client.tier.end_step()
    assert noted.take() == []
    found = client.tier.batch_lookup(KEYS, request)
    assert noted.take() == [("r", "loaded", 8, 5, 5, "")]
    assert confirm(client, request, found).count(LookupAnswer.HIT) == 5
    # vLLM keeps the answers, and asks about the first miss until the hits are copied.
    assert client.tier.lookup(KEYS[5], request) is LookupAnswer.PENDING
    client.tier.confirm_lookup(KEYS[5], request, False)
    client.tier.end_step()
    assert noted.take() == []


def test_miss_found_by_the_lookup_of_another_request_is_recorded_once(
    client: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, request = Noted(client, monkeypatch), client.begin("r", KEYS)
    for _ in range(2):
        assert confirm(client, request, [False] * 8) == [LookupAnswer.MISS]
    assert noted.take() == [("r", "missed", 8, 0, 0, "")]


def test_chunks_after_a_gap_are_not_recorded(
    client: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, request = Noted(client, monkeypatch), client.begin("r", KEYS)
    # vLLM already has an answer about the third chunk, so it does not ask for this chunk.
    client.tier.batch_lookup(KEYS[:2] + KEYS[3:], request)
    assert noted.take() == [("r", "loaded", 2, 2, 2, "")]


def test_lookup_for_ended_request_is_not_recorded(
    client: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, request = Noted(client, monkeypatch), client.begin("r", KEYS)
    client.tier.end_request(request)
    client.tier.batch_lookup(KEYS, request)
    assert noted.take() == []


def test_failed_lookup_of_a_client_is_recorded_once(
    client: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, request = Noted(client, monkeypatch), client.begin("r", KEYS)
    monkeypatch.setattr(client.store, "lease_prefix", lambda *_: None)
    found = client.tier.batch_lookup(KEYS, request)
    assert confirm(client, request, found) == [LookupAnswer.MISS]
    assert noted.take() == [("r", "failed", 8, 0, 0, "")]


def test_refusal_after_the_lookup_is_recorded(
    client: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, request = Noted(client, monkeypatch), client.begin("r", KEYS)
    guard, counters = WeightGuard(), ChangeCounters.private(2)
    guard.set_counters(counters)
    client.tier._guard = guard
    assert client.tier.lookup(KEYS[0], request) is LookupAnswer.PENDING
    (found,) = client.tier.batch_lookup(KEYS[:1], request)
    counters.add(0)
    assert client.tier.confirm_lookup(KEYS[0], request, found) is LookupAnswer.MISS
    client.tier.end_step()
    assert noted.take() == [
        ("r", "loaded", 1, 1, 1, ""),
        ("r", "not_cacheable", 8, 0, 0, "weights_changed"),
    ]


def test_choice_of_the_gate_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TierHarness(tmp_path / "disk", tiers=[f"disk {tmp_path}/disk 64MiB"])
    noted = Noted(rig, monkeypatch)
    rig.save(rig.begin("saved", KEYS), KEYS[:5])
    # The engine computes a thousand chunks in a microsecond, far faster than any load.
    for _ in range(20):
        rig.tier.record_prefill(0, 1000 * TOKENS, 1e-6)
    request = rig.begin("r", KEYS)
    assert rig.hits(request, KEYS) == 0
    rig.tier.end_step()
    assert noted.take()[-1] == ("r", "declined", 8, 5, 0, "")
    assert noted.estimate is not None
    with_load, without_load = noted.estimate
    assert with_load > without_load > 0
    rig.tier.close()


def test_chunks_after_the_choice_of_the_gate_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = TierHarness(tmp_path / "disk", tiers=[f"disk {tmp_path}/disk 64MiB"])
    noted, steps = Noted(rig, monkeypatch), Steps(rig)
    rig.save(rig.begin("saved", KEYS), KEYS[:5])
    # The engine computes one chunk per second, far slower than any load.
    rig.tier.record_prefill(0, TOKENS, 1.0)
    request = rig.begin("r", KEYS)
    assert rig.hits(request, KEYS) == 5
    rig.tier.end_step()
    steps.copied.update(KEYS[:5])
    assert noted.take()[-1] == ("r", "loaded", 8, 5, 5, "")
    assert noted.estimate is not None
    with_load, without_load = noted.estimate
    assert without_load > with_load > 0
    # The gate decides once for the request, so the chunks after its choice are not looked up.
    for first in (5, 6):
        steps.run(request, KEYS[first:])
        assert noted.take() == []
    rig.tier.close()


def answer_with(rig: TierHarness, monkeypatch: pytest.MonkeyPatch, lookup: Any) -> None:
    """Makes the cache answer every lookup immediately with `lookup`."""

    def answer(prompt: Prompt) -> Call:
        call = Call(lambda: Found(lookup))
        call.run()
        return call

    monkeypatch.setattr(rig.store, "submit_lookup", answer)


@pytest.mark.parametrize(
    ("computed", "recorded"),
    [
        (0, ("r", "loaded", 8, 5, 3, "")),
        (2, ("r", "loaded", 6, 3, 1, "")),
        (4, ("r", "declined", 4, 1, 0, "")),
        (6, ("r", "missed", 2, 0, 0, "")),
    ],
)
def test_found_chunks_that_the_gate_declines_are_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    computed: int,
    recorded: tuple[Any, ...],
) -> None:
    rig = TierHarness(tmp_path / "disk", tiers=[f"disk {tmp_path}/disk 64MiB"])
    noted, steps = Noted(rig, monkeypatch), Steps(rig)
    # The cache has five chunks, of which the gate chooses three.
    lookup: Any = SimpleNamespace(
        state="ready", local=5, load=3, estimate=(0.1, 0, 0.2), alternatives=(0.1, 0.2), leases=[]
    )
    answer_with(rig, monkeypatch, lookup)
    request = rig.begin("r", KEYS)
    for _ in range(2):
        steps.run(request, KEYS[computed:])
    assert noted.take() == [recorded]
    assert noted.estimate == (0.1, 0.2)
    rig.tier.close()


def test_chunks_that_are_found_later_and_declined_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = TierHarness(tmp_path / "disk", tiers=[f"disk {tmp_path}/disk 64MiB"])
    noted, steps = Noted(rig, monkeypatch), Steps(rig)
    lookup: Any = SimpleNamespace(
        state="ready", local=5, load=5, estimate=None, alternatives=None, leases=[]
    )
    answer_with(rig, monkeypatch, lookup)
    request = rig.begin("r", KEYS)
    for _ in range(2):
        steps.run(request, KEYS)
    lookup.local = 7
    steps.run(request, KEYS)
    assert noted.take() == [("r", "loaded", 8, 5, 5, ""), ("r", "declined", 3, 2, 0, "")]
    rig.tier.close()


def test_lookup_that_cannot_be_queued_is_recorded_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = TierHarness(tmp_path / "disk", tiers=[f"disk {tmp_path}/disk 64MiB"])
    noted, request = Noted(rig, monkeypatch), rig.begin("r", KEYS)
    monkeypatch.setattr(rig.store, "submit_lookup", lambda prompt: None)
    for _ in range(2):
        assert rig.answers(request, KEYS) == []
        rig.tier.end_step()
    assert noted.take() == [("r", "failed", 8, 0, 0, "")]
    rig.tier.close()


@pytest.fixture
def remote() -> Iterator[type[Held]]:
    Held.values.clear()
    Held.released.clear()
    yield Held
    Held.released.set()


def test_wait_for_a_remote_precedes_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: type[Held]
) -> None:
    tiers = [f"disk {tmp_path}/disk 64MiB", "held_remote:Held"]
    rig = TierHarness(tmp_path / "disk", tiers=tiers, prefetch="wait_complete")
    noted, steps = Noted(rig, monkeypatch), Steps(rig)
    request = rig.begin("r", KEYS)
    for _ in range(2):
        assert steps.run(request, KEYS) == [LookupAnswer.PENDING] * 8
    assert noted.take() == [("r", "waiting", 8, 0, 0, "")]
    remote.released.set()
    assert rig.hits(request, KEYS) == 0
    rig.tier.end_step()
    assert noted.take() == [("r", "missed", 8, 0, 0, "")]
    rig.tier.close()
