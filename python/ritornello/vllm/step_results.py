"""The results of one worker: counts for the meter, and what the scheduler's side learns of each
step.
"""

import logging

from ritornello.vllm.handshake import WorkerRank
from ritornello.vllm.metadata import Load, Save, WorkerReport
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.store import VllmStore
from ritornello.vllm.transfer import LoadResult, SaveResult

logger = logging.getLogger("vllm.ritornello")

EMPTY_REPORT = WorkerReport()


class StepResults:
    """Results of one worker since the last calls of `take_*`. Only the first tensor-parallel
    rank of the first pipeline stage counts loads, loaded pages and saved pages, so that each page
    counts once. Every worker counts bytes and failed, missed and skipped pages. `groups`: the
    number of KV cache groups. `report` and `finished_sending` (finished requests whose blocks this
    worker no longer reads) may be added to until they are taken.
    """

    def __init__(
        self, store: VllmStore, meter: StepMeter, worker_rank: WorkerRank, groups: int
    ) -> None:
        self.report = WorkerReport()
        self.finished_sending: set[str] = set()
        self._store = store
        self._meter = meter
        self._counts_pages = worker_rank == (0, 0)
        self._one_group = groups == 1
        self._failed_blocks: set[int] = set()
        self._worker_rank = worker_rank
        # Why the memory is not registered; "" if it is.
        self._unregistered = ""

    def count_load(self, mode: str) -> None:
        """Counts a load that began: "apart" if it is asynchronous, "layer" if it arrives layer by
        layer, else "step".
        """
        self._meter.add(f"{mode}_loads", 1 if self._counts_pages else 0)

    def record_load(self, load: Load, result: LoadResult, seconds: float) -> bool:
        """Records a load that ended. `seconds`: its duration or, if it arrived layer by layer, the
        time that the step waited for its loads; goes to `WorkerReport.load_seconds`. Returns
        whether some pages were not filled. With several KV cache groups, the failed blocks of an
        asynchronous load are not reported to vLLM: the request is reported as failed instead, and
        vLLM computes all of it.
        """
        self.report.load_seconds[load.request] = seconds
        if self._store.wants_timings:
            self.report.loads += self._store.take_loads()
        unfilled = result.unfilled
        asked = sum(len(pages.keys) for pages in load.pages)
        self._meter.add("loaded_pages", (asked - len(unfilled)) if self._counts_pages else 0)
        self._meter.add("loaded_bytes", result.bytes)
        if not unfilled:
            return False
        for group in {group for group, _, _ in unfilled}:
            first = min(index for p, index, _ in unfilled if p == group)
            self.report.unsaved.append((load.request, group, first))
        self.report.failed.add(load.request)
        if self._one_group or not load.asynchronous:
            self._failed_blocks.update(block for _, _, block in unfilled)
        self._meter.add("failed_pages", len(unfilled))
        self._meter.missed(result.reason, len(unfilled))
        return True

    def record_save(self, save: Save, result: SaveResult) -> None:
        self._meter.add("saved_bytes", result.bytes)
        self._meter.add("saved_pages", result.pages if self._counts_pages else 0)
        if result.reason:
            self.record_skipped(save, result.pages, result.reason, again=result.again)

    def record_skipped(self, save: Save, stored: int, reason: str, *, again: bool = False) -> None:
        """Counts the pages of a save after its first `stored` pages as not stored, for `reason`. If
        `again`, the scheduler's side plans their save again.
        """
        pages = save.pages
        self._meter.skipped(reason, len(pages.keys) - stored)
        if again:
            self.report.unsaved.append((save.request, pages.group, pages.first + stored))

    def set_unsupported(self, reason: str) -> None:
        self.report.unsupported_reason = reason
        logger.warning("ritornello: %s", reason)

    def set_unregistered(self, reason: str) -> None:
        """Reports that the KV memory cannot be registered yet, for `reason`, or with "" that it is
        registered. Reports nothing if the state (registered or not) is as in the previous report,
        even if the reason differs.
        """
        if bool(reason) != bool(self._unregistered):
            self.report.unregistered[self._worker_rank] = reason
        self._unregistered = reason

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_finished_sending(self) -> set[str]:
        sent, self.finished_sending = self.finished_sending, set()
        return sent

    def take_report(self) -> WorkerReport | None:
        report = self.report
        if report == EMPTY_REPORT:
            return None
        self.report = WorkerReport()
        return report
