"""Loads and stores under way, and what they came to.

A job is one ticket or a few (one for each group and each piece of consecutive chunks). It is done
when all its tickets are: until then the kernel may still write to, or read from, its rows of the
host tier.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ritornello._core import Outcome, Ticket

logger = logging.getLogger("vllm.ritornello")

# Said of a drain that goes on: only the kernel, with a disk that does not answer, can be the cause.
SLOW_SECONDS = 30.0


@dataclass(slots=True)
class TicketPart:
    """`places` of the job's keys, moved by one ticket; without a ticket they did not come, for
    `reason`.
    """

    places: range | list[int]
    ticket: "Ticket | None"
    reason: str = "error"


@dataclass(slots=True)
class Job:
    number: int
    request: str
    keys: Sequence[bytes]
    load: bool
    parts: list[TicketPart]
    leases: Sequence[int] = ()

    def is_done(self) -> bool:
        return all(piece.ticket is None or piece.ticket.done() for piece in self.parts)


@dataclass(slots=True)
class FinishedJob:
    """What a job came to. `ok[i]`: key i came, or is stored. `reasons`: pages that did not, by
    reason. `seconds`: of its slowest ticket; `bytes`: moved.
    """

    job: Job
    ok: list[bool]
    reasons: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    bytes: int = 0


class Jobs:
    def __init__(self) -> None:
        self._running: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, job: Job) -> None:
        self._running.append(job)

    def take_finished(self) -> list[FinishedJob]:
        """The jobs that are done, each once."""
        if not self._running:
            return []
        flying, landed = deque[Job](), []
        for job in self._running:
            if job.is_done():
                landed.append(account(job))
            else:
                flying.append(job)
        self._running = flying
        return landed

    def cancel(self, which: Callable[[Job], bool]) -> None:
        """Asks jobs to stop; they are done when what the kernel holds has landed."""
        for ticket in self._tickets(which):
            ticket.cancel()

    def wait(self, seconds: float | None = None) -> bool:
        """Until all jobs are done, or for so long. Each has a deadline of its own, so that this
        ends, unless the kernel keeps memory that it was given.
        """
        begun = monotonic()
        said = False
        for ticket in self._tickets(lambda job: True):
            while not ticket.done():
                left = SLOW_SECONDS if seconds is None else begun + seconds - monotonic()
                if left <= 0:
                    return False
                if ticket.wait(left) is None and seconds is None and not said:
                    said = True
                    logger.warning("ritornello: still waiting for the disk to finish")
        return True

    def _tickets(self, which: Callable[[Job], bool]) -> "Iterable[Ticket]":
        for job in self._running:
            if which(job):
                for piece in job.parts:
                    if piece.ticket is not None:
                        yield piece.ticket


def account(job: Job) -> FinishedJob:
    done = FinishedJob(job, [False] * len(job.keys))
    for piece in job.parts:
        outcome: Outcome | None = None if piece.ticket is None else outcome_of(piece.ticket)
        ok = [False] * len(piece.places) if outcome is None else outcome.ok
        for place, came in zip(piece.places, ok, strict=True):
            done.ok[place] = came
        lost = ok.count(False)
        if lost:
            reason = piece.reason if outcome is None else outcome.reason or "error"
            done.reasons[reason] = done.reasons.get(reason, 0) + lost
        if outcome is not None:
            done.seconds = max(done.seconds, outcome.seconds)
            done.bytes += outcome.bytes
    return done


def outcome_of(ticket: "Ticket") -> "Outcome | None":
    try:
        return ticket.wait(0)
    except Exception:  # a ticket of before a fork: nothing of it can be believed
        return None
