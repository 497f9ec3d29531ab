"""The worker's side: moves pages between the store and the engine's KV memory.

Invariants:
* Loads are over when `load` returns: every block is filled and verified, or reported as failed.
* Saves are copied when `save` returns: the engine may overwrite the blocks at once.
* Nothing is saved in a step in which a load failed: what was computed on top of a block that was
  not filled is worthless, and requests share blocks.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from ritornello.vllm.layout import CacheTensor, LayoutError, page_pool, spans
from ritornello.vllm.metadata import Load, Save, StepMetadata, WorkerReport
from ritornello.vllm.meter import Meter
from ritornello.vllm.store import QuietStore

if TYPE_CHECKING:
    from ritornello._core import Outcome, PagePool, Ticket

logger = logging.getLogger("vllm.ritornello")

# A load that takes longer than this is slower than computing; the request goes on without it.
LOAD_SECONDS = 10.0
# How long a stopping engine waits for its last saves.
CLOSE_SECONDS = 10.0
# Reasons for which a save may be asked for again: the next step may have room.
TRANSIENT = frozenset({"staging_full"})


@dataclass(slots=True)
class Flight:
    """A save on its way to the disk."""

    save: Save
    ticket: "Ticket"


class WorkerSide:
    def __init__(self, store: QuietStore, blocks: int, meter: Meter) -> None:
        self._store = store
        self._blocks = blocks
        self._meter = meter
        self._caches: Mapping[str, CacheTensor] = {}
        self._pool: PagePool | None = None
        # What still writes to the engine's memory; outlives `load` only where a signal ends that.
        self._reading: list[Ticket] = []
        self._flights: deque[Flight] = deque()
        self._failed: set[int] = set()
        self._spoilt = False
        self._report = WorkerReport()

    def register(self, caches: Mapping[str, CacheTensor]) -> None:
        """The engine's KV memory. The tensors are kept: the pool points into them."""
        try:
            found = spans(caches, self._blocks)
            self._pool = page_pool(found, self._blocks)
        except LayoutError as error:
            self._report.refusal = str(error)
            logger.warning("ritornello: %s", error)
            return
        except Exception as error:  # the core itself could not be loaded, or refused the memory
            self._report.refusal = f"the KV memory cannot be used ({error})"
            logger.warning("ritornello: %s", self._report.refusal)
            return
        self._caches = dict(caches)
        logger.info(
            "ritornello: %d blocks of %d bytes in %d pieces",
            self._blocks,
            self._pool.page_bytes,
            len(found),
        )

    def load(self, metadata: StepMetadata) -> None:
        """Fills the blocks of all loads of this step; they are read side by side."""
        self._spoilt = False
        # In the first step, whatever it does: by then the scheduler's side owns the store, and the
        # first load need not wait for the store to open.
        self._store.open()
        if not metadata.loads:
            return
        begun = perf_counter()
        deadline = monotonic() + LOAD_SECONDS
        flying = [(load, self._read(metadata, load)) for load in metadata.loads]
        for load, ticket in flying:
            outcome = self._landed(ticket, deadline) if ticket is not None else None
            self._account_load(load, outcome)
        for load in metadata.loads:
            self._store.release(load.lease)
        self._meter.add("load_seconds", perf_counter() - begun)

    def save(self, metadata: StepMetadata) -> None:
        """Takes copies of the blocks this step has filled."""
        if self._flights:
            self._collect()
        if not metadata.saves:
            return
        pool = self._pool_for(metadata)
        if self._spoilt or pool is None or metadata.identity is None:
            for save in metadata.saves:
                self._skip(save, 0, "spoilt" if self._spoilt else "refused", again=self._spoilt)
            return
        begun = perf_counter()
        for save in metadata.saves:
            pages = pool.pages(save.blocks)
            ticket = self._store.submit_put(
                metadata.identity, save.keys, pages, save.parent, save.retain_until
            )
            if ticket is None:
                self._skip(save, 0, "error")
            else:
                self._flights.append(Flight(save, ticket))
        self._meter.add("save_seconds", perf_counter() - begun)

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        report = self._report
        if not report.unsaved and not report.refusal:
            return None
        self._report = WorkerReport()
        return report

    def close(self) -> None:
        """Gives up what is still being read, and lets the last saves land, within a bound: they
        are copies, the engine's memory may go before them.
        """
        for ticket in self._reading:
            self._store.cancel(ticket)
        self._reading.clear()
        deadline = monotonic() + CLOSE_SECONDS
        while self._flights and (left := deadline - monotonic()) > 0:
            self._store.finish(self._flights[0].ticket, left)
            self._collect()
        self._flights.clear()
        self._store.close()
        self._pool = None
        self._caches = {}

    def _read(self, metadata: StepMetadata, load: Load) -> "Ticket | None":
        pool = self._pool_for(metadata)
        if pool is None or metadata.identity is None:
            return None
        pages = pool.pages(load.blocks)
        ticket = self._store.submit_get(metadata.identity, load.keys, pages, LOAD_SECONDS)
        if ticket is not None:
            self._reading.append(ticket)
        return ticket

    def _pool_for(self, metadata: StepMetadata) -> "PagePool | None":
        """The engine's memory, if it is what the scheduler side takes it to be."""
        pool, identity = self._pool, metadata.identity
        if pool is None or identity is None or pool.page_bytes == identity.page_bytes:
            return pool
        self._pool = None
        self._report.refusal = (
            f"a page has {pool.page_bytes} bytes in memory, {identity.page_bytes} by the model"
        )
        return None

    def _landed(self, ticket: "Ticket", deadline: float) -> "Outcome | None":
        outcome = self._store.finish(ticket, max(deadline - monotonic(), 0.0))
        if outcome is None:
            outcome = self._store.cancel(ticket)
        self._reading.remove(ticket)
        return outcome

    def _account_load(self, load: Load, outcome: "Outcome | None") -> None:
        asked = len(load.keys)
        filled: Sequence[bool] = outcome.ok if outcome is not None else [False] * asked
        failed = [block for block, ok in zip(load.blocks, filled, strict=True) if not ok]
        self._meter.add("loaded_pages", asked - len(failed))
        self._meter.add("loaded_bytes", outcome.bytes if outcome is not None else 0)
        if not failed:
            return
        self._spoilt = True
        self._failed.update(failed)
        self._report.unsaved.append((load.request, load.first + list(filled).index(False)))
        self._meter.add("failed_pages", len(failed))
        reason = outcome.reason if outcome is not None else ""
        self._meter.missed(reason or "error", len(failed))

    def _collect(self) -> None:
        """Accounts for the saves that have landed; they land in order, or nearly."""
        while self._flights and self._flights[0].ticket.done():
            flight = self._flights.popleft()
            outcome = self._store.finish(flight.ticket, 0.0)
            if outcome is None:
                self._skip(flight.save, 0, "error")
                continue
            self._meter.add("saved_pages", outcome.pages)
            self._meter.add("saved_bytes", outcome.bytes)
            if outcome.pages < len(flight.save.keys):
                reason = outcome.reason or "error"
                self._skip(flight.save, outcome.pages, reason, again=reason in TRANSIENT)

    def _skip(self, save: Save, stored: int, reason: str, *, again: bool = False) -> None:
        """Pages of a save that did not reach the store; a later prefill will offer them anew."""
        self._meter.skipped(reason, len(save.keys) - stored)
        if again:
            self._report.unsaved.append((save.request, save.first + stored))
