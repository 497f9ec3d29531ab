"""Our secondary tier of vLLM's offloading, without vLLM: lookups, loads and saves, with stores that
cannot be opened, refuse pages, belong to another process, or were closed. A chunk is a page of
vLLM's host tier. The memory of the host tier is an array of rows; each row holds one chunk.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support import SMALL, CoreLog, open_small
from tier_support import (
    MODEL,
    ROW,
    TOKENS,
    RecordedStore,
    Request,
    TierHarness,
    namespace,
    offload_keys,
)

from ritornello.connector.meter import Meter
from ritornello.vllm.tier.call_thread import CallThread
from ritornello.vllm.tier.requests import LookupAnswer
from ritornello.vllm.tier.sequence import Group, KeySequence, consecutive_runs
from ritornello.vllm.tier.settings import TierSettings
from ritornello.vllm.tier.store import TierStore
from ritornello.vllm.weights.counters import ChangeCounters
from ritornello.vllm.weights.guard import WeightGuard
from servers.child import Child, owner_of

KEYS = offload_keys("a", 12)


@pytest.fixture
def rig(where: Path) -> Iterator[TierHarness]:
    made = TierHarness(where)
    yield made
    made.tier.close()


def test_chunks_are_found_by_another_tier(where: Path) -> None:
    first = TierHarness(where)
    stored = first.save(first.begin("r", KEYS), KEYS)
    assert stored.ok == [True] * 12
    first.tier.close()
    second = TierHarness(where)
    request = second.begin("r", KEYS)
    assert second.hits(request, KEYS) == 12
    loaded = second.load(request, KEYS)
    assert (loaded.ok, loaded.reasons) == ([True] * 12, {})
    assert all(second.right(KEYS))
    second.tier.close()


def test_rows_are_moved_without_copy(rig: TierHarness) -> None:
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS)
    rig.load(request, KEYS)
    assert rig.store._store is not None
    assert rig.store._store.stats()["transfer"]["staging_bytes"] == 0


def test_tokens_of_whole_loads_count_as_avoided_prefill(rig: TierHarness) -> None:
    rig.save(rig.begin("r", KEYS), KEYS)
    for _ in range(2):
        rig.tier.record_prefill(0, TOKENS, 1.0)

    def avoided(*names: str) -> list[int]:
        assert rig.store._store is not None
        counters = rig.store._store.stats()["counters"]
        return [counters[f"prefill_{name}"] for name in names]

    request = rig.begin("s", KEYS)
    rig.hits(request, KEYS[4:])
    assert rig.load(request, KEYS[4:]).ok == [True] * 8
    assert avoided("avoided_tokens", "untimed_tokens") == [8 * TOKENS, 0]
    assert avoided("avoided_micros") == [8_000_000]
    (loaded,) = avoided("load_micros")
    assert 0 < loaded < 8_000_000
    # A load that fails in part counts its time only.
    rig.hits(request, KEYS)
    rig.store._store.delete(rig.tier._scopes[0][1], KEYS[6:])
    rig.tier.end_step()
    assert rig.load(request, KEYS).ok == [True] * 6 + [False] * 6
    assert avoided("avoided_tokens", "avoided_micros") == [8 * TOKENS, 8_000_000]
    assert avoided("load_micros")[0] > loaded


def test_tokens_before_a_load_are_position_of_its_first_chunk(rig: TierHarness) -> None:
    windows = offload_keys("a", 12, group=1)
    request = rig.begin("r", KEYS, windows)
    loaded = [windows[11], *KEYS[9:12]]
    assert rig.tier._tokens_of(request, loaded) == (9 * TOKENS, 3 * TOKENS)
    assert rig.tier._tokens_of(request, windows[10:]) == (0, 0)
    assert rig.tier._tokens_of(rig.begin("unknown"), KEYS[9:]) == (0, 3 * TOKENS)


def test_one_lookup_answers_following_keys(rig: TierHarness) -> None:
    rig.save(rig.begin("r", KEYS), KEYS[:9])
    rig.counts.take()
    assert rig.hits(rig.begin("s", KEYS), KEYS) == 9
    assert rig.counts.take()["lookups"] == 1


def test_keys_without_position_are_looked_up_singly(rig: TierHarness) -> None:
    rig.save(rig.begin("r", KEYS), KEYS)
    stranger = rig.begin("s")
    assert rig.hits(stranger, KEYS) == 12
    assert rig.load(stranger, KEYS).ok == [True] * 12
    assert all(rig.right(KEYS))


def test_hits_are_leased_until_load_ends(rig: TierHarness) -> None:
    rig.save(rig.begin("r", KEYS), KEYS)
    request = rig.begin("s", KEYS)
    rig.hits(request, KEYS)
    assert rig.leases() == 1
    rig.start_load(request, KEYS)
    rig.tier.end_step()
    rig.tier.end_request(request)
    assert rig.tier._jobs.wait(60)
    assert rig.leases() == 1
    rig.tier.take_finished()
    assert rig.leases() == 0


def test_leased_chunks_are_loaded_and_deleted_chunks_missed(rig: TierHarness) -> None:
    rig.save(rig.begin("r", KEYS), KEYS)
    request = rig.begin("s", KEYS)
    assert rig.hits(request, KEYS) == 12
    assert rig.store._store is not None
    (_, scope) = rig.tier._scopes[0]
    other = offload_keys("b", 12)
    rig.save(rig.begin("t", other), other)
    assert rig.store._store.stats()["leases"] == 1
    assert rig.load(request, KEYS).ok == [True] * 12
    assert rig.store._store.delete(scope, KEYS) == 12
    assert rig.hits(rig.begin("u", KEYS), KEYS) == 0


def test_lease_of_unused_hits_ends_with_step(rig: TierHarness) -> None:
    rig.save(rig.begin("r", KEYS), KEYS)
    request = rig.begin("s", KEYS)
    rig.hits(request, KEYS)
    rig.tier.end_step()
    assert rig.leases() == 0
    rig.hits(request, KEYS)
    rig.tier.end_request(request)
    assert rig.leases() == 0


def test_missing_chunks_are_not_reported_as_hits_again(rig: TierHarness) -> None:
    rig.save(rig.begin("r", KEYS), KEYS)
    request = rig.begin("s", KEYS)
    assert rig.hits(request, KEYS) == 12
    rig.tier.end_step()
    assert rig.store._store is not None
    rig.store._store.delete(rig.tier._scopes[0][1], KEYS[8:])
    loaded = rig.load(request, KEYS)
    assert loaded.ok == [True] * 8 + [False] * 4
    assert (loaded.reasons, loaded.gone) == ({"not_found": 4}, KEYS[8:])
    assert rig.right(KEYS) == loaded.ok
    assert rig.counts.take()["failed_chunks:not_found"] == 4
    rig.save(request, KEYS)
    assert rig.hits(request, KEYS) == 8
    assert rig.hits(rig.begin("t", KEYS), KEYS) == 12


def test_chunks_of_failed_load_are_not_reported_as_removed(
    rig: TierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.save(rig.begin("r", KEYS), KEYS)
    request = rig.begin("s", KEYS)
    assert rig.hits(request, KEYS) == 12
    store = rig.store._store
    assert store is not None
    expired = partial(store.submit_get, timeout=0.0)
    monkeypatch.setattr(rig.store, "submit_get", expired)
    loaded = rig.load(request, KEYS)
    assert (loaded.reasons, loaded.gone) == ({"deadline": 12}, [])


def test_corrupted_chunk_is_miss(where: Path) -> None:
    rig = TierHarness(where)
    rig.save(rig.begin("r", KEYS), KEYS)
    assert rig.store._store is not None
    rig.store._store.flush()
    rig.tier.close()
    (segment,) = [path for path in where.rglob("*") if path.stat().st_size >= 1 << 20]
    wrong = rig.host[3].tobytes()
    content = segment.read_bytes()
    at = content.index(wrong)
    with segment.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"\0" * 64)
    rig = TierHarness(where)
    request = rig.begin("s", KEYS)
    assert rig.hits(request, KEYS) == 12
    loaded = rig.load(request, KEYS)
    assert loaded.ok[:4] == [True, True, True, False]
    assert loaded.reasons.keys() == {"checksum"}
    assert loaded.gone[0] == KEYS[3]
    assert rig.right(KEYS)[:3] == [True] * 3
    rig.tier.close()


def test_longer_sequence_extends_stored_one(rig: TierHarness) -> None:
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS[:5])
    rig.save(request, KEYS[5:])
    assert rig.store._store is not None
    # In a chained scope a page is useful only after the pages before it, so the deletion of the
    # fifth page deletes the pages after it as well.
    rig.store._store.delete(rig.tier._scopes[0][1], KEYS[4:5])
    assert rig.hits(rig.begin("s", KEYS), KEYS) == 4
    assert rig.store._store.exists(rig.tier._scopes[0][1], KEYS).count(True) == 4


def test_job_with_gap_stores_and_loads_all_its_chunks(rig: TierHarness) -> None:
    request = rig.begin("r", KEYS)
    some = [*KEYS[:3], *KEYS[6:9]]
    assert rig.save(request, some).ok == [True] * 6
    assert rig.hits(request, KEYS) == 3
    assert rig.load(request, some).ok == [True] * 6
    assert all(rig.right(some))


def test_groups_have_own_scopes(rig: TierHarness) -> None:
    window = [key[:-4] + (1).to_bytes(4, "big") for key in KEYS]
    request = rig.begin("r", KEYS, window)
    both = [*KEYS[:2], *window[8:10]]
    assert rig.save(request, both).ok == [True] * 4
    assert [rig.tier.lookup(key, request) for key in window] == [
        LookupAnswer.HIT if place in (8, 9) else LookupAnswer.MISS for place in range(12)
    ]
    assert rig.load(request, both).ok == [True] * 4
    assert all(rig.right(both))
    stranger = [key[:-4] + (7).to_bytes(4, "big") for key in KEYS[:1]]
    assert rig.save(request, stranger).reasons == {"group": 1}
    assert rig.tier.lookup(stranger[0], request) is LookupAnswer.MISS


def test_request_retains_if_permitted(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    for permitted in (False, True):
        path = where / str(permitted)
        path.mkdir(parents=True)
        if permitted:
            (path / "policy.toml").write_text("allow_request_retention = true\n")
        rig = TierHarness(path)
        for name in ("u", "v"):
            rig.save(rig.begin(name, KEYS, **{"ritornello.retain": 3600}), KEYS)
        assert rig.store._store is not None
        assert (rig.store._store.stats()["retained_bytes"] > 0) is permitted
        assert ("ignored_retentions" in rig.counts.take()) is not permitted
        said = [line for line in caplog.messages if "allow_request_retention = true" in line]
        assert len(said) == 1
        rig.tier.close()


def test_request_may_opt_out(rig: TierHarness) -> None:
    silent = rig.begin("r", KEYS, **{"ritornello.no_store": True})
    assert rig.save(silent, KEYS).reasons == {"no_store": 12}
    assert rig.hits(silent, KEYS) == 0
    rig.save(rig.begin("s", KEYS), KEYS)
    assert rig.hits(rig.begin("t", KEYS, **{"ritornello.no_load": True}), KEYS) == 0


def test_read_only_tier_stores_nothing(where: Path) -> None:
    rig = TierHarness(where, read_only=True)
    assert rig.save(rig.begin("r", KEYS), KEYS).reasons == {"read_only": 12}
    assert rig.hits(rig.begin("s", KEYS), KEYS) == 0
    rig.tier.close()


def test_other_weights_make_other_namespace(where: Path) -> None:
    rig = TierHarness(where)
    rig.save(rig.begin("r", KEYS), KEYS)
    rig.tier.close()
    changes: list[dict[str, Any]] = [
        {"weights": b"v"},
        {"options": (("ranks", "tp 2"),)},
        {"epoch": b"e" * 16},
    ]
    for changed in changes:
        rig = TierHarness(where, namespace(model=replace(MODEL, **changed)))
        assert rig.hits(rig.begin("s", KEYS), KEYS) == 0
        rig.tier.close()


def test_reset_hides_and_drops_earlier_chunks(rig: TierHarness) -> None:
    running = rig.begin("r", KEYS)
    rig.save(running, KEYS)
    rig.tier.reset()
    fresh = rig.begin("s", KEYS)
    assert rig.hits(fresh, KEYS) == 0
    # No chunk is stored until the running request ends: it may have computed with earlier weights,
    # and other requests may share its blocks.
    assert rig.save(running, KEYS).reasons == {"before_reset": 12}
    assert rig.save(fresh, KEYS).reasons == {"before_reset": 12}
    rig.tier.end_request(running)
    assert rig.save(fresh, KEYS).ok == [True] * 12
    assert rig.hits(rig.begin("t", KEYS), KEYS) == 12


def test_changed_weights_stop_hits_and_stores(rig: TierHarness) -> None:
    guard, counters = WeightGuard(), ChangeCounters.private(2)
    guard.set_counters(counters)
    rig.tier._guard = guard
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS)
    assert rig.hits(request, KEYS) == 12
    counters.add(0)
    assert rig.load(request, KEYS).reasons == {"weights_changed": 12}
    assert rig.hits(rig.begin("s", KEYS), KEYS) == 0
    assert rig.save(request, KEYS).reasons == {"weights_changed": 12}
    assert rig.leases() == 0


@pytest.mark.parametrize("reset", [False, True])
def test_loads_in_flight_fail_if_weights_change(rig: TierHarness, reset: bool) -> None:
    guard, counters = WeightGuard(), ChangeCounters.private(2)
    guard.set_counters(counters)
    rig.tier._guard = guard
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS)
    assert rig.hits(request, KEYS) == 12
    rig.start_load(request, KEYS)
    rig.tier.end_step()
    counters.add(0)
    if reset:
        rig.tier.on_caches_reset()
    rig.counts.take()
    done = rig.ended()
    assert (done.ok, done.reasons) == ([False] * 12, {"weights_changed": 12})
    assert rig.counts.take()["failed_chunks:weights_changed"] == 12
    assert rig.hits(request, KEYS) == 0
    assert rig.leases() == 0


def test_weights_count_as_changed_until_host_tier_is_emptied(rig: TierHarness) -> None:
    guard, counters = WeightGuard(), ChangeCounters.private(2)
    guard.set_counters(counters)
    rig.tier._guard = guard
    guard.begin_epoch = rig.tier.on_caches_reset
    rig.save(rig.begin("r", KEYS), KEYS)
    guard.on_reset("connector", True)
    assert rig.hits(rig.begin("s", KEYS), KEYS) == 12, (
        "no epoch may begin while the weights are unchanged"
    )
    rig.tier.end_step()
    counters.add(0)
    # After a reset that empties vLLM's prefix cache and not the cache of the connector (its host
    # tier), or that finds requests running, the weights still count as changed.
    guard.on_reset("connector", False)
    rig.tier.reset()
    assert guard.changed()
    for name in "rs":
        rig.tier.end_request(Request(name))
    guard.on_reset("connector", True)
    assert not guard.changed()
    request = rig.begin("t", KEYS)
    assert rig.hits(request, KEYS) == 0
    assert rig.save(request, KEYS).ok == [True] * 12


def test_jobs_of_finished_request_complete(rig: TierHarness) -> None:
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS)
    rig.hits(request, KEYS)
    rig.start_load(request, KEYS)
    rig.tier.end_request(request)
    rig.tier.end_step()
    assert rig.ended().ok == [True] * 12
    assert (len(rig.tier._jobs), rig.tier._requests, rig.leases()) == (0, {}, 0)


def test_quota_of_zero_refuses_job_without_error(where: Path) -> None:
    open_small(where).close()
    rig = TierHarness(where, capacity=None)
    request = rig.begin("r")
    assert rig.store._store is not None
    scope = rig.tier._scopes[0][1]
    rig.store._store.configure(scope, quota=0)
    stored = rig.save(request, KEYS)
    assert (stored.ok, set(stored.reasons)) == ([False] * 12, {"quota"})
    rig.store._store.configure(scope)
    assert rig.save(request, KEYS).ok == [True] * 12
    rig.tier.close()


def test_unopenable_store_costs_hits_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    rig = TierHarness(tmp_path / "file" / "store")
    request = rig.begin("r", KEYS)
    assert rig.save(request, KEYS).reasons == {"error": 12}
    assert rig.hits(request, KEYS) == 0
    assert rig.load(request, KEYS).ok == [False] * 12
    assert rig.counts.take()["errors:open"] == 1
    rig.tier.close()


def test_closed_store_costs_hits_only(rig: TierHarness) -> None:
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS)
    assert rig.store._store is not None
    rig.store._store.close()
    assert rig.hits(request, KEYS) == 0
    assert not any(rig.load(request, KEYS).ok)
    assert rig.store.broken


@pytest.fixture
def owner(where: Path) -> Iterator[Child]:
    """A process that owns the store. The test's process is a client of it."""
    with owner_of(where, **SMALL) as child:
        yield child


