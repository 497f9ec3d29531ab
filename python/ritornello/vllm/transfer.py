"""Loads and saves in progress: one read for each object of their pages that this worker holds, one
write for each object that this worker stores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from ritornello.vllm.kv_memory import KvMemory
from ritornello.vllm.metadata import Load, PageBlocks, Save
from ritornello.vllm.shard import HeldObjects
from ritornello.vllm.store import BUSY, VllmStore

if TYPE_CHECKING:
    from ritornello._core import Outcome, Ticket

# A save is repeated if a put did not store all its pages for one of these reasons. The next attempt
# may find room in staging ("staging_full") or in a queue ("busy"), or finds the pages that a
# concurrent put has stored, and writes the remaining pages ("superseded").
TRANSIENT = frozenset({"staging_full", BUSY, "superseded"})


@dataclass(slots=True)
class LoadResult:
    """Outcome of a load. `unfilled`: (group, index of the page in its sequence, block) of each page
    that was not filled completely. `reason`: why a read failed, or why nothing was read.
    """

    bytes: int = 0
    unfilled: dict[tuple[int, int, int], None] = field(default_factory=dict)
    reason: str = ""

    def add(self, pages: PageBlocks, outcome: "Outcome | None") -> None:
        filled: Sequence[bool] = [False] * len(pages.keys) if outcome is None else outcome.ok
        if outcome is not None:
            self.bytes += outcome.bytes
        for index, ok in enumerate(filled):
            if not ok:
                self.unfilled[pages.group, pages.first + index, pages.blocks[index]] = None
        if self.unfilled and not self.reason:
            self.reason = (outcome.reason if outcome is not None else "") or "error"


class PendingLoad:
    """A load in progress. Until every read is done, the kernel may write to the blocks.

    `held` is None if this worker can read nothing: then all pages are reported as missed.
    `by_layer`: the pages arrive in groups of consecutive layers, in order, so that a step computes
    layers whose group has arrived. `skip_reason`: why nothing is read.
    """

    def __init__(
        self,
        store: VllmStore,
        held: HeldObjects | None,
        load: Load,
        started: float,
        seconds: float,
        *,
        by_layer: bool = False,
        skip_reason: str = "",
        stream: int | None = None,
    ) -> None:
        self.load = load
        self.started = started
        self.by_layer = by_layer
        self._store = store
        self._deadline = started + seconds
        self._cancel_requested = False
        self._miss_reason = ""
        self._reads: list[tuple[PageBlocks, Ticket | None]] = []
        self._result = LoadResult(reason=skip_reason)
        for pages in load.pages:
            if held is None or skip_reason:
                self._result.add(pages, None)
                continue
            for obj in held.groups[pages.group]:
                sections = obj.sections if by_layer else ()
                ticket = store.submit_get(
                    held.identity, obj.object_id, obj.pool, pages, seconds, sections, stream
                )
                self._reads.append((pages, ticket))

    def poll(self, now: float) -> LoadResult | None:
        """Returns the result once all reads are done, else None. Does not wait, unless polling a
        read fails: that read is then cancelled and awaited. Cancels the remaining reads after the
        deadline.
        """
        while self._reads:
            pages, ticket = self._reads[-1]
            if ticket is not None and not self._store.is_done(ticket):
                if now >= self._deadline and not self._cancel_requested:
                    self._cancel_requested = True
                    for _, late in self._reads:
                        if late is not None:
                            self._store.request_cancel(late)
                return None
            self._add_read(pages, ticket, 0.0)
        return self._final_result()

    def wait_layer_group(self, number: int) -> None:
        """Waits until the layers of group `number` have arrived or their reads have failed. If
        neither happens before the deadline, marks the load as missed, because the layers are then
        computed without their data.
        """
        for _, ticket in self._reads:
            left = max(self._deadline - monotonic(), 0.0)
            if ticket is not None and not self._store.wait_section(ticket, number, left):
                self.mark_missed("deadline")

    def mark_missed(self, reason: str) -> None:
        """Makes all pages of the load count as missed, for `reason`: layers were computed before
        their pages arrived, or the weights changed.
        """
        self._miss_reason = self._miss_reason or reason

    def wait(self) -> LoadResult:
        """Waits for the reads until the deadline, then cancels the remaining reads, and waits until
        the kernel no longer writes to the blocks.
        """
        while self._reads:
            pages, ticket = self._reads[-1]
            self._add_read(pages, ticket, max(self._deadline - monotonic(), 0.0))
        return self._final_result()

    def _final_result(self) -> LoadResult:
        """Returns the result; all pages are unfilled if the load was marked as missed."""
        if self._miss_reason:
            self._result = LoadResult(reason=self._miss_reason)
            for pages in self.load.pages:
                self._result.add(pages, None)
        return self._result

    def cancel(self) -> None:
        """Cancels all reads, and waits until the kernel no longer writes to the blocks."""
        while self._reads:
            ticket = self._reads[-1][1]
            if ticket is not None:
                self._store.cancel_and_wait(ticket)
            self._reads.pop()

    def _add_read(self, pages: PageBlocks, ticket: "Ticket | None", timeout: float) -> None:
        """Waits for the last read, cancels it after `timeout`, and adds its outcome to the result.
        The read stays in the list until its memory is free, even if a signal interrupts the wait.
        """
        outcome = None
        if ticket is not None:
            outcome = self._store.wait(ticket, timeout)
            if outcome is None:
                outcome = self._store.cancel_and_wait(ticket)
        self._reads.pop()
        self._result.add(pages, outcome)


@dataclass(slots=True)
class SaveResult:
    """Outcome of a save. `pages`: leading pages of which all objects that this worker writes are
    stored. `reason`: why a page was not stored; "" if all pages are stored. `again`: the save may
    be repeated.
    """

    pages: int
    bytes: int = 0
    reason: str = ""
    again: bool = False


class PendingSave:
    """A save in progress: `tickets` of the objects that this worker stores. `refusal`: why a write
    could not be started; "" if all writes were started.
    """

    def __init__(self, store: VllmStore, held: HeldObjects, save: Save, memory: KvMemory) -> None:
        self.save = save
        # vLLM frees blocks that the window has passed, although their request still runs.
        self.is_windowed = held.identity.groups[save.pages.group].reach.tokens is not None
        self._memory = memory
        self._is_protected = False
        self.tickets: list[Ticket] = []
        self.refusal = ""
        self._store = store
        for obj in held.groups[save.pages.group]:
            if not obj.is_writer:
                continue
            ticket = store.submit_put(
                held.identity,
                obj.object_id,
                obj.pool,
                save.pages,
                save.retain_until,
                memory.stream(),
            )
            if isinstance(ticket, str):
                self.refusal = ticket
                break
            self.tickets.append(ticket)

    def protect(self) -> None:
        """Makes the engine's later work wait until the writes have read the blocks, or cancels a
        write for which this is not possible.
        """
        if not self._is_protected:
            self._is_protected = True
            for ticket in self.tickets:
                self._store.protect(self._memory, ticket)

    def poll(self) -> SaveResult | None:
        """Returns the result once all writes are done, else None. Does not wait, unless polling a
        write fails: that write is then cancelled and awaited.
        """
        if not all(map(self._store.is_done, self.tickets)):
            return None
        count = len(self.save.pages.keys)
        # After a refusal an object has no ticket, so no page has all its objects stored.
        result = SaveResult(count)
        if self.refusal:
            result = SaveResult(0, 0, self.refusal, again=self.refusal in TRANSIENT)
        for ticket in self.tickets:
            outcome = self._store.wait(ticket, 0.0)
            stored = outcome.pages if outcome is not None else 0
            result.bytes += outcome.bytes if outcome is not None else 0
            if stored < count:
                result.reason = (outcome.reason if outcome is not None else "") or "error"
                result.again = result.again or result.reason in TRANSIENT
                result.pages = min(result.pages, stored)
        return result
