"""The worker's side: moves pages between the store and the engine's KV memory.

Invariants:
* Of loads that a step waits for, every block of a layer is filled and verified when `await_layer`
  returns, or reported as failed when the step is over. Where the engine was not yet seen to
  announce all its layers, they are over when `load` returns. Loads `asynchronous` are reported once, when
  nothing of them is being read any more: until then vLLM gives their blocks to nobody else.
* Saves are copied when `save` returns: the engine may overwrite the blocks at once.
* Nothing that was computed in a step in which a load that it waited for failed is saved: what was
  computed on top of a block that was not filled is worthless, and requests share blocks.
* Nothing is loaded or saved while any worker's weights are others than those that the epoch began
  with. A step that was planned before the change is no exception.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from ritornello.vllm.handshake import ShardFacts, WorkerRank
from ritornello.vllm.identity import Identity
from ritornello.vllm.layout import CacheTensor, LayoutError
from ritornello.vllm.metadata import IDLE, Load, Save, StepMetadata, WorkerReport
from ritornello.vllm.meter import Meter
from ritornello.vllm.shard import Object, Shard
from ritornello.vllm.store import VllmStore
from ritornello.vllm.transfer import LoadResult, PendingLoad
from ritornello.vllm.weights import watch

if TYPE_CHECKING:
    from ritornello._core import Ticket

logger = logging.getLogger("vllm.ritornello")

# A load that takes longer than this is slower than computing; the request goes on without it.
LOAD_SECONDS = 10.0
# How long a stopping engine waits for its last saves.
CLOSE_SECONDS = 10.0
# Reasons for which a save may be asked for again: the next step may have room.
TRANSIENT = frozenset({"staging_full"})
CHANGED = "weights_changed"
NOTHING = WorkerReport()


@dataclass(slots=True)
class PendingSave:
    """A save on its way to the disk, in as many objects as this worker stores of its pages."""

    save: Save
    tickets: list["Ticket"]


class WorkerSide:
    """`groups`: layers and KV heads of each KV cache group on this worker. Pages are counted by the
    worker at (0, 0) alone, and what went wrong with them by every one.
    """

    def __init__(
        self,
        store: VllmStore,
        blocks: int,
        groups: list[tuple[list[str], int]],
        meter: Meter,
        place: WorkerRank = (0, 0),
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._groups = groups
        self._meter = meter
        self._place = place
        self._counts = place == (0, 0)
        self._shard: Shard | None = None
        self._identity: Identity | None = None
        # Changes of the weights that the identity's epoch covers.
        self._covered = b""
        self._objects: list[list[Object]] | None = None
        # What this step waits for, and how many groups of layers of it have come.
        self._step_loads: list[PendingLoad] = []
        self._groups_ready = 0
        # To which group a layer belongs, where there are several; the layers that were never yet
        # announced, and those of this step that still are to be.
        self._group_of: dict[str, int] = {}
        self._unannounced: set[str] = set()
        self._layers_due: set[str] = set()
        self._async_loads: list[PendingLoad] = []
        self._pending_saves: deque[PendingSave] = deque()
        self._failed: set[int] = set()
        self._step_failed = False
        self._finished_sending: set[str] = set()
        self._report = WorkerReport()
        self._step_began = self._step_read_seconds = 0.0

    def register(self, caches: Mapping[str, CacheTensor]) -> None:
        """The engine's KV memory, which stays where it is for as long as this side is used."""
        try:
            self._shard = Shard(self._place, self._blocks, self._groups, caches)
        except LayoutError as error:
            self._refuse(str(error))
        except Exception as error:  # the core itself could not be loaded, or refused the memory
            self._refuse(f"the KV memory cannot be used ({error})")

    def facts(self) -> ShardFacts:
        if self._shard is None:
            return ShardFacts(refusal=self._report.refusal or "no KV caches were registered")
        return self._shard.facts()

    def begin_step(self, metadata: StepMetadata = IDLE) -> None:
        """A step begins. Every worker looks at its weights before it computes pages to be saved, so
        that all of them know of a change by the time one of them saves.
        """
        self._step_began, self._step_read_seconds = perf_counter(), 0.0
        if metadata.saves:
            self._weights_changed()

    def load(self, metadata: StepMetadata) -> None:
        """Begins to fill the blocks that this step needs, side by side, and those of loads `asynchronous`;
        waits for the former where no layer will.
        """
        self._finish_step_loads()
        self._step_failed = False
        # In the first step, whatever it does: by then the scheduler's side owns the store, and the
        # first load need not wait for the store to open.
        self._store.open()
        self._set_identity(metadata)
        if not metadata.loads:
            return
        begun = perf_counter()
        self._groups_ready = 0
        self._layers_due = set(self._group_of)
        for load in metadata.loads:
            pending = self._start_load(load)
            (self._async_loads if load.asynchronous else self._step_loads).append(pending)
            mode = "apart" if load.asynchronous else "layer" if pending.by_layer else "step"
            self._meter.add(f"{mode}_loads", 1 if self._counts else 0)
        self._record_wait(begun)
        if not self._by_layer:
            self._finish_step_loads()

    def await_layer(self, name: str) -> None:
        """A layer is about to run: waits for what it needs. Told of every layer in every step."""
        if not self._step_loads:
            self._unannounced.discard(name)
            return
        self._layers_due.discard(name)
        group = self._group_of.get(name, len(self._group_of))
        if group < self._groups_ready:
            return
        begun = perf_counter()
        for pending in self._step_loads:
            pending.wait_group(group)
        self._groups_ready = group + 1
        self._meter.add("layer_wait_seconds", self._record_wait(begun))
        self._meter.hook(begun)

    @property
    def _by_layer(self) -> bool:
        """Whether loads come layer by layer: there are several groups, and all layers are known to
        be announced before they run. What runs unannounced would read blocks that are not filled.
        """
        return bool(self._group_of) and not self._unannounced

    def take_completed_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose load apart is over, and those of them to which not everything came. Where
        there is one KV cache group the blocks that did not come are told as well.
        """
        # With drafts vLLM asks before `save`: what failed in this step belongs to its outcome.
        self._finish_step_loads()
        over: set[str] = set()
        failed: set[str] = set()
        now = monotonic()
        changed = bool(self._async_loads) and self._weights_changed()
        for pending in list(self._async_loads):
            if changed:
                pending.miss(CHANGED)
            result = pending.poll(now)
            if result is None:
                continue
            self._async_loads.remove(pending)
            request = pending.load.request
            self._record_time(pending)
            over.add(request)
            if self._record_result(pending.load, result):
                failed.add(request)
                if len(self._groups) == 1:
                    self._failed.update(block for _, _, block in result.bad)
        return over, failed

    def save(self, metadata: StepMetadata) -> None:
        """Takes copies of the blocks this step has filled, when its loads are over."""
        self._finish_step_loads()
        self._report.step = metadata.step
        self._finished_sending.update(metadata.finished_sending)
        if metadata.request_facts:
            self._report.facts[self._place] = self.facts()
        if metadata.prefill is not None:
            seconds = perf_counter() - self._step_began - self._step_read_seconds
            self._report.prefill = (*metadata.prefill, seconds)
        if self._pending_saves:
            self._complete_saves()
        self._store.report_stats()
        if not metadata.saves:
            return
        objects, identity = self._objects, self._identity
        # The saves of a numbered step were computed in earlier steps.
        spoilt = self._step_failed and not metadata.step
        changed = self._weights_changed()
        if changed or spoilt or objects is None or identity is None:
            why = CHANGED if changed else "spoilt" if spoilt else "refused"
            for save in metadata.saves:
                self._record_skipped(save, 0, why, again=spoilt and not changed)
            return
        begun = perf_counter()
        for save in metadata.saves:
            pages = save.pages
            tickets = []
            for held in objects[pages.part]:
                if not held.is_writer:
                    continue
                ticket = self._store.submit_put(
                    identity, held.piece, held.pool, pages, save.retain_until
                )
                if ticket is None:
                    self._record_skipped(save, 0, "error")
                    break
                tickets.append(ticket)
            if tickets:
                self._pending_saves.append(PendingSave(save, tickets))
        self._meter.add("save_seconds", perf_counter() - begun)

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def take_finished_sending(self) -> set[str]:
        """Returns finished requests whose blocks this worker no longer reads."""
        sent, self._finished_sending = self._finished_sending, set()
        return sent

    def take_report(self) -> WorkerReport | None:
        report = self._report
        if report == NOTHING:
            return None
        self._report = WorkerReport()
        return report

    def close(self) -> None:
        """Gives up what is still being read, and lets the last saves land, within a bound: they
        are copies, the engine's memory may go before them.
        """
        for pending in (*self._step_loads, *self._async_loads):
            pending.give_up()
        self._step_loads.clear()
        self._async_loads.clear()
        deadline = monotonic() + CLOSE_SECONDS
        while self._pending_saves and (left := deadline - monotonic()) > 0:
            for ticket in self._pending_saves[0].tickets:
                self._store.wait(ticket, left)
            self._complete_saves()
        self._pending_saves.clear()
        self._store.close()
        self._shard = self._objects = None

    def _set_identity(self, metadata: StepMetadata) -> None:
        """The identity, and where its objects lie here; it comes with the first work and whenever
        it has changed.
        """
        if metadata.identity is None:
            return
        self._identity, self._objects, self._group_of = metadata.identity, None, {}
        self._covered = metadata.covered
        if self._shard is None:
            return
        try:
            self._objects = self._shard.objects(metadata.identity)
            # With several KV cache groups no step waits for a load.
            if len(self._objects) == 1:
                groups = self._shard.groups(metadata.identity, 0)
                self._group_of = groups if len({*groups.values()}) > 1 else {}
            self._unannounced = set(self._group_of)
        except Exception as error:  # of the core too: memory that it refuses
            self._refuse(str(error))

    def _weights_changed(self) -> bool:
        """Whether this worker's weights, or those of another one, changed since the epoch began."""
        if not self._covered:
            return False
        watching = watch.current()
        if watching is None:
            return True
        watching.check()
        if watching.covered_by(self._covered):
            return False
        if not watching.shared:
            self._report.changes[watching.slot] = watching.count
        return True

    def _start_load(self, load: Load) -> PendingLoad:
        return PendingLoad(
            self._store,
            self._identity,
            self._objects,
            load,
            monotonic(),
            LOAD_SECONDS,
            by_layer=self._by_layer and not load.asynchronous,
            refused=CHANGED if self._weights_changed() else "",
        )

    def _finish_step_loads(self) -> None:
        """Waits for what this step needed, and accounts for it."""
        begun = perf_counter()
        while self._step_loads:
            pending = self._step_loads[0]
            if pending.by_layer and self._layers_due:
                self._disable_layer_loads(pending)
            result = pending.wait()
            load = self._step_loads.pop(0).load
            self._record_wait(begun)
            begun = perf_counter()
            self._record_time(pending)
            if self._record_result(load, result):
                self._step_failed = True
                self._failed.update(block for _, _, block in result.bad)

    def _disable_layer_loads(self, pending: PendingLoad) -> None:
        """Layers ran unannounced in this step, perhaps on blocks that were not filled."""
        pending.miss("unannounced")
        if self._group_of:
            logger.warning(
                "ritornello: %s ran unannounced; loads come before the first layer from now on",
                min(self._layers_due),
            )
        self._group_of = {}

    def _record_wait(self, begun: float) -> float:
        waited = perf_counter() - begun
        self._step_read_seconds += waited
        self._meter.add("load_seconds", waited)
        return waited

    def _record_time(self, pending: PendingLoad) -> None:
        """What a load cost: the time it took, or, layer by layer, what the step waited."""
        if self._store.wants_timings:
            load_seconds = (
                self._step_read_seconds if pending.by_layer else monotonic() - pending.begun
            )
            self._report.load_seconds[pending.load.request] = load_seconds
            self._report.loads += self._store.take_loads()

    def _record_result(self, load: Load, result: LoadResult) -> bool:
        """Whether something did not come."""
        asked = sum(len(pages.keys) for pages in load.pages)
        self._meter.add("loaded_pages", (asked - len(result.bad)) if self._counts else 0)
        self._meter.add("loaded_bytes", result.bytes)
        if not result.bad:
            return False
        for part in {part for part, _, _ in result.bad}:
            first = min(place for p, place, _ in result.bad if p == part)
            self._report.unsaved.append((load.request, part, first))
        self._report.failed.add(load.request)
        self._meter.add("failed_pages", len(result.bad))
        self._meter.missed(result.reason, len(result.bad))
        return True

    def _complete_saves(self) -> None:
        """Accounts for the saves that have landed; they land in order, or nearly."""
        while self._pending_saves and all(map(self._store.is_done, self._pending_saves[0].tickets)):
            pending = self._pending_saves.popleft()
            pages, again, reason = len(pending.save.pages.keys), False, ""
            for ticket in pending.tickets:
                outcome = self._store.wait(ticket, 0.0)
                stored = outcome.pages if outcome is not None else 0
                self._meter.add("saved_bytes", outcome.bytes if outcome is not None else 0)
                if stored < len(pending.save.pages.keys):
                    reason = (outcome.reason if outcome is not None else "") or "error"
                    again = again or reason in TRANSIENT
                    pages = min(pages, stored)
            self._meter.add("saved_pages", pages if self._counts else 0)
            if reason:
                self._record_skipped(pending.save, pages, reason, again=again)

    def _record_skipped(self, save: Save, stored: int, reason: str, *, again: bool = False) -> None:
        """Pages of a save that did not reach the store; a later prefill will offer them anew."""
        pages = save.pages
        self._meter.skipped(reason, len(pages.keys) - stored)
        if again:
            self._report.unsaved.append((save.request, pages.part, pages.first + stored))

    def _refuse(self, why: str) -> None:
        self._report.refusal = why
        logger.warning("ritornello: %s", why)
