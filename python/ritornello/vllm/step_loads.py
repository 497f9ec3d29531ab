"""The loads that a step waits for: before its first layer, or layer by layer."""

import logging
from time import monotonic, perf_counter

from ritornello.vllm.layer_groups import LayerGroups
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.step_results import StepResults
from ritornello.vllm.transfer import PendingLoad

logger = logging.getLogger("vllm.ritornello")


class StepLoads:
    """The synchronous loads of one worker's current step. `failed`: one of these loads failed.
    `waited_seconds`: how long the step has waited for them so far.
    """

    def __init__(self, meter: StepMeter, results: StepResults) -> None:
        self.layer_groups = LayerGroups()
        self.failed = False
        self.waited_seconds = 0.0
        self._meter = meter
        self._results = results
        self._pending: list[PendingLoad] = []

    def add(self, pending: PendingLoad) -> None:
        self._pending.append(pending)

    def await_layer(self, name: str) -> None:
        """Waits for the data of a layer that is about to run."""
        if not self._pending:
            self.layer_groups.note(name)
            return
        layer_group = self.layer_groups.reach(name)
        if layer_group is None:
            return
        with self._meter.hook():
            started = perf_counter()
            for pending in self._pending:
                pending.wait_layer_group(layer_group)
            self.layer_groups.set_arrived(layer_group)
            self._meter.add("layer_wait_seconds", self.record_wait(started))

    def finish(self) -> None:
        """Waits for the loads and records their results. The recorded time of a load is its
        duration or, if it arrives layer by layer, the time that the step has so far waited for all
        loads.
        """
        started = perf_counter()
        while self._pending:
            pending = self._pending[0]
            if pending.by_layer and self.layer_groups.skipped:
                self._disable_layer_loads(pending)
            result = pending.wait()
            self._pending.pop(0)
            self.record_wait(started)
            started = perf_counter()
            seconds = self.waited_seconds if pending.by_layer else monotonic() - pending.started
            if self._results.record_load(pending.load, result, seconds):
                self.failed = True

    def record_wait(self, started: float) -> float:
        waited = perf_counter() - started
        self.waited_seconds += waited
        self._meter.add("load_seconds", waited)
        return waited

    def cancel(self) -> None:
        """Cancels all reads, and waits until the kernel no longer writes to the blocks."""
        for pending in self._pending:
            pending.cancel()
        self._pending.clear()

    def _disable_layer_loads(self, pending: PendingLoad) -> None:
        """Marks a load as missed because layers ran without a call of `await_layer`, perhaps on
        unfilled blocks. Later loads end before the first layer of their step runs.
        """
        pending.mark_missed("unannounced")
        name = self.layer_groups.disable()
        if name:
            logger.warning(
                "ritornello: layer %s ran unannounced, so that a load may have come too late; "
                "later loads end before the first layer",
                name,
            )
