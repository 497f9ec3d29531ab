"""The worker's side: moves pages between the store and the engine's KV memory.

Invariants:
* Loads that a step waits for: every block of a layer is filled and verified when `await_layer`
  returns, or reported as failed at the end of the step. Until the engine has called `await_layer`
  once for each of its layers, these loads end before `load` returns.
* An asynchronous load is reported once, when all its reads are done: until then vLLM does not reuse
  its blocks.
* In host memory, saves are copied before `save` returns: the engine may overwrite the blocks
  immediately. On a device they are copied after the step; before a step in which the engine may
  overwrite blocks that a save has not read, the step is made to wait (`PendingSave.protect`).
* If a load fails that a step waited for, no page of the step is saved, because pages computed from
  an unfilled block are wrong, and requests share blocks. Exception: in a numbered step
  (`StepMetadata.step` is not 0, inside `MultiConnector`) the pages to save were filled in earlier
  steps whose outcome is known (see `deferred`), so a failed load does not stop their saves.
* No page is loaded or saved while this worker knows of a change of weights since the epoch began
  (see `_weights_changed`), even in a step that was planned before the change.
"""

from collections import deque
from collections.abc import Mapping
from time import monotonic, perf_counter

from ritornello.errors import RetryError
from ritornello.vllm.handshake import ShardFacts, WorkerRank
from ritornello.vllm.identity import Identity
from ritornello.vllm.kv_memory import KvMemory
from ritornello.vllm.layout import CacheTensor, LayoutError
from ritornello.vllm.metadata import IDLE, Load, StepMetadata
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.shard import HeldObjects, Shard
from ritornello.vllm.step_loads import StepLoads
from ritornello.vllm.step_results import StepResults
from ritornello.vllm.store import BUSY, VllmStore
from ritornello.vllm.transfer import PendingLoad, PendingSave
from ritornello.vllm.weights import watch

# Minimum deadline of a load; a long load may take up to 60 seconds (`Store.time_limit`). A load
# that takes longer is assumed to be slower than computing, and the request continues without it.
LOAD_SECONDS = 10.0
# Maximum time that a stopping engine waits for its last saves.
CLOSE_SECONDS = 10.0
WEIGHTS_CHANGED = "weights_changed"
# Pause between attempts to register the KV memory with a device that lacks memory for this.
REGISTER_SECONDS = 5.0


