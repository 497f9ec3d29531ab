"""Tickets: transfers that run in the background, while the caller continues."""

import asyncio
import contextlib
import gc
import os
import select
import threading
import time
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support import blank, keys_of, open_small, pages_of

import ritornello as rt

PAGE = 192 << 10
SCOPE = rt.Scope.opaque("tickets", PAGE)
KEYS = keys_of("tickets", 8)


def finished(ticket: rt.Ticket) -> rt.Outcome:
    outcome = ticket.wait(60)
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("copy", [False, True])
def test_get_returns_the_bytes_of_the_put(store: rt.Store, copy: bool) -> None:
    source = pages_of(KEYS, PAGE)
    put = store.submit_put(SCOPE, KEYS, source, copy=copy)
    if copy:
        source[:] = 0
    stored = finished(put)
    assert (stored.pages, stored.bytes, stored.reason) == (8, 8 * PAGE, "")
    assert stored.seconds > 0
    out = blank(8, PAGE)
    loaded = finished(store.submit_get(SCOPE, KEYS, out))
    assert (loaded.pages, loaded.bytes, loaded.reason) == (8, 8 * PAGE, "")
    assert loaded.ok == [True] * 8
    assert (out == pages_of(KEYS, PAGE)).all()


def test_get_reports_missing_pages(store: rt.Store) -> None:
    store.put_batch(SCOPE, KEYS[:3], pages_of(KEYS[:3], PAGE))
    outcome = finished(store.submit_get(SCOPE, KEYS[:5], blank(5, PAGE)))
    assert (outcome.pages, outcome.reason) == (3, "not_found")
    assert outcome.ok == [True, True, True, False, False]


