"""Our secondary tier of vLLM's offloading over a disk and a remote, without vLLM: lookups that wait
for the remote, the gate, and requests that end or whose weights change while a remote loads. A
chunk is a page of vLLM's host tier.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from held_remote import Held
from support import SMALL, pages_of
from tier_support import FULL, TOKENS, RecordedStore, TierHarness, namespace, offload_keys

from ritornello.vllm.tier import cache_lookups
from ritornello.vllm.tier.requests import LookupAnswer
from ritornello.vllm.tier.sequence import Group
from ritornello.vllm.weights.counters import ChangeCounters
from ritornello.vllm.weights.guard import WeightGuard
from servers.child import owner_of

KEYS = offload_keys("a", 12)
DISK_BYTES = "64MiB"


@pytest.fixture(autouse=True)
def remote() -> Iterator[type[Held]]:
    Held.values.clear()
    Held.released.set()
    Held.down = False
    yield Held
    Held.released.set()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the time limit after which a request asks the remote for no further windows and
    states, because a slow machine could exceed it.
    """
    monkeypatch.setattr(cache_lookups, "WINDOWS_SECONDS", 600.0)


Machine = Callable[..., TierHarness]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Makes the tiers of machines by name, each with its own disk. All share one remote."""
    made: list[TierHarness] = []

    def make(name: str, **settings: Any) -> TierHarness:
        tiers = [f"disk {tmp_path}/{name} {DISK_BYTES}", "held_remote:Held"]
        settings = {"tiers": tiers, "prefetch": "wait_complete"} | settings
        made.append(TierHarness(tmp_path / name, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.tier.close()


def flush(rig: TierHarness) -> None:
    assert rig.store._store is not None
    rig.store._store.flush()


def stats(rig: TierHarness) -> dict[str, Any]:
    assert rig.store._store is not None
    return dict(rig.store._store.stats())


@pytest.fixture
def other(machine: Machine) -> TierHarness:
    """The tier of a machine that has no chunks itself. Another machine has written the prompt, in
    two puts, to the remote of both machines.
    """
    first = machine("first")
    request = first.begin("r", KEYS)
    assert first.save(request, KEYS[:5]).ok == [True] * 5
    assert first.save(request, KEYS[5:]).ok == [True] * 7
    flush(first)
    return machine("other")


def test_other_machine_finds_prompt_in_remote(other: TierHarness) -> None:
    request = other.begin("s", KEYS)
    assert other.answers(request, KEYS) == [LookupAnswer.PENDING] * 12
    assert other.hits(request, KEYS) == 12
    assert stats(other)["prefetch"]["pages"] == 12
    assert other.load(request, KEYS).ok == [True] * 12
    assert all(other.right(KEYS))
    assert other.leases() == 0


def test_remote_receives_chunks_that_are_passed_out_of_order(machine: Machine) -> None:
    first = machine("first")
    request = first.begin("r", KEYS)
    keys = [KEYS[2], KEYS[0], KEYS[3], KEYS[1]]
    first.host[range(4)] = pages_of(keys, first.row_bytes)
    first.tier.save(first._transfer(request, keys, range(4)))
    # All chunks must be one put: of several concurrent puts, a put of later chunks could reach the
    # remote first.
    assert [len(job.parts) for job in first.tier._jobs._running] == [1]
    assert first.ended().ok == [True] * 4
    flush(first)
    assert stats(first)["tiers"][-1]["lost_pages"] == 0
    other = machine("other")
    again = other.begin("s", KEYS)
    assert other.hits(again, KEYS) == 4
    assert other.load(again, keys).ok == [True] * 4
    assert other.right(keys) == [True] * 4


def test_chunks_after_computed_chunks_are_found_in_remote(other: TierHarness) -> None:
    request = other.begin("s", KEYS)
    assert other.hits(request, KEYS[4:]) == 8
    assert other.load(request, KEYS[4:]).ok == [True] * 8
    assert all(other.right(KEYS[4:]))


def test_chunks_of_one_step_get_one_answer(
    other: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks of one step get the answer of one lookup: a further lookup that begins at a later
    chunk would tell the gate that vLLM has the chunks before this chunk.
    """
    monkeypatch.setattr(cache_lookups, "POLL_SECONDS", 0.0)
    request = pending(other)
    asked: list[int] = []
    submit = other.store.submit_lookup

    def watched(prompt: Any) -> Any:
        asked.append(prompt.computed)
        return submit(prompt)

    monkeypatch.setattr(other.store, "submit_lookup", watched)
    other.tier.end_step()
    assert other.answers(request, KEYS[2:]) == [LookupAnswer.PENDING] * 10
    assert asked == [2 * TOKENS]
    Held.released.set()


