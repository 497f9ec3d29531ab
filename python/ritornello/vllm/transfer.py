"""A load on its way into the engine's memory: one read for every object of its pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from ritornello.vllm.identity import Identity
from ritornello.vllm.metadata import Load, Pages
from ritornello.vllm.shard import Object
from ritornello.vllm.store import VllmStore

if TYPE_CHECKING:
    from ritornello._core import Outcome, Ticket


@dataclass(slots=True)
class LoadResult:
    """What a load came to. `bad`: (part, place in the sequence, block) of pages that are not whole;
    `reason`: why the first of them is not.
    """

    bytes: int = 0
    bad: dict[tuple[int, int, int], None] = field(default_factory=dict)
    reason: str = ""

    def add(self, pages: Pages, outcome: "Outcome | None") -> None:
        filled: Sequence[bool] = [False] * len(pages.keys) if outcome is None else outcome.ok
        if outcome is not None:
            self.bytes += outcome.bytes
        for place, ok in enumerate(filled):
            if not ok:
                self.bad[pages.part, pages.first + place, pages.blocks[place]] = None
        if self.bad and not self.reason:
            self.reason = (outcome.reason if outcome is not None else "") or "error"


class PendingLoad:
    """Until every read has landed the blocks belong to the kernel. `objects` is None where this
    worker can read nothing: then nothing arrives, and that is said page by page. `by_layer`: groups
    of layers arrive one after the other. `refused`: why nothing is to arrive.
    """

    def __init__(
        self,
        store: VllmStore,
        identity: Identity | None,
        objects: Sequence[Sequence[Object]] | None,
        load: Load,
        begun: float,
        seconds: float,
        *,
        by_layer: bool = False,
        refused: str = "",
    ) -> None:
        self.load = load
        self.begun = begun
        self.by_layer = by_layer
        self._store = store
        self._deadline = begun + seconds
        self._given_up = False
        self._missed = ""
        self._reads: list[tuple[Pages, Ticket | None]] = []
        self._result = LoadResult(reason=refused)
        for pages in load.pages:
            if objects is None or identity is None or refused:
                self._result.add(pages, None)
                continue
            for held in objects[pages.part]:
                sections = held.sections if by_layer else ()
                ticket = store.submit_get(identity, held.piece, held.pool, pages, seconds, sections)
                self._reads.append((pages, ticket))

    def poll(self, now: float) -> LoadResult | None:
        """What came, once nothing is being read any more; never waits. After the deadline what is
        still under way is given up.
        """
        while self._reads:
            pages, ticket = self._reads[-1]
            if ticket is not None and not self._store.is_done(ticket):
                if now >= self._deadline and not self._given_up:
                    self._given_up = True
                    for _, late in self._reads:
                        if late is not None:
                            self._store.request_cancel(late)
                return None
            self._add(pages, ticket, 0.0)
        return self._whole()

    def wait_group(self, number: int) -> None:
        """Waits until a group of layers has arrived or will not, at most until the deadline: what
        is computed after that is worthless.
        """
        for _, ticket in self._reads:
            left = max(self._deadline - monotonic(), 0.0)
            if ticket is not None and not self._store.wait_section(ticket, number, left):
                self.miss("deadline")

    def miss(self, reason: str) -> None:
        """Something was computed before its pages were there: whatever comes, nothing came."""
        self._missed = self._missed or reason

    def wait(self) -> LoadResult:
        """Waits until the deadline, gives up the rest, and waits for the kernel to let go of it."""
        while self._reads:
            pages, ticket = self._reads[-1]
            self._add(pages, ticket, max(self._deadline - monotonic(), 0.0))
        return self._whole()

    def _whole(self) -> LoadResult:
        """What came, or nothing if something was missed."""
        if self._missed:
            self._result = LoadResult(reason=self._missed)
            for pages in self.load.pages:
                self._result.add(pages, None)
        return self._result

    def give_up(self) -> None:
        """Waits only for the kernel to let go."""
        while self._reads:
            ticket = self._reads[-1][1]
            if ticket is not None:
                self._store.cancel_and_wait(ticket)
            self._reads.pop()

    def _add(self, pages: Pages, ticket: "Ticket | None", timeout: float) -> None:
        """Of the last read. It counts as under way until its memory is free again, also where a
        signal ends the wait.
        """
        outcome = None
        if ticket is not None:
            outcome = self._store.wait(ticket, timeout)
            if outcome is None:
                outcome = self._store.cancel_and_wait(ticket)
        self._reads.pop()
        self._result.add(pages, outcome)