def client(where: Path) -> TierHarness:
    rig = TierHarness(where, capacity=None)
    assert not rig.store.answers_at_once()
    return rig


def test_client_lookups_are_pending_until_batch_lookup(where: Path, owner: Child) -> None:
    rig = client(where)
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS[:9])
    assert {rig.tier.lookup(key, request) for key in KEYS} == {LookupAnswer.PENDING}
    found = rig.tier.batch_lookup(KEYS, request)
    assert found == [True] * 9 + [False] * 3
    assert [
        rig.tier.confirm_lookup(key, request, ok) for key, ok in zip(KEYS, found, strict=True)
    ] == [LookupAnswer.HIT if ok else LookupAnswer.MISS for ok in found]
    assert rig.load(request, KEYS[:9]).ok == [True] * 9
    assert all(rig.right(KEYS[:9]))
    rig.tier.close()


def test_stopped_owner_does_not_block_scheduler(where: Path, owner: Child) -> None:
    rig = client(where)
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS)
    assert all(rig.tier.batch_lookup(KEYS, request))
    rig.store._store = recorded = RecordedStore(rig.store._store)
    owner.send_signal(signal.SIGSTOP)
    try:
        assert rig.tier.lookup(KEYS[0], request) is LookupAnswer.PENDING
        rig.tier.confirm_lookup(KEYS[0], request, found=True)
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
    rig.tier.close()