def test_hits_are_leased_until_load_ends(other: TierHarness) -> None:
    request = other.begin("s", KEYS)
    assert other.hits(request, KEYS) == 12
    assert other.leases() == 1
    other.start_load(request, KEYS)
    other.tier.end_step()
    other.tier.end_request(request)
    assert other.tier._jobs.wait(60)
    assert other.leases() == 1
    other.tier.take_finished()
    assert other.leases() == 0


def test_lease_of_unused_hits_ends_with_step(other: TierHarness) -> None:
    request = other.begin("s", KEYS)
    other.hits(request, KEYS)
    other.tier.end_step()
    assert other.leases() == 0
    assert other.hits(request, KEYS[2:]) == 10
    other.tier.end_request(request)
    assert other.leases() == 0


def slow_load_fast_prefill(rig: TierHarness) -> None:
    """Tells the gate that the engine computes a thousand chunks in a microsecond, far faster than
    any load.
    """
    for _ in range(20):
        rig.tier.record_prefill(0, 1000 * TOKENS, 1e-6)


def test_chunks_slower_to_load_than_compute_are_misses(machine: Machine) -> None:
    rig = machine("one")
    rig.save(rig.begin("r", KEYS), KEYS)
    # Wait until the chunks are written to the remote, because the write leases them.
    flush(rig)
    slow_load_fast_prefill(rig)
    request = rig.begin("s", KEYS)
    assert rig.hits(request, KEYS) == 0
    assert rig.leases() == 0
    # The gate's decision holds for the request until the request is preempted.
    rig.tier.end_step()
    for key in KEYS:
        assert rig.tier.lookup(key, request) is LookupAnswer.MISS
    assert stats(rig)["gate"]["none"] == 1
    rig.tier.end_step(["s"])
    assert rig.hits(request, KEYS) == 0
    assert stats(rig)["gate"]["none"] == 2


def test_gate_fetches_no_chunk_that_is_computed_faster(other: TierHarness) -> None:
    slow_load_fast_prefill(other)
    assert other.hits(other.begin("s", KEYS), KEYS) == 0
    assert stats(other)["prefetch"]["not_worthwhile"] == 1


def test_no_remote_is_asked_if_gate_is_never(machine: Machine, other: TierHarness) -> None:
    closed = machine("closed", gate="never")
    window = [key[:-4] + (1).to_bytes(4, "big") for key in KEYS]
    closed.save(closed.begin("r", KEYS, window), [*KEYS[:2], *window[:2]])
    request = closed.begin("s", KEYS, window)
    assert closed.hits(request, KEYS) == closed.hits(request, window) == 0
    assert stats(closed)["prefetch"]["started"] == 0
    assert closed.leases() == 0


def test_outcome_of_whole_load_is_recorded(other: TierHarness) -> None:
    # The gate learns that the engine computes one chunk per second.
    other.tier.record_prefill(0, TOKENS, 1.0)
    request = other.begin("s", KEYS)
    assert other.hits(request, KEYS[3:]) == 9
    assert other.load(request, KEYS[3:]).ok == [True] * 9
    assert stats(other)["gate"]["judged"] == 1
    again = other.begin("t", KEYS)
    assert other.hits(again, KEYS) == 12
    assert other.load(again, KEYS[:5]).ok == [True] * 5
    assert stats(other)["gate"]["judged"] == 1, (
        "a partial load must not count as an outcome of the gate"
    )
    assert other.leases() == 0


def test_opted_out_request_is_not_prefetched(other: TierHarness) -> None:
    assert other.hits(other.begin("s", KEYS, **{"ritornello.no_load": True}), KEYS) == 0
    assert stats(other)["prefetch"]["started"] == 0


def pending(rig: TierHarness, name: str = "s") -> Any:
    """Returns a request whose lookup waits for the remote. The remote does not answer until
    `Held.released` is set.
    """
    Held.released.clear()
    Held.asked = 0
    request = rig.begin(name, KEYS)
    assert rig.tier.lookup(KEYS[0], request) is LookupAnswer.PENDING
    deadline = time.monotonic() + 60
    while not Held.asked:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert rig.tier.lookup(KEYS[1], request) is LookupAnswer.PENDING
    return request


