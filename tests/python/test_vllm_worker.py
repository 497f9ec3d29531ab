"""The worker's side of vLLM's connector and its store, with tickets whose outcomes the tests
choose.
"""

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm_shapes import FIRST, Tensor, cache_group, identity
from worker_support import KEYS, FakeStore, held_object, loading, outcome, ready, saving

from ritornello.errors import RetryError
from ritornello.vllm.cache_groups import ObjectId, Reach
from ritornello.vllm.metadata import Load, PageBlocks, StepMetadata, WorkerReport
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.settings import Settings
from ritornello.vllm.shard import HeldObjects, PageObject
from ritornello.vllm.store import VllmStore
from ritornello.vllm.worker import REGISTER_SECONDS, WorkerSide


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def meter() -> StepMeter:
    return StepMeter()


@pytest.fixture
def side(store: FakeStore, meter: StepMeter) -> WorkerSide:
    return ready(store, meter)


def test_complete_load_reports_its_time_only(
    side: WorkerSide, store: FakeStore, meter: StepMeter
) -> None:
    store.outcomes = [outcome(True, True, True), outcome(True)]
    side.load(loading("a"))
    side.save(loading("a"))
    assert side.results.take_failed_blocks() == set()
    report = side.results.take_report()
    assert report is not None
    assert report == WorkerReport(load_seconds=report.load_seconds)
    assert list(report.load_seconds) == ["a"]
    assert store.puts == [(FIRST, KEYS[:1], (13,), KEYS[2])]
    counts = meter.take()
    assert counts is not None
    assert counts["loaded_pages"] == 3