def test_killed_owner_costs_no_hits(where: Path, owner: Child) -> None:
    rig = client(where)
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS)
    assert rig.store._store is not None
    rig.store._store.flush()
    owner.kill()
    owner.wait(60)
    later = rig.begin("s", KEYS)
    assert rig.tier.batch_lookup(KEYS, later) == [True] * 12
    rig.tier.end_step()
    assert rig.store.answers_at_once()
    assert rig.hits(later, KEYS) == 12
    assert rig.load(later, KEYS).ok == [True] * 12
    assert all(rig.right(KEYS))
    rig.tier.close()


def test_closed_tier_allows_unmapping_host_tier(where: Path) -> None:
    rig = TierHarness(where)
    request = rig.begin("r", KEYS)
    rig.save(request, KEYS)
    rig.load(request, KEYS)
    rig.tier.close()
    del rig.host
    rig.memory.close()


def test_key_sequence_orders_keys_by_position() -> None:
    group = Group(0, TOKENS, chained=True)
    request = Request("r").over(KEYS[:4])
    order = KeySequence(group)
    assert order.following(request, KEYS[1]) == KEYS[1:4]
    assert order.before(request, KEYS[2]) == KEYS[:2]
    assert order.before(request, KEYS[0]) == []
    assert order.leading(request) == KEYS[:4]
    assert order.following(request, KEYS[5]) == [KEYS[5]]
    request.over(KEYS[:6])
    assert order.following(request, KEYS[3]) == KEYS[3:6]
    several = Request("g").over(KEYS[:4], offload_keys("b", 4, group=1))
    assert KeySequence(group).following(several, KEYS[1]) == KEYS[1:4]
    backwards = Request("b")
    backwards._offload_key_positions = dict(reversed(several._offload_key_positions.items()))
    assert KeySequence(group).leading(backwards) == KEYS[:4]
    other = Request("o").over(offload_keys("b", 4, group=1))
    assert KeySequence(group).leading(other) == []
    # The two keys end where consecutive chunks end, but the second key is another group's.
    mixed = Request("m").over(KEYS[:1])
    mixed._offload_key_positions |= {offload_keys("b", 2, group=1)[1]: 2 * TOKENS}
    assert KeySequence(group).leading(mixed) == KEYS[:1]
    stranger = Request("s").over(KEYS[:1])
    stranger._offload_key_positions |= {KEYS[3]: 4 * TOKENS, KEYS[4]: 5 * TOKENS}
    gapped = KeySequence(group)
    assert gapped.leading(stranger) == KEYS[:1]
    assert gapped.before(stranger, KEYS[4]) == [KEYS[3]]
    assert gapped.before(stranger, KEYS[3]) == []
    windows = KeySequence(replace(group, chained=False, window_chunks=3))
    assert windows.window(stranger, KEYS[4]) == KEYS[3:5]
    assert windows.window(request, KEYS[4]) == KEYS[2:5]
    # A key whose tokens end inside a chunk has no following keys.
    request._offload_key_positions[KEYS[7]] = 6 * TOKENS + 8
    assert order.following(request, KEYS[7]) == [KEYS[7]]
    some = [KEYS[0], KEYS[1], KEYS[4], KEYS[9], KEYS[5]]
    assert list(consecutive_runs(request, group, some)) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 5),
    ]
    assert list(consecutive_runs(request, Group(0, TOKENS, chained=False), some)) == [slice(0, 5)]
    assert list(consecutive_runs(request, group, [])) == []


