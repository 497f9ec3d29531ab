"""Loads and puts in progress, and their results.

A job is vLLM's order to move chunks (pages of its host tier) to or from this tier. A job has one
ticket for each set of chunks that the store moves in one call (`sequence.consecutive_runs`), and is
done when all its tickets are done: until then the kernel may write to, or read from, the job's rows
of the host tier.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ritornello._core import Lookup, Outcome, Ticket

# Reasons of failed loads that mean that the chunks are no longer stored: not found, or damaged.
# After any other reason, such as a deadline, the chunks may still be stored.
GONE_REASONS = frozenset({"not_found", "place", "header", "scope", "key", "frame", "checksum"})

logger = logging.getLogger("vllm.ritornello")

# Seconds after which a wait without a limit is logged.
SLOW_SECONDS = 30.0


@dataclass(slots=True)
class TicketPart:
    """The keys of a job, by `indices`, that one ticket moves. If `ticket` is None, their chunks are
    not moved, for `reason`.
    """

    indices: range | list[int]
    ticket: "Ticket | None"
    reason: str = "error"


@dataclass(slots=True)
class Job:
    """A load or, if `load` is false, a put. `started`: a time of `monotonic`. `decision`: the
    lookup with which the gate decided to load. `prompt`: the number of tokens of the prompt before
    the loaded tokens, and the number of tokens that the load spares the engine.
    """

    number: int
    request: str
    keys: Sequence[bytes]
    load: bool
    parts: list[TicketPart]
    leases: Sequence[Any] = ()
    started: float = 0.0
    decision: "Lookup | None" = None
    prompt: tuple[int, int] = (0, 0)

    def is_done(self) -> bool:
        return all(piece.ticket is None or piece.ticket.done() for piece in self.parts)


@dataclass(slots=True)
class FinishedJob:
    """Result of a job. `ok[i]`: key i was loaded, or is stored. `reasons`: number of failed pages
    by reason; all failed pages of a ticket count under the reason of the first. `gone`: all
    keys that a load's ticket did not deliver, if the first of them was not found or is damaged.
    `seconds`: duration of the slowest ticket. `bytes`: bytes that all tickets moved.
    """

    job: Job
    ok: list[bool]
    reasons: dict[str, int] = field(default_factory=dict)
    gone: list[bytes] = field(default_factory=list)
    seconds: float = 0.0
    bytes: int = 0


class Jobs:
    """The jobs in progress."""

    def __init__(self) -> None:
        self._running: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, job: Job) -> None:
        self._running.append(job)

    def take_finished(self) -> list[FinishedJob]:
        """Returns the jobs that are done, each once."""
        if not self._running:
            return []
        running, finished_jobs = deque[Job](), []
        for job in self._running:
            if job.is_done():
                finished_jobs.append(account(job))
            else:
                running.append(job)
        self._running = running
        return finished_jobs

    def cancel(self, which: Callable[[Job], bool]) -> None:
        """Cancels the jobs for which `which` returns true. A cancelled job is done when the kernel
        has finished its I/O.
        """
        for ticket in self._tickets(which):
            ticket.cancel()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until all jobs are done, at most `seconds`; returns whether all jobs are done.
        Every job has its own deadline, so the wait ends unless the kernel does not end its I/O on
        the memory of a job.
        """
        started = monotonic()
        logged = False
        for ticket in self._tickets(lambda job: True):
            while not ticket.done():
                left = SLOW_SECONDS if seconds is None else started + seconds - monotonic()
                if left <= 0:
                    return False
                if ticket.wait(left) is None and seconds is None and not logged:
                    logged = True
                    logger.warning(
                        "ritornello: transfers between host memory and the store have not ended "
                        "after %.0f seconds; still waiting",
                        SLOW_SECONDS,
                    )
        return True

    def _tickets(self, which: Callable[[Job], bool]) -> "Iterable[Ticket]":
        for job in self._running:
            if which(job):
                for piece in job.parts:
                    if piece.ticket is not None:
                        yield piece.ticket


def account(job: Job) -> FinishedJob:
    finished = FinishedJob(job, [False] * len(job.keys))
    for piece in job.parts:
        outcome: Outcome | None = None if piece.ticket is None else outcome_of(piece.ticket)
        ok = [False] * len(piece.indices) if outcome is None else outcome.ok
        for index, moved in zip(piece.indices, ok, strict=True):
            finished.ok[index] = moved
        missing = ok.count(False)
        if missing:
            reason = piece.reason if outcome is None else outcome.reason or "error"
            finished.reasons[reason] = finished.reasons.get(reason, 0) + missing
            if job.load and reason in GONE_REASONS:
                finished.gone += [
                    job.keys[at] for at, moved in zip(piece.indices, ok, strict=True) if not moved
                ]
        if outcome is not None:
            finished.seconds = max(finished.seconds, outcome.seconds)
            finished.bytes += outcome.bytes
    return finished


def outcome_of(ticket: "Ticket") -> "Outcome | None":
    try:
        return ticket.wait(0)
    except Exception:  # a ticket from before a fork has no valid outcome
        return None