LONG = 512 << 10
SECTIONS = (LONG // 4, LONG // 2, LONG)


def test_sections_arrive_in_order(store: rt.Store) -> None:
    scope = rt.Scope.opaque("sections", LONG)
    right = pages_of(KEYS, LONG)
    assert store.put_batch(scope, KEYS, right) == 8
    out = blank(8, LONG)
    ticket = store.submit_get(scope, KEYS, out, sections=SECTIONS)
    for number, end in enumerate(SECTIONS):
        assert ticket.wait_section(number, 60)
        assert (out[:, :end] == right[:, :end]).all()
    assert finished(ticket).ok == [True] * 8


def test_sections_of_missing_pages_end_with_ticket(store: rt.Store) -> None:
    scope = rt.Scope.opaque("sections", LONG)
    ticket = store.submit_get(scope, KEYS, blank(8, LONG), sections=SECTIONS)
    assert ticket.wait_section(0)
    assert ticket.done()
    assert finished(ticket).reason == "not_found"
    for wrong in ((), (5, 5), (LONG // 2,)):
        with pytest.raises(rt.errors.InvalidError):
            store.submit_get(scope, KEYS, blank(8, LONG), sections=wrong)


def test_ticket_works_with_select(store: rt.Store) -> None:
    ticket = store.submit_put(SCOPE, KEYS, pages_of(KEYS, PAGE))
    readable, _, _ = select.select([ticket], [], [], 60)
    assert readable == [ticket]
    assert ticket.done()
    again, _, _ = select.select([ticket], [], [], 0)
    assert again == [ticket]


def test_ticket_works_in_event_loop(store: rt.Store) -> None:
    async def put() -> int:
        loop, landed = asyncio.get_running_loop(), asyncio.Event()
        ticket = store.submit_put(SCOPE, KEYS, pages_of(KEYS, PAGE))
        loop.add_reader(ticket, landed.set)
        await asyncio.wait_for(landed.wait(), 60)
        loop.remove_reader(ticket)
        return finished(ticket).pages

    assert asyncio.run(put()) == 8


def test_wait_with_zero_timeout_returns_at_once(store: rt.Store) -> None:
    ticket = store.submit_put(SCOPE, KEYS, pages_of(KEYS, PAGE))
    began = time.monotonic()
    outcome = ticket.wait(0)
    assert time.monotonic() - began < 1
    assert outcome is None or outcome.pages == 8
    assert finished(ticket).pages == 8
    assert finished(ticket).pages == 8


def test_get_after_its_deadline_delivers_no_page(store: rt.Store) -> None:
    store.put_batch(SCOPE, KEYS, pages_of(KEYS, PAGE))
    out = blank(8, PAGE)
    outcome = finished(store.submit_get(SCOPE, KEYS, out, timeout=0))
    assert (outcome.pages, outcome.reason) == (0, "deadline")
    assert store.get_batch(SCOPE, KEYS, out, timeout=0) == 0
    assert store.get_batch(SCOPE, KEYS, out, timeout=60) == 8


def test_long_transfers_have_longer_limits(store: rt.Store) -> None:
    assert store.time_limit(8 << 20, 10.0) == 10.0
    # Before the store has measured a volume, the limit is four times the time at 64 MiB/s.
    assert store.time_limit(512 << 20, 10.0) == 32.0
    assert store.time_limit(8 << 30, 10.0, put=True) == 60.0
    with pytest.raises(rt.errors.InvalidError, match="least"):
        store.time_limit(1, -1.0)


def test_cancelled_put_is_complete_or_reports_cancelled(where: Path) -> None:
    """Eight of 16 concurrent puts are cancelled: each of the eight is complete, or ends with the
    reason `cancelled`. The other puts are complete.
    """
    sequences = [keys_of(f"cancel {n}", 16) for n in range(16)]
    source = pages_of(sequences[0], PAGE)
    with open_small(where, capacity="256MiB") as store:
        tickets = [store.submit_put(SCOPE, keys, source) for keys in sequences]
        for ticket in tickets[8:]:
            ticket.cancel()
        outcomes = [finished(ticket) for ticket in tickets]
        for keys, outcome in zip(sequences, outcomes, strict=True):
            assert outcome.reason in ("", "cancelled")
            assert (outcome.pages == 16) == (outcome.reason == "")
            assert store.probe(SCOPE, keys) >= outcome.pages
        assert all(outcome.pages == 16 for outcome in outcomes[:8])


def test_done_ticket_releases_buffers(store: rt.Store) -> None:
    page = bytearray(PAGE)
    ticket = store.submit_put(SCOPE, KEYS[:1], [page])
    finished(ticket)
    page.append(0)  # raises BufferError while the ticket holds the buffer


def test_buffers_of_done_and_dropped_tickets_are_released(store: rt.Store) -> None:
    source = pages_of(KEYS, PAGE)
    alive = weakref.ref(source)
    ticket = store.submit_put(SCOPE, KEYS, source)
    del source
    gc.collect()
    finished(ticket)
    assert alive() is None
    source = pages_of(KEYS, PAGE)
    store.submit_get(SCOPE, KEYS, source)
    deadline = time.monotonic() + 60
    alive = weakref.ref(source)
    del source
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        store.submit_get(SCOPE, [], [])  # any call releases the buffers of dropped tickets
    assert alive() is None


def test_close_completes_waiting_tickets(where: Path) -> None:
    store = open_small(where, capacity="256MiB")
    source = pages_of(keys_of("closing", 16), PAGE)
    tickets = [store.submit_put(SCOPE, keys_of(f"c{n}", 16), source) for n in range(12)]
    store.close()
    for ticket in tickets:
        assert ticket.done()
        outcome = finished(ticket)
        assert outcome.reason in ("", "closed")


def test_other_threads_run_during_transfers(where: Path) -> None:
    pages = 192
    scope = rt.Scope.opaque("threads", 1 << 20)
    keys = keys_of("threads", pages)
    source = np.zeros((pages, 1 << 20), np.uint8)
    spans: list[tuple[float, float]] = []
    with open_small(where, capacity="256MiB") as store:

        def put() -> None:
            began = time.perf_counter()
            assert store.put_batch(scope, keys, source) == pages
            spans.append((began, time.perf_counter()))

        ticks = []
        thread = threading.Thread(target=put)
        thread.start()
        while thread.is_alive():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)
        thread.join()
    began, ended = spans[0]
    inside = [began, *[tick for tick in ticks if began < tick < ended], ended]
    longest = max(after - before for before, after in pairwise(inside))
    assert longest < (ended - began) / 2


def test_many_threads_share_one_store(store: rt.Store) -> None:
    """Each thread puts and gets its own sequences, and gets the sequences of the next thread."""
    scope = rt.Scope.opaque("many", 8192)
    failures: list[str] = []

    def work(me: int) -> None:
        for turn in range(20):
            keys = keys_of(f"{me} {turn}", 4)
            store.put_batch(scope, keys, pages_of(keys, 8192))
            for other in (keys, keys_of(f"{(me + 1) % 4} {turn}", 4)):
                out = blank(4, 8192)
                got = store.get_batch(scope, other, out)
                if not (out[:got] == pages_of(other, 8192)[:got]).all():
                    failures.append(f"thread {me}, turn {turn}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_many_tickets_share_one_eventfd(store: rt.Store) -> None:
    done = rt.Completions()
    tags = [object() for _ in range(6)]
    for number, tag in enumerate(tags):
        keys = keys_of(f"shared {number}", 2)
        done.add(store.submit_put(SCOPE, keys, pages_of(keys, PAGE)), tag)
    came: list[object] = []
    until = time.monotonic() + 60
    while len(came) < 6 and time.monotonic() < until:
        assert select.select([done], [], [], 60)[0]
        os.eventfd_read(done.fileno())
        for tag, outcome in done.drain():
            assert outcome.ok == [True, True]
            came.append(tag)
    assert sorted(map(id, came)) == sorted(map(id, tags)), "each ticket must be returned once"
    assert len(done) == 0
    # A ticket that completed between the last read of the eventfd and the last drain has left a
    # signal in the eventfd: remove it.
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(done.fileno())
    assert not select.select([done], [], [], 0)[0]
    late = store.submit_get(SCOPE, KEYS, blank(8, PAGE))
    assert finished(late).reason == "not_found"
    done.add(late, "late")
    assert [(tag, outcome.pages) for tag, outcome in done.drain()] == [("late", 0)]
    # LMCache calls `drain` to get the result of one task, and later waits for the signals of other
    # tasks whose results this call returned.
    assert select.select([done], [], [], 0)[0], "`drain` must not reset the eventfd"