def test_settings_error_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="locality"):
        TierSettings.parse({"path": "/x", "locality": "near"})
    with pytest.raises(ValueError, match="enable_kv_events"):
        TierSettings.parse({"path": "/x", "enable_kv_events": "yes"})
    with pytest.raises(ValueError, match="unknown key 'pth'"):
        TierSettings.parse({"pth": "/x"})
    with pytest.raises(ValueError, match='"gate" is permitted only beside "tiers"'):
        TierSettings.parse({"path": "/x", "gate": "auto"})
    parsed = TierSettings.parse({"path": "/x", "locality": "LOCAL", "codec": "split"})
    assert (parsed.store.codec, parsed.locality) == ("split", "LOCAL")


def test_path_may_be_a_list(tmp_path: Path) -> None:
    listed = [str(tmp_path / name) for name in "abc"]
    parsed = TierSettings.parse({"path": listed})
    assert parsed.store.directories == tuple(listed)
    with pytest.raises(ValueError, match='"path" is a directory, or a list of directories'):
        TierSettings.parse({"path": []})
    open_small(tmp_path / "a").close()
    store = TierStore(parsed.store, Meter())
    stats = store.call("stats", lambda opened: opened.stats(), None)
    assert stats is not None and len(stats["paths"]) == 3
    store.close()


