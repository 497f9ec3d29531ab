"""The worker's side and its store, with tickets that do as they are told."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ritornello.vllm.identity import Identity
from ritornello.vllm.metadata import Load, Save, StepMetadata
from ritornello.vllm.meter import Meter
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import QuietStore
from ritornello.vllm.worker import WorkerSide

IDENTITY = Identity("m", "bfloat16", 64, 2, 2, 64, 4096, "layout", b"w", "none", "sha256", ())
KEYS = (b"k0" * 8, b"k1" * 8, b"k2" * 8)


def outcome(*ok: bool, reason: str = "") -> Any:
    pages = (*ok, False).index(False)
    return SimpleNamespace(ok=list(ok), pages=pages, bytes=pages * 4096, reason=reason, seconds=0)


@dataclass
class Shelf:
    """Stands for the store: `outcomes` in the order in which tickets are asked for."""

    outcomes: list[Any] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    cancelled: int = 0
    puts: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def open(self) -> bool:
        return True

    def submit_get(self, identity: Identity, keys: Any, out: Any, timeout: float) -> Any:
        return self._ticket()

    def submit_put(
        self, identity: Identity, keys: Any, pages: Any, parent: Any, retain_until: Any
    ) -> Any:
        self.puts.append((keys, pages, parent))
        return self._ticket()

    def finish(self, ticket: Any, timeout: float | None) -> Any:
        if ticket.outcome == "interrupted":
            raise KeyboardInterrupt
        self.events.append("finish")
        return None if ticket.outcome == "late" else ticket.outcome

    def cancel(self, ticket: Any) -> Any:
        self.cancelled += 1
        self.events.append("cancel")
        return outcome(True, False, False, reason="deadline")

    def release(self, lease: int) -> None:
        self.released.append(lease)
        self.events.append("release")

    def close(self) -> None:
        self.events.append("close")

    def _ticket(self) -> Any:
        found = self.outcomes.pop(0)
        return found and SimpleNamespace(outcome=found, done=lambda: True)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def side(shelf: Shelf, meter: Meter) -> WorkerSide:
    made = WorkerSide(cast(QuietStore, shelf), blocks=8, meter=meter)
    made._pool = cast(Any, SimpleNamespace(page_bytes=4096, pages=list))
    return made


def loading(*names: str) -> StepMetadata:
    loads = [Load(name, 4, KEYS, (10, 11, 12), lease) for lease, name in enumerate(names)]
    saves = [Save(name, 7, KEYS[:1], (13,), KEYS[2]) for name in names]
    return StepMetadata(IDENTITY, loads, saves)


def test_a_good_load_reports_nothing(side: WorkerSide, shelf: Shelf, meter: Meter) -> None:
    shelf.outcomes = [outcome(True, True, True), outcome(True)]
    side.load(loading("a"))
    side.save(loading("a"))
    assert side.take_failed_blocks() == set()
    assert side.take_report() is None
    assert shelf.released == [0]
    assert shelf.puts == [(KEYS[:1], [13], KEYS[2])]
    counts = meter.take()
    assert counts is not None
    assert counts["loaded_pages"] == 3


def test_exactly_the_pages_that_failed_are_reported(side: WorkerSide, shelf: Shelf) -> None:
    shelf.outcomes = [outcome(True, False, True, reason="checksum")]
    side.load(loading("a"))
    assert side.take_failed_blocks() == {11}
    assert side.take_failed_blocks() == set()


def test_nothing_is_saved_in_a_step_with_a_failed_load(
    side: WorkerSide, shelf: Shelf, meter: Meter
) -> None:
    shelf.outcomes = [outcome(True, True, True), outcome(False, False, False, reason="io")]
    metadata = loading("a", "b")
    side.load(metadata)
    side.save(metadata)
    assert shelf.puts == []
    report = side.take_report()
    assert report is not None
    assert report.unsaved == [("b", 4), ("a", 7), ("b", 7)]
    counts = meter.take()
    assert counts is not None
    assert counts["skipped_pages:spoilt"] == 2
    assert counts["missed_pages:io"] == 3
    # The next step is a new one.
    shelf.outcomes = [outcome(True)]
    side.load(StepMetadata())
    side.save(StepMetadata(IDENTITY, (), metadata.saves[:1]))
    assert len(shelf.puts) == 1


def test_a_late_load_is_cancelled_and_waited_for(side: WorkerSide, shelf: Shelf) -> None:
    shelf.outcomes = ["late"]
    side.load(loading("a"))
    assert shelf.cancelled == 1
    assert side.take_failed_blocks() == {11, 12}
    assert shelf.released == [0]


def test_leases_end_when_all_loads_have_landed(side: WorkerSide, shelf: Shelf) -> None:
    shelf.outcomes = [outcome(True, True, True), "late"]
    side.load(loading("a", "b"))
    assert shelf.events == ["finish", "finish", "cancel", "release", "release"]
    side.close()
    assert shelf.cancelled == 1


def test_closing_lands_the_loads_that_a_signal_left(side: WorkerSide, shelf: Shelf) -> None:
    shelf.outcomes = [outcome(True, True, True), "interrupted", "late"]
    with pytest.raises(KeyboardInterrupt):
        side.load(loading("a", "b", "c"))
    side.close()
    assert shelf.events == ["finish", "cancel", "cancel", "close"]


class FatalError(Exception):
    kind = "fatal"


class Slow:
    """Stands for a ticket of the core: not done before it is cancelled."""

    cancelled = False

    def wait(self, timeout: float | None = None) -> Any:
        return outcome(True, False, False, reason="cancelled") if self.cancelled else None

    def cancel(self) -> None:
        self.cancelled = True


class Torn:
    """Stands for a ticket that cannot be waited for."""

    def wait(self, timeout: float | None = None) -> Any:
        raise OSError("poll")

    def cancel(self) -> None:
        pass


def fail(*_: object, **__: object) -> Any:
    raise FatalError("the device is gone")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, meter: Meter) -> QuietStore:
    core = SimpleNamespace(release=fail, close=fail)
    monkeypatch.setattr("ritornello.vllm.store.open_store", lambda _: core)
    return QuietStore(Settings("/kv", None, False), meter)


@pytest.mark.parametrize("closed", [False, True])
def test_tickets_land_when_the_store_is_broken(quiet: QuietStore, closed: bool) -> None:
    if closed:
        quiet.close()
    else:
        quiet.release(1)
    assert quiet.broken
    assert not quiet.open()
    ticket = Slow()
    assert quiet.finish(cast(Any, ticket), 0.0) is None
    assert not ticket.cancelled
    landed = quiet.cancel(cast(Any, ticket))
    assert landed is not None
    assert landed.ok == [True, False, False]
    assert quiet.finish(cast(Any, ticket), 0.0) is not None


def test_a_store_that_breaks_in_a_load_does_not_strand_the_others(
    quiet: QuietStore, meter: Meter
) -> None:
    tickets = [Slow(), Slow()]
    waiting = iter(tickets)
    side = WorkerSide(quiet, blocks=8, meter=meter)
    side._pool = cast(Any, SimpleNamespace(page_bytes=4096, pages=list))
    assert quiet.open()
    cast(Any, quiet._store).submit_get = lambda *_, **__: next(waiting, None) or fail()
    side.load(loading("a", "b", "c"))
    assert quiet.broken
    assert [ticket.cancelled for ticket in tickets] == [True, True]
    assert side.take_failed_blocks() == {10, 11, 12}


def test_a_ticket_that_fails_is_counted_and_said_once(
    quiet: QuietStore, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert quiet.finish(cast(Any, Torn()), 0.0) is None
        assert quiet.cancel(cast(Any, Torn())) is None
    counts = meter.take()
    assert counts is not None
    assert counts["errors"] == 6
    assert len(caplog.records) == 2


def test_a_store_that_takes_no_loads_fails_them_all(side: WorkerSide, shelf: Shelf) -> None:
    shelf.outcomes = [None]
    side.load(loading("a"))
    assert side.take_failed_blocks() == {10, 11, 12}


def test_full_staging_is_asked_again_and_no_space_is_not(side: WorkerSide, shelf: Shelf) -> None:
    saves = [Save(name, 0, KEYS, (1, 2, 3), None) for name in ("a", "b")]
    shelf.outcomes = [
        outcome(True, False, False, reason="staging_full"),
        outcome(False, False, False, reason="no_space"),
    ]
    side.save(StepMetadata(IDENTITY, (), saves))
    side.save(StepMetadata())
    report = side.take_report()
    assert report is not None
    assert report.unsaved == [("a", 1)]


def test_memory_that_is_not_what_the_model_says_is_refused(side: WorkerSide) -> None:
    side._pool = cast(Any, SimpleNamespace(page_bytes=1, pages=list))
    side.load(loading("a"))
    assert side.take_failed_blocks() == {10, 11, 12}
    report = side.take_report()
    assert report is not None
    assert "1 bytes in memory, 4096 by the model" in report.refusal


def test_closing_waits_for_saves(side: WorkerSide, shelf: Shelf, meter: Meter) -> None:
    shelf.outcomes = [outcome(True)]
    side.save(StepMetadata(IDENTITY, (), [Save("a", 0, KEYS[:1], (1,), None)]))
    side.close()
    counts = meter.take()
    assert counts is not None
    assert counts["saved_pages"] == 1