class WorkerSide:
    """Loads and saves of one worker. `groups`: the layers and the number of KV heads that this
    worker has of each KV cache group.
    """

    def __init__(
        self,
        store: VllmStore,
        blocks: int,
        groups: list[tuple[list[str], int]],
        meter: StepMeter,
        worker_rank: WorkerRank = (0, 0),
        *,
        memory: KvMemory | None = None,
    ) -> None:
        self._store = store
        self._meter = meter
        self._shard = Shard(worker_rank, blocks, groups, memory)
        store.memory_problem = self._shard.kv_memory.problem
        # None until the first identity has arrived, and whenever this worker's memory cannot be
        # used.
        self._held: HeldObjects | None = None
        # The identity whose objects are still to be located in the memory, and the earliest time of
        # the next attempt.
        self._unlocated: Identity | None = None
        self._locate_at = 0.0
        # The counts of weight changes when the identity's epoch began.
        self._covered = b""
        self.results = StepResults(store, meter, worker_rank, len(groups))
        self.step_loads = StepLoads(meter, self.results)
        self._async_loads: list[PendingLoad] = []
        self._pending_saves: deque[PendingSave] = deque()
        self._step_began = 0.0

    def register(self, caches: Mapping[str, CacheTensor]) -> None:
        """Takes the engine's KV memory, which must stay in place while this object is in use."""
        try:
            self._shard.register(caches)
        except LayoutError as error:
            self.results.set_unsupported(str(error))
        except Exception as error:  # the core did not load, or refused the memory
            self.results.set_unsupported(f"the KV memory cannot be used ({error})")

    def facts(self) -> ShardFacts:
        memory, reason = self._shard.memory, self.results.report.unsupported_reason
        if memory:
            return ShardFacts(memory)
        return ShardFacts(unsupported_reason=reason or "no KV caches were registered")

    def begin_step(self, metadata: StepMetadata = IDLE) -> None:
        """Begins a step. Makes the step wait for earlier saves that may still read blocks which the
        engine may reuse. If the step saves pages, checks the weights first, so that every worker
        has detected a change before any worker saves.
        """
        self._step_began, self.step_loads.waited_seconds = perf_counter(), 0.0
        freed = set(metadata.freed)
        for pending in self._pending_saves:
            if pending.is_windowed or pending.save.request in freed:
                pending.protect()
        if metadata.saves:
            self._weights_changed()

    def load(self, metadata: StepMetadata) -> None:
        """Starts the loads of this step, concurrently. Waits for the synchronous loads here, unless
        they may arrive layer by layer (`LayerGroups.announced`).
        """
        self.step_loads.finish()
        self.step_loads.failed = False
        # Open the store in the first step, even if it loads nothing. The scheduler's side has
        # opened the store before, so this worker does not become the owner, and the first load does
        # not wait for the opening.
        self._store.open()
        self._set_identity(metadata)
        if not metadata.loads:
            return
        self._check_memory()
        started = perf_counter()
        layer_groups = self.step_loads.layer_groups
        layer_groups.begin_step()
        for load in metadata.loads:
            pending = self._start_load(load)
            if load.asynchronous:
                self._async_loads.append(pending)
            else:
                self.step_loads.add(pending)
            mode = "apart" if load.asynchronous else "layer" if pending.by_layer else "step"
            self.results.count_load(mode)
        self.step_loads.record_wait(started)
        if not layer_groups.announced:
            self.step_loads.finish()

    def take_completed_loads(self) -> tuple[set[str], set[str]]:
        """Returns requests whose asynchronous load ended, and the requests among them whose load
        failed.
        """
        # With draft tokens vLLM calls `take_completed_loads` before `save`, so the step's loads
        # must end here: their failures belong to the outcome of this step.
        self.step_loads.finish()
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
            finished.add(pending.load.request)
            seconds = monotonic() - pending.started
            if self.results.record_load(pending.load, result, seconds):
                failed.add(pending.load.request)
        return finished, failed

    def save(self, metadata: StepMetadata) -> None:
        """Ends the loads of this step, then starts the puts of its saves, one for each object that
        this worker writes.
        """
        self.step_loads.finish()
        report = self.results.report
        report.step = metadata.step
        self.results.finished_sending.update(metadata.finished_sending)
        if metadata.request_facts:
            report.facts[self._shard.worker_rank] = self.facts()
        if metadata.prefill is not None:
            waited = self.step_loads.waited_seconds
            report.prefill = (*metadata.prefill, perf_counter() - self._step_began - waited)
        self._complete_saves()
        self._store.report_stats()
        if metadata.saves:
            self._submit_saves(metadata)
        # vLLM may give the blocks of these requests to other requests after this step, and does not
        # name the requests again. Their saves may have been submitted in earlier steps.
        sent = set(metadata.finished_sending)
        for pending in self._pending_saves:
            if pending.save.request in sent:
                pending.protect()

    def close(self) -> None:
        """Cancels reads, and waits for the last saves, at most `CLOSE_SECONDS`. The engine may then
        free its memory: a save that is not done has copied its bytes, or keeps the memory that it
        still reads.
        """
        self.step_loads.cancel()
        for pending in self._async_loads:
            pending.cancel()
        self._async_loads.clear()
        deadline = monotonic() + CLOSE_SECONDS
        while self._pending_saves and (left := deadline - monotonic()) > 0:
            for ticket in self._pending_saves[0].tickets:
                self._store.wait(ticket, left)
            self._complete_saves()
        self._pending_saves.clear()
        self._store.close()
        self._held = None
        self._shard.release()

    def _submit_saves(self, metadata: StepMetadata) -> None:
        self._check_memory()
        # The pages that a numbered step saves were filled in earlier steps.
        step_failed = self.step_loads.failed and not metadata.step
        reason = self._skip_reason() or ("load_failed" if step_failed else "")
        if reason or self._held is None:
            again = reason in (BUSY, "load_failed")
            for save in metadata.saves:
                self.results.record_skipped(save, 0, reason or "unsupported", again=again)
            return
        started = perf_counter()
        for save in metadata.saves:
            pending = PendingSave(self._store, self._held, save, self._shard.kv_memory)
            # A worker that writes no object of a page does not count the page as saved.
            if pending.tickets or pending.refusal:
                self._pending_saves.append(pending)
        self._meter.add("save_seconds", perf_counter() - started)

    def _check_memory(self) -> None:
        """Stops all loads and saves if the device of the KV memory is broken, and reports the
        problem, so that the scheduler promises no further hits.
        """
        problem = self._shard.kv_memory.problem() if self._held is not None else ""
        if problem:
            self._held = None
            self.results.set_unsupported(problem)

    def _set_identity(self, metadata: StepMetadata) -> None:
        """Takes the identity, which comes with the first work and after every change, and locates
        its objects in this worker's memory. If a device lacks memory to register the objects, tries
        again in later steps.
        """
        if metadata.identity is not None:
            self._held, self._covered = None, metadata.covered
            self.step_loads.layer_groups.set({})
            self._unlocated = metadata.identity if self._shard.memory else None
            self._locate_at = 0.0
        if self._unlocated is not None and monotonic() >= self._locate_at:
            self._locate_objects(self._unlocated)

    def _locate_objects(self, identity: Identity) -> None:
        try:
            held = self._shard.objects(identity)
            # With several KV cache groups, all loads are asynchronous.
            if len(held.groups) == 1:
                self.step_loads.layer_groups.set(self._shard.layer_groups(identity, 0))
            self._held = held
        except RetryError as error:
            self._locate_at = monotonic() + REGISTER_SECONDS
            self.results.set_unregistered(f"the KV memory cannot be registered yet ({error})")
            return
        except Exception as error:  # the core may refuse the memory
            self.results.set_unsupported(str(error))
        self._unlocated = None
        self.results.set_unregistered("")

    def _weights_changed(self) -> bool:
        """Returns whether weights changed since the epoch began: the weights of any worker if this
        process shares memory with the scheduler's process, otherwise the weights of this worker.
        """
        if not self._covered:
            return False
        weights = watch.current()
        if weights is None:
            return True
        weights.check()
        if weights.covered_by(self._covered):
            return False
        if not weights.shared:
            self.results.report.changes[weights.slot] = weights.count
        return True

    def _start_load(self, load: Load) -> PendingLoad:
        started, nbytes = monotonic(), 0
        held = self._held
        for pages in load.pages:
            objects = held.groups[pages.group] if held is not None else ()
            nbytes += len(pages.keys) * sum(obj.pool.page_bytes for obj in objects)
        return PendingLoad(
            self._store,
            held,
            load,
            started,
            self._store.time_limit(nbytes, LOAD_SECONDS),
            by_layer=self.step_loads.layer_groups.announced and not load.asynchronous,
            skip_reason=self._skip_reason(),
            stream=self._shard.kv_memory.stream(),
        )

    def _skip_reason(self) -> str:
        """Returns why pages can currently be neither loaded nor saved; "" if they can be, or if the
        KV memory of this worker is not supported (`_held` is None then).
        """
        if self._weights_changed():
            return WEIGHTS_CHANGED
        return BUSY if self._unlocated is not None else ""

    def _complete_saves(self) -> None:
        """Records finished saves in order, up to the first save that is in progress."""
        while self._pending_saves:
            result = self._pending_saves[0].poll()
            if result is None:
                return
            self.results.record_save(self._pending_saves.popleft().save, result)