def test_only_failed_pages_are_reported(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = [outcome(True, False, True, reason="checksum")]
    side.load(loading("a"))
    assert side.results.take_failed_blocks() == {11}
    assert side.results.take_failed_blocks() == set()


def test_failed_load_cancels_saves_of_step(
    side: WorkerSide, store: FakeStore, meter: StepMeter
) -> None:
    store.outcomes = [outcome(True, True, True), outcome(False, False, False, reason="io")]
    metadata = loading("a", "b")
    side.load(metadata)
    side.save(metadata)
    assert store.puts == []
    report = side.results.take_report()
    assert report is not None
    assert report.unsaved == [("b", 0, 4), ("a", 0, 7), ("b", 0, 7)]
    counts = meter.take()
    assert counts is not None
    assert counts["skipped_pages:load_failed"] == 2
    assert counts["missed_pages:io"] == 3
    # The saves of the next step are not cancelled.
    store.outcomes = [outcome(True)]
    side.load(StepMetadata())
    side.save(StepMetadata(None, (), metadata.saves[:1]))
    assert len(store.puts) == 1


def test_failed_load_cancels_no_save_of_earlier_steps(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = [outcome(False, False, False, reason="io"), outcome(True)]
    metadata = replace(loading("a"), step=2, finished_sending=("b",))
    side.load(metadata)
    side.save(metadata)
    assert len(store.puts) == 1
    assert side.results.take_finished_sending() == {"b"}
    report = side.results.take_report()
    assert report is not None
    assert report.step == 2
    assert report.unsaved == [("a", 0, 4)]


def test_worker_reports_its_memory_layout_on_request(side: WorkerSide) -> None:
    side.save(StepMetadata())
    assert side.results.take_report() is None
    side.save(StepMetadata(request_facts=True))
    report = side.results.take_report()
    assert report is not None
    assert report.facts == {(0, 0): side.facts()}


def test_late_load_is_cancelled_and_awaited(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = ["late"]
    side.load(loading("a"))
    assert store.cancelled == 1
    assert side.results.take_failed_blocks() == {11, 12}


def test_close_ends_interrupted_loads(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = [outcome(True, True, True), "interrupted", "late"]
    with pytest.raises(KeyboardInterrupt):
        side.load(loading("a", "b", "c"))
    side.close()
    assert store.events == ["wait", "cancel", "cancel", "close"]


class FatalError(Exception):
    kind = "fatal"


class UnfinishedTicket:
    """Stand-in for a ticket that is done only after it was cancelled."""

    cancelled = False

    def wait(self, timeout: float | None = None) -> Any:
        return outcome(True, False, False, reason="cancelled") if self.cancelled else None

    def cancel(self) -> None:
        self.cancelled = True


class FailingTicket:
    """Stand-in for a ticket whose wait fails."""

    def wait(self, timeout: float | None = None) -> Any:
        raise OSError("poll")

    def cancel(self) -> None:
        pass


def fail(*_: object, **__: object) -> Any:
    raise FatalError("the device was removed")


@pytest.fixture
def broken_core(monkeypatch: pytest.MonkeyPatch, meter: StepMeter) -> Iterator[VllmStore]:
    core = SimpleNamespace(release=fail, close=fail)
    monkeypatch.setattr("ritornello.connector.fail_safe.open_store", lambda *_: core)
    store = VllmStore(Settings("/kv", read_only=False), meter)
    yield store
    store.close()


@pytest.mark.parametrize("closed", [False, True])
def test_tickets_complete_when_store_is_broken(broken_core: VllmStore, closed: bool) -> None:
    if closed:
        broken_core.close()
    else:
        broken_core.release(1)
    assert broken_core.broken
    assert not broken_core.open()
    ticket = UnfinishedTicket()
    assert broken_core.wait(cast(Any, ticket), 0.0) is None
    assert not ticket.cancelled
    landed = broken_core.cancel_and_wait(cast(Any, ticket))
    assert landed is not None
    assert landed.ok == [True, False, False]
    assert broken_core.wait(cast(Any, ticket), 0.0) is not None


def test_loads_end_if_store_breaks_in_their_step(broken_core: VllmStore, meter: StepMeter) -> None:
    tickets = [UnfinishedTicket(), UnfinishedTicket()]
    waiting = iter(tickets)
    side = ready(broken_core, meter)
    assert broken_core.open()
    cast(Any, broken_core._store).submit_get = lambda *_, **__: next(waiting, None) or fail()
    side.load(loading("a", "b", "c"))
    assert broken_core.broken
    assert [ticket.cancelled for ticket in tickets] == [True, True]
    assert side.results.take_failed_blocks() == {10, 11, 12}


def test_failing_ticket_is_logged_once_per_operation(
    broken_core: VllmStore, meter: StepMeter, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert broken_core.wait(cast(Any, FailingTicket()), 0.0) is None
        assert broken_core.cancel_and_wait(cast(Any, FailingTicket())) is None
    counts = meter.take()
    assert counts is not None
    assert counts["errors"] == 6
    assert len(caplog.records) == 2


def test_refused_loads_fail(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = [None]
    side.load(loading("a"))
    assert side.results.take_failed_blocks() == {10, 11, 12}


@pytest.mark.parametrize("reason", ["staging_full", "superseded", "busy"])
def test_refused_pages_are_offered_again_unless_store_is_full(
    side: WorkerSide, store: FakeStore, reason: str
) -> None:
    saves = [*saving("a", *KEYS).saves, *saving("b", *KEYS).saves]
    store.outcomes = [
        outcome(True, False, False, reason=reason),
        outcome(False, False, False, reason="no_space"),
    ]
    side.save(StepMetadata(None, (), saves))
    side.save(StepMetadata())
    report = side.results.take_report()
    assert report is not None
    assert report.unsaved == [("a", 0, 1)]


def test_save_counts_only_pages_with_all_objects(store: FakeStore, meter: StepMeter) -> None:
    side = ready(store, meter, held_object(ObjectId(0, 0, 0)), held_object(ObjectId(0, 0, 1)))
    store.outcomes = [
        outcome(True, True, True),
        outcome(True, False, False, reason="staging_full"),
    ]
    side.save(saving("a", *KEYS))
    side.save(StepMetadata())
    report = side.results.take_report()
    assert report is not None
    assert report.unsaved == [("a", 0, 1)]
    counts = meter.take()
    assert counts is not None
    assert counts["saved_pages"] == 1
    assert counts["skipped_pages:staging_full"] == 2


@pytest.mark.parametrize("ok", [True, False])
def test_save_refused_for_one_object_counts_no_page(
    store: FakeStore, meter: StepMeter, ok: bool
) -> None:
    side = ready(store, meter, held_object(ObjectId(0, 0, 0)), held_object(ObjectId(0, 0, 1)))
    store.outcomes = [outcome(True, True, ok, reason="" if ok else "error"), None]
    side.save(saving("a", *KEYS))
    side.save(StepMetadata())
    counts = meter.take()
    assert counts is not None
    assert "saved_pages" not in counts
    assert counts["skipped_pages:error"] == len(KEYS)


def test_save_refused_while_the_store_is_busy_is_offered_again(
    store: FakeStore, meter: StepMeter
) -> None:
    side = ready(store, meter, held_object(ObjectId(0, 0, 0)), held_object(ObjectId(0, 0, 1)))
    store.outcomes = [outcome(True, True, True), "busy"]
    side.save(saving("a", *KEYS))
    side.save(StepMetadata())
    report = side.results.take_report()
    assert report is not None
    assert report.unsaved == [("a", 0, 0)]
    counts = meter.take()
    assert counts is not None
    assert counts["skipped_pages:busy"] == len(KEYS)
    assert "saved_pages" not in counts


def test_shared_heads_are_stored_by_one_worker(store: FakeStore, meter: StepMeter) -> None:
    mine, theirs = ObjectId(0, 0, 0), ObjectId(0, 0, 1)
    side = ready(store, meter, held_object(mine), held_object(theirs, is_writer=False))
    store.outcomes = [outcome(True)]
    side.save(saving("a", KEYS[0]))
    assert [put[0] for put in store.puts] == [mine]


def test_worker_that_writes_no_object_counts_no_page(store: FakeStore, meter: StepMeter) -> None:
    side = ready(store, meter, held_object(ObjectId(0, 0, 1), is_writer=False))
    side.save(saving("a", *KEYS))
    side.save(StepMetadata())
    assert not store.puts
    assert "saved_pages" not in (meter.take() or {})


def test_mismatched_memory_is_refused(
    store: FakeStore, meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy

    from ritornello.vllm.handshake import GroupMemory

    side = WorkerSide(cast(VllmStore, store), 8, [(["l.0", "l.1"], 2)], meter)
    memory = numpy.zeros((2, 8, 2, 64, 8), numpy.uint8)
    side.register({f"l.{i}": Tensor(memory[i]) for i in range(2)})
    assert side.facts().groups == (GroupMemory(("l.0", "l.1"), 1024, 2, True),)
    side.load(StepMetadata(identity(cache_group(head_bytes=100)), loading("a").loads))
    assert side.results.take_failed_blocks() == {10, 11, 12}
    report = side.results.take_report()
    assert report is not None
    assert "2048 bytes in memory, 400 by the model" in report.unsupported_reason
    side.load(StepMetadata(identity(cache_group(head_bytes=512))))
    assert side.results.take_report() is None


def test_memory_that_cannot_be_registered_yet_is_registered_later(
    store: FakeStore, meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy

    side = WorkerSide(cast(VllmStore, store), 8, [(["l.0", "l.1"], 2)], meter)
    memory = numpy.zeros((2, 8, 2, 64, 8), numpy.uint8)
    side.register({f"l.{i}": Tensor(memory[i]) for i in range(2)})
    attempts: list[Any] = []
    objects = side._shard.objects

    def refuse(identity: Any) -> Any:
        attempts.append(identity)
        raise RetryError("no pinned memory is free")

    monkeypatch.setattr(side._shard, "objects", refuse)
    work = identity(cache_group(head_bytes=512))
    side.load(StepMetadata(work, loading("a").loads))
    side.save(saving("b", KEYS[0]))
    assert side.results.take_failed_blocks() == {10, 11, 12}
    report = side.results.take_report()
    assert report is not None
    assert not report.unsupported_reason
    assert "no pinned memory is free" in report.unregistered[0, 0]
    assert ("b", 0, 0) in report.unsaved
    counts = meter.take()
    assert counts is not None
    assert (counts["missed_pages:busy"], counts["skipped_pages:busy"]) == (3, 1)

    # The worker tries at most once in `REGISTER_SECONDS`, and reports only the first refusal.
    side.load(StepMetadata())
    assert len(attempts) == 1
    now = monotonic()
    monkeypatch.setattr("ritornello.vllm.worker.monotonic", lambda: now + REGISTER_SECONDS)
    side.load(StepMetadata())
    side.load(StepMetadata())
    assert attempts == [work, work]
    assert side.results.take_report() is None

    monkeypatch.setattr(side._shard, "objects", objects)
    monkeypatch.setattr("ritornello.vllm.worker.monotonic", lambda: now + 2 * REGISTER_SECONDS)
    side.load(StepMetadata())
    report = side.results.take_report()
    assert report is not None
    assert report.unregistered == {(0, 0): ""}
    store.outcomes = [outcome(True, True, True), outcome(True)]
    side.load(loading("a", asynchronous=True))
    assert side.take_completed_loads() == ({"a"}, set())
    side.save(saving("b", KEYS[0]))
    assert len(store.puts) == 1


def test_worker_without_kv_caches_is_unsupported(store: FakeStore, meter: StepMeter) -> None:
    side = WorkerSide(cast(VllmStore, store), 8, [(["l.0"], 2)], meter)
    side.register({})
    assert "no KV cache was registered" in side.facts().unsupported_reason


# The event "protect": the store makes the engine's later work wait for the reads of a save.


def test_step_waits_for_saves_of_freed_requests(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = ["late", "late"]
    side.save(saving("r", KEYS[0]))
    side.save(saving("s", KEYS[0]))
    side.begin_step(StepMetadata(freed=("other",)))
    assert "protect" not in store.events
    for _ in range(2):
        side.begin_step(StepMetadata(freed=("s", "other")))
    assert store.events.count("protect") == 1


def test_every_step_waits_for_saves_of_windows(store: FakeStore, meter: StepMeter) -> None:
    """The engine reuses blocks that have left a window while their request still runs."""
    side = ready(store, meter)
    windowed = identity(cache_group(reach=Reach(128)))
    side._held = HeldObjects(windowed, [[held_object(FIRST)]])
    store.outcomes = ["late"]
    side.save(saving("r", KEYS[0]))
    side.begin_step(StepMetadata())
    assert store.events.count("protect") == 1


def test_engine_waits_for_save_of_sent_request(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = ["late", "late"]
    side.save(replace(saving("r", KEYS[0]), finished_sending=("s",)))
    assert "protect" not in store.events
    side.save(replace(saving("s", KEYS[0]), finished_sending=("s",)))
    assert store.events.count("protect") == 1


def test_engine_waits_for_earlier_save_of_sent_request(side: WorkerSide, store: FakeStore) -> None:
    """The request's later saves were dropped, so its last step saves nothing."""
    store.outcomes = ["late"]
    side.save(replace(saving("r", KEYS[0]), step=1))
    assert "protect" not in store.events
    side.save(StepMetadata(step=2, finished_sending=("r",)))
    assert store.events.count("protect") == 1


def test_engine_waits_for_sent_request_if_step_cannot_save(
    side: WorkerSide, store: FakeStore
) -> None:
    store.outcomes = ["late"]
    side.save(replace(saving("r", KEYS[0]), step=1))
    side._held = None
    side.save(replace(saving("s", KEYS[0]), step=2, finished_sending=("r",)))
    assert store.events.count("protect") == 1


def test_memory_that_became_unusable_stops_loads_and_saves(
    side: WorkerSide, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.outcomes = [outcome(True, True, True), outcome(True)]
    side.load(loading("a", asynchronous=True))
    monkeypatch.setattr(side._shard.kv_memory, "problem", lambda: "the device failed")
    metadata = loading("b", asynchronous=True)
    side.load(metadata)
    side.save(metadata)
    # The load of "a", which was submitted before the device failed, ends normally. No get or put
    # follows it.
    assert len(store.outcomes) == 1
    assert side.take_completed_loads() == ({"a", "b"}, {"b"})
    report = side.results.take_report()
    assert report is not None
    assert report.unsupported_reason == "the device failed"


def test_loads_and_saves_begin_after_the_work_of_the_engine(
    side: WorkerSide, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = iter([7, 9])
    monkeypatch.setattr(side._shard.kv_memory, "stream", lambda: next(streams))
    store.outcomes = [outcome(True, True, True), outcome(True)]
    metadata = loading("a", asynchronous=True)
    side.load(metadata)
    side.save(metadata)
    assert store.streams == [7, 9]


@pytest.mark.parametrize("stream", [None, 0, 7])
def test_transfers_begin_after_given_stream(broken_core: VllmStore, stream: int | None) -> None:
    """CUDA's default stream is 0, so only None means that there is no stream."""
    calls: list[dict[str, Any]] = []
    assert broken_core.open()
    core = cast(Any, broken_core._store)
    core.submit_get = core.submit_put = lambda *_, **options: calls.append(options)
    pages, pool = PageBlocks(0, 0, KEYS[:1], (1,)), cast(Any, SimpleNamespace(pages=list))
    broken_core.submit_get(identity(), FIRST, pool, pages, 1.0, stream=stream)
    broken_core.submit_put(identity(), FIRST, pool, pages, None, stream)
    expected = {} if stream is None else {"after": stream}
    assert [{"after": one["after"]} if "after" in one else {} for one in calls] == [expected] * 2


@pytest.mark.parametrize(
    ("error", "reason"), [(RetryError("too many moves wait"), "busy"), (OSError(), "error")]
)
def test_put_that_may_be_repeated_is_refused_as_busy(
    broken_core: VllmStore, meter: StepMeter, error: Exception, reason: str
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise error

    assert broken_core.open()
    cast(Any, broken_core._store).submit_put = refuse
    pages, pool = PageBlocks(0, 0, KEYS[:1], (1,)), cast(Any, SimpleNamespace(pages=list))
    assert broken_core.submit_put(identity(), FIRST, pool, pages, None) == reason
    assert not broken_core.broken
    counts = meter.take()
    assert counts is not None
    assert counts["errors"] == 1


@pytest.mark.parametrize("problem", ["", "the device failed"])
def test_fatal_error_of_a_broken_device_keeps_the_store(
    broken_core: VllmStore, meter: StepMeter, problem: str
) -> None:
    side = ready(broken_core, meter)
    assert broken_core.open()
    cast(Any, broken_core._store).submit_get = fail
    broken_core.memory_problem = lambda: problem
    side.load(loading("a"))
    assert side.results.take_failed_blocks() == {10, 11, 12}
    assert bool(broken_core.broken) is not bool(problem)


@pytest.mark.parametrize("protects", [True, False])
def test_save_is_cancelled_if_engine_cannot_wait_for_it(meter: StepMeter, protects: bool) -> None:
    cancelled = []
    ticket: Any = SimpleNamespace(cancel=lambda: cancelled.append(True))
    memory: Any = SimpleNamespace(protect=lambda _: protects)
    VllmStore(Settings("unused"), meter).protect(memory, ticket)
    assert bool(cancelled) is not protects


def test_close_waits_for_saves(side: WorkerSide, store: FakeStore, meter: StepMeter) -> None:
    store.outcomes = [outcome(True)]
    side.save(saving("a", KEYS[0]))
    side.close()
    counts = meter.take()
    assert counts is not None
    assert counts["saved_pages"] == 1


def test_async_load_ends_with_last_read(store: FakeStore, meter: StepMeter) -> None:
    side = ready(store, meter, held_object(ObjectId(0, 0, 0)), held_object(ObjectId(0, 0, 1)))
    slow: Any = outcome(True, True, True)
    store.outcomes = ["late", slow]
    side.load(loading("a", asynchronous=True))
    assert side.take_completed_loads() == (set(), set())
    assert side.take_completed_loads() == (set(), set())
    # The kernel completes the read.
    store.cancelled = 1
    over, failed = side.take_completed_loads()
    assert (over, failed) == ({"a"}, {"a"})
    assert side.take_completed_loads() == (set(), set())


def test_async_load_does_not_delay_step(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = [outcome(True, True, True), outcome(True)]
    metadata = loading("a", asynchronous=True)
    side.load(metadata)
    side.save(metadata)
    assert len(store.puts) == 1
    assert side.take_completed_loads() == ({"a"}, set())
    assert side.results.take_failed_blocks() == set()


def test_failed_async_load_cancels_no_save(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = [outcome(True, False, True, reason="checksum"), outcome(True)]
    metadata = loading("a", asynchronous=True)
    side.load(metadata)
    side.save(metadata)
    assert len(store.puts) == 1
    assert side.take_completed_loads() == ({"a"}, {"a"})
    assert side.results.take_failed_blocks() == {11}
    report = side.results.take_report()
    assert report is not None
    assert report.unsaved == [("a", 0, 5)]
    assert report.failed == {"a"}


def test_failed_blocks_are_not_reported_with_several_groups(
    store: FakeStore, meter: StepMeter
) -> None:
    side = ready(
        store, meter, held_object(ObjectId(0, 0, 0)), held_object(ObjectId(1, 0, 0)), groups=2
    )
    store.outcomes = [outcome(True, True, True), outcome(False, reason="io")]
    pages = [PageBlocks(0, 0, KEYS, (1, 2, 3)), PageBlocks(1, 2, KEYS[2:], (4,))]
    side.load(StepMetadata(None, [Load("a", pages, asynchronous=True)]))
    assert side.take_completed_loads() == ({"a"}, {"a"})
    assert side.results.take_failed_blocks() == set()


def test_late_async_load_is_cancelled_once(
    side: WorkerSide, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.outcomes = ["late"]
    side.load(loading("a", asynchronous=True))
    monkeypatch.setattr("ritornello.vllm.worker.monotonic", lambda: 1e12)
    assert side.take_completed_loads() == (set(), set())
    assert store.cancelled == 1
    assert side.take_completed_loads() == ({"a"}, {"a"})
    assert side.results.take_failed_blocks() == {11, 12}
    assert store.cancelled == 2
    assert store.events == ["wait", "cancel"]


def test_worker_without_memory_fails_async_loads(store: FakeStore, meter: StepMeter) -> None:
    side = WorkerSide(cast(VllmStore, store), 8, [([], 2)], meter)
    side.load(loading("a", asynchronous=True))
    assert side.take_completed_loads() == ({"a"}, {"a"})
    assert side.results.take_failed_blocks() == {10, 11, 12}


def test_close_waits_for_async_reads(side: WorkerSide, store: FakeStore) -> None:
    store.outcomes = ["late"]
    side.load(loading("a", asynchronous=True))
    side.close()
    assert store.events == ["cancel", "close"]


def test_failing_pool_fails_load_only(broken_core: VllmStore, meter: StepMeter) -> None:
    pool: Any = SimpleNamespace(page_bytes=4096, pages=fail)
    side = ready(broken_core, meter, PageObject(FIRST, pool, True))
    side.load(loading("a"))
    side.save(saving("a", KEYS[0]))
    assert side.results.take_failed_blocks() == {10, 11, 12}


def test_prefill_time_is_reported(side: WorkerSide, store: FakeStore) -> None:
    side.begin_step()
    side.save(StepMetadata(prefill=(64, 128)))
    report = side.results.take_report()
    assert report is not None
    assert report.prefill is not None
    assert report.prefill[:2] == (64, 128)
    assert report.prefill[2] >= 0
    assert side.results.take_report() is None


def test_read_times_are_reported_if_wanted(side: WorkerSide, store: FakeStore) -> None:
    store.wants_timings = True
    store.outcomes = [outcome(True, True, True), outcome(True)]
    side.load(loading("a"))
    report = side.results.take_report()
    assert report is not None
    assert report.loads == [("disk", 4096, 0.5)]
    assert list(report.load_seconds) == ["a"]
