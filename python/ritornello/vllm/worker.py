"""The worker's side: moves pages between the store and the engine's KV memory.

Invariants:
* Loads that a step waits for: every block of a layer is filled and verified when `await_layer`
  returns, or reported as failed at the end of the step. Until the engine has announced all its
  layers once, these loads end before `load` returns.
* An asynchronous load is reported once, when all its reads are done: until then vLLM does not reuse
  its blocks.
* Saves are copied before `save` returns: the engine may overwrite the blocks immediately.
* In a step in which a load failed that the step waited for, no page is saved: pages computed on top
  of an unfilled block are worthless, and requests share blocks.
* No page is loaded or saved while the weights of any worker differ from the weights at the
  beginning of the epoch, even in a step that was planned before the change.
"""

import logging
from collections import deque
from collections.abc import Mapping
from time import monotonic, perf_counter

from ritornello.vllm.handshake import ShardFacts, WorkerRank
from ritornello.vllm.identity import Identity
from ritornello.vllm.layer_groups import LayerGroups
from ritornello.vllm.layout import CacheTensor, LayoutError
from ritornello.vllm.metadata import IDLE, Load, Save, StepMetadata, WorkerReport
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.shard import PageObject, Shard
from ritornello.vllm.store import VllmStore
from ritornello.vllm.transfer import LoadResult, PendingLoad, PendingSave
from ritornello.vllm.weights import watch

logger = logging.getLogger("vllm.ritornello")

# Deadline of a load: a slower load takes longer than computing, and the request continues without
# it.
LOAD_SECONDS = 10.0
# Maximum time a stopping engine waits for its last saves.
CLOSE_SECONDS = 10.0
WEIGHTS_CHANGED = "weights_changed"
EMPTY_REPORT = WorkerReport()