def test_log_names_row_larger_than_half_the_store(where: Path, core_log: CoreLog) -> None:
    open_small(where).close()
    row = 40 << 20
    rig = TierHarness(where, row_bytes=row, rows=1, capacity="64MiB")
    request = rig.begin("r", KEYS)
    stored = rig.save(request, KEYS[:1])
    assert (stored.ok, stored.reasons) == ([False], {"invalid": 1})
    (line,) = core_log.take("too large")
    assert "a page is too large for this store: raise the capacity" in line
    assert f"page_bytes={row}" in line
    assert rig.hits(request, KEYS) == 0
    assert rig.counts.take()["skipped_chunks:invalid"] == 1
    rig.tier.close()


def test_row_of_these_tests_is_at_least_a_memory_page() -> None:
    assert ROW % 4096 == 0
    assert os.sysconf("SC_PAGE_SIZE") <= ROW


def test_call_without_thread_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the thread for calls cannot start, the call is dropped, because an error would reach the
    method that takes finished jobs, and their results would be lost.
    """

    def fail(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = CallThread("calls")
    with monkeypatch.context() as limited:
        limited.setattr(Thread, "start", fail)
        assert calls.submit(lambda: 1) is None
    call = calls.submit(lambda: 2)
    assert call is not None and call.wait(60) and call.value == 2
    calls.stop()