def ended_prefetches(rig: TierHarness, outcome: str) -> int:
    deadline = time.monotonic() + 60
    while (found := stats(rig)["prefetch"])["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return int(found[outcome])


def test_aborted_request_cancels_its_prefetch(other: TierHarness) -> None:
    request = pending(other)
    other.tier.end_step()
    other.tier.end_request(request)
    other.settle()
    Held.released.set()
    assert ended_prefetches(other, "cancelled") == 1
    assert other.leases() == 0


def test_request_that_ends_before_its_answer_is_used_leaks_no_lease(
    other: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other.hits(other.begin("s", KEYS), KEYS) == 12
    other.tier.end_step()
    monkeypatch.setattr(cache_lookups, "ANSWER_SECONDS", 0.0)
    blocked = threading.Event()
    other.store._calls.submit(lambda: blocked.wait(60))
    request = other.begin("t", KEYS)
    assert other.tier.lookup(KEYS[0], request) is LookupAnswer.PENDING
    other.tier.end_step()
    other.tier.end_request(request)
    blocked.set()
    assert other.leases() == 0


def test_preempted_request_is_looked_up_again(other: TierHarness) -> None:
    request = pending(other)
    other.tier.end_step(["s"])
    other.settle()
    Held.released.set()
    assert ended_prefetches(other, "cancelled") == 1
    assert other.hits(request, KEYS) == 12


def test_reset_cancels_pending_lookups(other: TierHarness) -> None:
    request = pending(other)
    other.tier.reset()
    other.settle()
    Held.released.set()
    assert other.hits(request, KEYS) == 0
    other.tier.end_request(request)
    assert ended_prefetches(other, "cancelled") == 1
    assert other.hits(other.begin("t", KEYS), KEYS) == 0, "no chunk may be found in a new epoch"
    assert other.leases() == 0


def test_chunks_fetched_during_change_of_weights_are_misses(other: TierHarness) -> None:
    guard, counters = WeightGuard(), ChangeCounters.private(2)
    guard.set_counters(counters)
    other.tier._guard = guard
    request = pending(other)
    counters.add(0)
    Held.released.set()
    assert other.hits(request, KEYS) == 0
    other.tier.end_step()
    other.tier.on_caches_reset()
    assert other.hits(request, KEYS) == 0, "chunks of the earlier weights must be misses"
    other.tier.end_request(request)
    assert other.leases() == 0


def test_chunks_on_disk_are_served_while_remote_is_down(machine: Machine) -> None:
    Held.down = True
    rig = machine("one")
    assert rig.save(rig.begin("r", KEYS), KEYS[:6]).ok == [True] * 6
    request = rig.begin("s", KEYS)
    assert rig.hits(request, KEYS) == 6
    assert rig.load(request, KEYS[:6]).ok == [True] * 6


def test_other_machine_finds_window_in_remote(machine: Machine) -> None:
    window = [key[:-4] + (1).to_bytes(4, "big") for key in KEYS]
    first = machine("one")
    request = first.begin("r", KEYS, window)
    both = [*KEYS[:10], *window[8:10]]
    assert first.save(request, both).ok == [True] * 12
    flush(first)
    rig = machine("two")
    again = rig.begin("s", KEYS, window)
    assert rig.hits(again, KEYS) == 10
    assert rig.hits(again, window[9:7:-1]) == 2
    assert stats(rig)["prefetch"]["pages"] == 12
    assert rig.hits(again, [*KEYS[:10], window[9], window[8], window[7]]) == 12
    assert rig.load(again, both).ok == [True] * 12
    assert all(rig.right(both))
    assert rig.leases() == 0


def scan(rig: TierHarness, request: Any, keys: list[bytes], window: int) -> int:
    """Returns the number of keys up to the end of the last series of `window` consecutive hits; 0
    without such a series. Looks up the keys backwards, as vLLM does, and continues past keys whose
    answer is pending. Repeats the lookups in further steps while answers are pending.
    """
    deadline = time.monotonic() + 60
    while True:
        is_pending, hits = False, 0
        for place in range(len(keys) - 1, -1, -1):
            answer = rig.tier.lookup(keys[place], request)
            is_pending |= answer is LookupAnswer.PENDING
            hits = hits + 1 if answer is LookupAnswer.HIT else 0
            if hits == window:
                break
        if not is_pending:
            return place + window if hits == window else 0
        assert time.monotonic() < deadline
        rig.tier.end_step()
        time.sleep(0.001)


# A state: the last chunk of a prefix is enough to continue after it.
STATE = Group(1, TOKENS, chained=False, window_chunks=1)
STATES = [key[:-4] + (1).to_bytes(4, "big") for key in KEYS]


@pytest.fixture
def saved_states(machine: Machine) -> TierHarness:
    """A machine with ten chunks of a prompt, and the states after four and after eight chunks."""
    rig = machine("one", spaces=namespace(groups=(FULL, STATE)))
    request = rig.begin("r", KEYS, STATES)
    assert rig.save(request, [*KEYS[:10], STATES[3], STATES[7]]).ok == [True] * 12
    flush(rig)
    return rig


def find_and_load_states(rig: TierHarness) -> None:
    request = rig.begin("s", KEYS, STATES)
    assert rig.hits(request, KEYS) == 10
    assert scan(rig, request, STATES[:10], 1) == 8
    # In a later step vLLM looks up the chunks that it loads.
    rig.tier.end_step()
    loaded = [*KEYS[:8], STATES[7]]
    assert rig.hits(request, loaded) == 9
    assert rig.load(request, loaded).ok == [True] * 9
    assert rig.right(loaded) == [True] * 9
    rig.tier.end_request(request)
    assert rig.leases() == 0


def test_last_state_in_found_prefix_is_loaded(saved_states: TierHarness) -> None:
    find_and_load_states(saved_states)
    assert stats(saved_states)["prefetch"]["pages"] == 0


def test_other_machine_finds_state_in_remote(machine: Machine, saved_states: TierHarness) -> None:
    other = machine("other", spaces=namespace(groups=(FULL, STATE)))
    find_and_load_states(other)
    # The other machine fetched ten chunks of the prompt, and the later of the two states.
    assert stats(other)["prefetch"]["pages"] == 11


@pytest.mark.parametrize("window", [1, 3])
def test_only_last_window_is_fetched(machine: Machine, window: int) -> None:
    group = Group(1, TOKENS, chained=False, window_chunks=window)
    first, other = (machine(name, spaces=namespace(groups=(FULL, group))) for name in "ab")
    saving = first.begin("r", KEYS, STATES)
    assert first.save(saving, [*KEYS, *STATES]).ok == [True] * 24
    flush(first)
    request = other.begin("s", KEYS, STATES)
    assert other.hits(request, KEYS) == 12
    assert scan(other, request, STATES, window) == 12
    assert ended_prefetches(other, "completed") == 2
    assert stats(other)["prefetch"]["pages"] == 12 + window


def test_windows_after_time_limit_are_found_on_this_machine_only(
    machine: Machine, saved_states: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_lookups, "WINDOWS_SECONDS", 0.0)
    find_and_load_states(saved_states)
    other = machine("other", spaces=namespace(groups=(FULL, STATE)))
    request = other.begin("s", KEYS, STATES)
    assert other.hits(request, KEYS) == 10
    assert scan(other, request, STATES[:10], 1) == 0
    assert ended_prefetches(other, "completed") == 1
    # The two fetches are of the prefix, and of the window at its end.
    assert stats(other)["prefetch"]["started"] == 2
    assert stats(other)["prefetch"]["pages"] == 10


def test_best_effort_fetches_first_window_only(machine: Machine) -> None:
    spaces = namespace(groups=(FULL, STATE))
    first = machine("first", spaces=spaces)
    assert first.save(first.begin("r", KEYS, STATES), [*KEYS, *STATES]).ok == [True] * 24
    flush(first)
    other = machine("other", spaces=spaces, prefetch="best_effort")
    assert other.hits(other.begin("s", KEYS, STATES), KEYS) == 0
    assert ended_prefetches(other, "completed") == 1
    request = other.begin("t", KEYS, STATES)
    assert other.hits(request, KEYS) == 12
    assert scan(other, request, STATES, 1) == 0
    assert ended_prefetches(other, "completed") == 2
    assert stats(other)["prefetch"]["pages"] == 13
    again = other.begin("u", KEYS, STATES)
    assert other.hits(again, KEYS) == 12
    assert scan(other, again, STATES, 1) == 12


# `saved`: the stored chunks of the group with a window. `rounds`: the chunks that each round begins
# to look up on the remote. `end`: the end of the window that the search finds, 0 if it finds none.
# `last`: the chunks that a repetition of the search looks up on the remote.
@pytest.mark.parametrize(
    ("window", "saved", "rounds", "end", "last"),
    [
        (1, STATES[:1], (STATES[11:], STATES[9:11], STATES[5:9], STATES[:5]), 1, STATES[:1]),
        # Only the last chunk of each window that is looked up is stored.
        (2, STATES[1::2], (STATES[10:], STATES[6:10], STATES[:6]), 0, []),
    ],
    ids=["absent", "incomplete"],
)
def test_windows_are_looked_up_in_growing_rounds(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    window: int,
    saved: list[bytes],
    rounds: Sequence[list[bytes]],
    end: int,
    last: list[bytes],
) -> None:
    monkeypatch.setattr(cache_lookups, "POLL_SECONDS", 0.0)
    group = Group(1, TOKENS, chained=False, window_chunks=window)
    first, other = (machine(name, spaces=namespace(groups=(FULL, group))) for name in "ab")
    saving = first.begin("r", KEYS, STATES)
    assert all(first.save(saving, [*KEYS, *saved]).ok)
    flush(first)
    request = other.begin("s", KEYS, STATES)
    assert other.hits(request, KEYS) == 12
    asked: set[bytes] = set()
    submit = other.store.submit_lookup

    def watched(prompt: Any) -> Any:
        if not prompt.is_local:
            asked.update(key for key in prompt.keys if key in STATES)
        return submit(prompt)

    monkeypatch.setattr(other.store, "submit_lookup", watched)
    before: list[bytes] = []
    for windows in rounds:
        Held.released.clear()
        for _ in range(4):
            other.tier.end_step()
            other.settle()
            for key in STATES[::-1]:
                other.tier.lookup(key, request)
        assert asked == {*before, *windows}
        Held.released.set()
        ended_prefetches(other, "completed")
        before = windows
        asked.clear()
    assert scan(other, request, STATES, window) == end
    asked.clear()
    other.tier.end_step()
    assert scan(other, request, STATES, window) == end
    assert asked == {*last}


def test_windows_wait_for_the_length_of_the_prefix(other: TierHarness) -> None:
    window = [key[:-4] + (1).to_bytes(4, "big") for key in KEYS]
    request = pending(other)
    request.over(window)
    assert other.answers(request, window[::-1]) == [LookupAnswer.PENDING] * 12
    assert stats(other)["prefetch"]["started"] == 1
    Held.released.set()


def test_key_that_ends_inside_a_chunk_is_looked_up_alone(machine: Machine) -> None:
    rig = machine("one", gate="always")
    request = rig.begin("r", KEYS[:2])
    request._offload_key_positions[KEYS[2]] = 2 * TOKENS + 8
    assert rig.save(request, KEYS[2:3]).ok == [True]
    again = rig.begin("s", KEYS[:2])
    again._offload_key_positions[KEYS[2]] = 2 * TOKENS + 8
    assert rig.hits(again, KEYS[2:3]) == 1
    assert rig.load(again, KEYS[2:3]).ok == [True]
    assert rig.right(KEYS[2:3]) == [True]
    assert rig.leases() == 0


def test_lost_cache_is_opened_again(other: TierHarness) -> None:
    request = pending(other)
    assert other.store._store is not None
    # Closing a cache waits for calls to its remote: let them return.
    Held.released.set()
    other.store._store.close()
    assert other.hits(request, KEYS) == 0
    other.tier.end_request(request)
    assert other.store.broken
    deadline = time.monotonic() + 60
    while not other.store.open():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = other.begin("t", KEYS)
    assert other.hits(again, KEYS) == 12
    assert other.load(again, KEYS).ok == [True] * 12


def test_stopped_owner_does_not_block_scheduler(tmp_path: Path, machine: Machine) -> None:
    with owner_of(tmp_path / "one", **SMALL) as owner:
        rig = machine("one", tiers=[f"disk {tmp_path}/one"])
        request = rig.begin("r", KEYS)
        rig.save(request, KEYS)
        assert rig.hits(request, KEYS) == 12
        rig.tier.end_step()
        rig.store._store = recorded = RecordedStore(rig.store._store)
        owner.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
        try:
            again = rig.begin("s", KEYS)
            assert rig.answers(again, KEYS) == [LookupAnswer.PENDING] * 12
            rig.tier.touch(KEYS)
            rig.start_load(request, KEYS)
            rig.tier.end_step()
            rig.tier.end_request(request)
            assert rig.tier.take_finished() == []
        finally:
            owner.send_signal(signal.SIGCONT)
        assert "submit_get" in recorded.used <= RecordedStore.AT_ONCE
        done = rig.ended()
        assert rig.right(KEYS) == done.ok
        assert rig.hits(again, KEYS) == 12
        assert rig.load(again, KEYS).ok == [True] * 12


def test_counters_of_tiers_reach_the_meter(
    other: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ritornello.vllm.tier.cache.REPORT_SECONDS", 0.0)
    other.hits(other.begin("s", KEYS), KEYS)
    other.tier.end_step()
    other.settle()
    counts = other.counts.take()
    assert counts["prefetches:completed"] == 1
    assert counts["remote_calls:calls"] > 0
    assert counts["remote_read_bytes"] > 12 * other.row_bytes
    assert "remote_written_bytes" not in counts
    assert counts["lookups"] > 0