class WorkerSide:
    """Loads and saves of one worker. `groups`: layers and KV heads of each KV cache group here. The
    worker at (0, 0) counts pages; every worker counts failures.
    """

    def __init__(
        self,
        store: VllmStore,
        blocks: int,
        groups: list[tuple[list[str], int]],
        meter: StepMeter,
        worker_rank: WorkerRank = (0, 0),
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._groups = groups
        self._meter = meter
        self._worker_rank = worker_rank
        self._counts_pages = worker_rank == (0, 0)
        self._shard: Shard | None = None
        self._identity: Identity | None = None
        # The weight changes that the identity's epoch covers.
        self._covered = b""
        self._objects: list[list[PageObject]] | None = None
        # Loads that this step waits for.
        self._step_loads: list[PendingLoad] = []
        self._layer_groups = LayerGroups()
        self._async_loads: list[PendingLoad] = []
        self._pending_saves: deque[PendingSave] = deque()
        self._failed: set[int] = set()
        self._step_failed = False
        self._finished_sending: set[str] = set()
        self._report = WorkerReport()
        self._step_began = self._step_read_seconds = 0.0

    def register(self, caches: Mapping[str, CacheTensor]) -> None:
        """Takes the engine's KV memory, which must stay in place while this object is in use."""
        try:
            self._shard = Shard(self._worker_rank, self._blocks, self._groups, caches)
        except LayoutError as error:
            self._set_unsupported(str(error))
        except Exception as error:  # the core did not load, or refused the memory
            self._set_unsupported(f"the KV memory cannot be used ({error})")

    def facts(self) -> ShardFacts:
        if self._shard is None:
            return ShardFacts(
                unsupported_reason=self._report.unsupported_reason or "no KV caches were registered"
            )
        return self._shard.facts()

    def begin_step(self, metadata: StepMetadata = IDLE) -> None:
        """Begins a step. Checks the weights before pages are computed that will be saved: all
        workers have noticed a change by the time one of them saves.
        """
        self._step_began, self._step_read_seconds = perf_counter(), 0.0
        if metadata.saves:
            self._weights_changed()

    def load(self, metadata: StepMetadata) -> None:
        """Starts the loads of this step, concurrently. Waits for the loads for which no layer will
        wait.
        """
        self._finish_step_loads()
        self._step_failed = False
        # Opened in the first step, even if it loads nothing: the scheduler's side then owns the
        # store, and the first load does not wait for the opening.
        self._store.open()
        self._set_identity(metadata)
        if not metadata.loads:
            return
        started = perf_counter()
        self._layer_groups.begin_step()
        for load in metadata.loads:
            pending = self._start_load(load)
            (self._async_loads if load.asynchronous else self._step_loads).append(pending)
            mode = "apart" if load.asynchronous else "layer" if pending.by_layer else "step"
            self._meter.add(f"{mode}_loads", 1 if self._counts_pages else 0)
        self._record_wait(started)
        if not self._layer_groups.announced:
            self._finish_step_loads()

    def await_layer(self, name: str) -> None:
        """Waits for the data of a layer that is about to run. Called for every layer in every
        step.
        """
        if not self._step_loads:
            self._layer_groups.note(name)
            return
        layer_group = self._layer_groups.reach(name)
        if layer_group is None:
            return
        started = perf_counter()
        for pending in self._step_loads:
            pending.wait_layer_group(layer_group)
        self._layer_groups.set_arrived(layer_group)
        self._meter.add("layer_wait_seconds", self._record_wait(started))
        self._meter.hook(started)

    def take_completed_loads(self) -> tuple[set[str], set[str]]:
        """Returns requests whose asynchronous load ended, and the requests among them whose load
        failed. With one KV cache group, also records the blocks that failed.
        """
        # With draft tokens vLLM calls this before `save`: failures of this step belong to its
        # outcome.
        self._finish_step_loads()
        finished: set[str] = set()
        failed: set[str] = set()
        now = monotonic()
        changed = bool(self._async_loads) and self._weights_changed()
        for pending in list(self._async_loads):
            if changed:
                pending.mark_missed(WEIGHTS_CHANGED)
            result = pending.poll(now)
            if result is None:
                continue
            self._async_loads.remove(pending)
            request = pending.load.request
            self._record_time(pending)
            finished.add(request)
            if self._record_result(pending.load, result):
                failed.add(request)
                if len(self._groups) == 1:
                    self._failed.update(block for _, _, block in result.unfilled)
        return finished, failed

    def save(self, metadata: StepMetadata) -> None:
        """Ends the loads of this step, then copies the blocks that the step has filled."""
        self._finish_step_loads()
        self._report.step = metadata.step
        self._finished_sending.update(metadata.finished_sending)
        if metadata.request_facts:
            self._report.facts[self._worker_rank] = self.facts()
        if metadata.prefill is not None:
            seconds = perf_counter() - self._step_began - self._step_read_seconds
            self._report.prefill = (*metadata.prefill, seconds)
        if self._pending_saves:
            self._complete_saves()
        self._store.report_stats()
        if not metadata.saves:
            return
        objects, identity = self._objects, self._identity
        # Saves of a numbered step were computed in earlier steps.
        step_failed = self._step_failed and not metadata.step
        changed = self._weights_changed()
        if changed or step_failed or objects is None or identity is None:
            reason = WEIGHTS_CHANGED if changed else "load_failed" if step_failed else "unsupported"
            for save in metadata.saves:
                self._record_skipped(save, 0, reason, again=step_failed and not changed)
            return
        started = perf_counter()
        for save in metadata.saves:
            pending = PendingSave(self._store, identity, objects[save.pages.group], save)
            if pending.failed:
                self._record_skipped(save, 0, "error")
            if pending.tickets:
                self._pending_saves.append(pending)
        self._meter.add("save_seconds", perf_counter() - started)

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def take_finished_sending(self) -> set[str]:
        """Returns finished requests whose blocks this worker no longer reads."""
        sent, self._finished_sending = self._finished_sending, set()
        return sent

    def take_report(self) -> WorkerReport | None:
        report = self._report
        if report == EMPTY_REPORT:
            return None
        self._report = WorkerReport()
        return report

    def close(self) -> None:
        """Cancels reads, and waits for the last saves, at most `CLOSE_SECONDS`. Saves are copies:
        they do not need the engine's memory.
        """
        for pending in (*self._step_loads, *self._async_loads):
            pending.cancel()
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
        """Takes the identity, which comes with the first work and after every change, and locates
        its objects in this worker's memory.
        """
        if metadata.identity is None:
            return
        self._identity, self._objects = metadata.identity, None
        self._layer_groups.set({})
        self._covered = metadata.covered
        if self._shard is None:
            return
        try:
            self._objects = self._shard.objects(metadata.identity)
            # With several KV cache groups, all loads are asynchronous.
            if len(self._objects) == 1:
                self._layer_groups.set(self._shard.layer_groups(metadata.identity, 0))
        except Exception as error:  # the core may refuse the memory
            self._set_unsupported(str(error))

    def _weights_changed(self) -> bool:
        """Returns whether the weights of this or another worker changed since the epoch began."""
        if not self._covered:
            return False
        weights = watch.current()
        if weights is None:
            return True
        weights.check()
        if weights.covered_by(self._covered):
            return False
        if not weights.shared:
            self._report.changes[weights.slot] = weights.count
        return True

    def _start_load(self, load: Load) -> PendingLoad:
        return PendingLoad(
            self._store,
            self._identity,
            self._objects,
            load,
            monotonic(),
            LOAD_SECONDS,
            by_layer=self._layer_groups.announced and not load.asynchronous,
            skip_reason=WEIGHTS_CHANGED if self._weights_changed() else "",
        )

    def _finish_step_loads(self) -> None:
        """Waits for the loads of this step and records their results."""
        started = perf_counter()
        while self._step_loads:
            pending = self._step_loads[0]
            if pending.by_layer and self._layer_groups.skipped:
                self._disable_layer_loads(pending)
            result = pending.wait()
            load = self._step_loads.pop(0).load
            self._record_wait(started)
            started = perf_counter()
            self._record_time(pending)
            if self._record_result(load, result):
                self._step_failed = True
                self._failed.update(block for _, _, block in result.unfilled)

    def _disable_layer_loads(self, pending: PendingLoad) -> None:
        """Marks a load as missed because layers ran unannounced, perhaps on unfilled blocks. Later
        loads end before the first layer.
        """
        pending.mark_missed("unannounced")
        name = self._layer_groups.disable()
        if name:
            logger.warning(
                "ritornello: %s ran unannounced; later loads end before the first layer", name
            )

    def _record_wait(self, started: float) -> float:
        waited = perf_counter() - started
        self._step_read_seconds += waited
        self._meter.add("load_seconds", waited)
        return waited

    def _record_time(self, pending: PendingLoad) -> None:
        """Records the cost of a load: its duration or, layer by layer, the time the step waited."""
        if self._store.wants_timings:
            load_seconds = (
                self._step_read_seconds if pending.by_layer else monotonic() - pending.started
            )
            self._report.load_seconds[pending.load.request] = load_seconds
            self._report.loads += self._store.take_loads()

    def _record_result(self, load: Load, result: LoadResult) -> bool:
        """Counts a load's pages. Returns whether some were not filled."""
        asked = sum(len(pages.keys) for pages in load.pages)
        self._meter.add("loaded_pages", (asked - len(result.unfilled)) if self._counts_pages else 0)
        self._meter.add("loaded_bytes", result.bytes)
        if not result.unfilled:
            return False
        for group in {group for group, _, _ in result.unfilled}:
            first = min(index for p, index, _ in result.unfilled if p == group)
            self._report.unsaved.append((load.request, group, first))
        self._report.failed.add(load.request)
        self._meter.add("failed_pages", len(result.unfilled))
        self._meter.missed(result.reason, len(result.unfilled))
        return True

    def _complete_saves(self) -> None:
        """Counts the saves that are done. Saves end nearly in order."""
        while self._pending_saves:
            result = self._pending_saves[0].poll()
            if result is None:
                return
            save = self._pending_saves.popleft().save
            self._meter.add("saved_bytes", result.bytes)
            self._meter.add("saved_pages", result.pages if self._counts_pages else 0)
            if result.reason:
                self._record_skipped(save, result.pages, result.reason, again=result.again)

    def _record_skipped(self, save: Save, stored: int, reason: str, *, again: bool = False) -> None:
        """Counts pages of a save that were not stored. If `again`, the scheduler offers them
        again.
        """
        pages = save.pages
        self._meter.skipped(reason, len(pages.keys) - stored)
        if again:
            self._report.unsaved.append((save.request, pages.group, pages.first + stored))

    def _set_unsupported(self, reason: str) -> None:
        self._report.unsupported_reason = reason
        logger.warning("ritornello: %s", reason)
