"""The current epoch of an engine: the identity of its pages, and whether pages may be loaded and
saved.
"""

import logging

from ritornello.vllm.handshake import WorkerRank
from ritornello.vllm.identity import Identity
from ritornello.vllm.metadata import WorkerReport
from ritornello.vllm.weights.guard import WeightGuard

logger = logging.getLogger("vllm.ritornello")


class Epoch:
    """The current epoch of one engine. `identity` is replaced when an epoch begins; the new
    identity differs only in the epoch of its model. `guard`: knows whether the weights changed;
    None if they are not watched.
    """

    def __init__(self, identity: Identity, guard: WeightGuard | None) -> None:
        self.identity = identity
        self.guard = guard
        self._identity_sent = False
        # Hits and saves stop while one of these flags is set. `_worker_unsupported` is never
        # cleared. A reset of vLLM's cache while blocks are in use sets `_reset_unclean`, and a
        # later reset that finds all blocks free clears it.
        self._worker_unsupported = False
        self._reset_unclean = False
        # Hits and saves also stop while a worker has not registered its memory.
        self._unregistered: set[WorkerRank] = set()

    def begin(self, *, clean: bool) -> None:
        """Begins a random epoch: no page stored before is found again. If not `clean`, blocks of
        the engine's cache are in use. The blocks belong to the old epoch and might be saved under
        the new epoch: hits and saves stop until a reset finds all blocks free.
        """
        self.identity, self._identity_sent = self.identity.with_new_epoch(), False
        self._reset_unclean = not clean
        if not clean:
            logger.warning(
                "ritornello: the cache was reset while blocks were in use; "
                "pages are neither loaded nor saved until a reset finds the engine idle"
            )

    def is_paused(self) -> bool:
        """Returns whether hits and saves are stopped."""
        return self.pause_reason() != ""

    def pause_reason(self) -> str:
        """Returns why hits and saves are stopped, in one word; "" if they are not."""
        if self.guard is not None and self.guard.changed():
            return "weights_changed"
        if self._worker_unsupported:
            return "worker_unsupported"
        if self._reset_unclean:
            return "reset_in_use"
        return "memory_unregistered" if self._unregistered else ""

    def awaits_memory(self) -> bool:
        """Returns whether hits and saves are stopped only until workers have registered their
        memory: pages that requests compute until then may be saved later.
        """
        return self.pause_reason() == "memory_unregistered"

    def take_identity(self) -> tuple[Identity | None, bytes]:
        """Returns what workers must know of the current epoch: the identity, and the counts of
        weight changes when the epoch began (`WeightGuard.covered`). Returns None and no counts if
        an earlier call returned this identity.
        """
        if self._identity_sent:
            return None, b""
        self._identity_sent = True
        return self.identity, b"" if self.guard is None else self.guard.covered

    def add_report(self, report: WorkerReport) -> None:
        """Takes what workers report about their weights and their memory."""
        if self.guard is not None:
            self.guard.merge_counts(report.changes)
        for rank, reason in report.unregistered.items():
            if reason:
                self._unregistered.add(rank)
                logger.warning(
                    "ritornello: %s; until it is registered, pages are neither loaded nor saved",
                    reason,
                )
            else:
                self._unregistered.discard(rank)
        if report.unsupported_reason:
            if not self._worker_unsupported:
                logger.warning(
                    "ritornello: %s; pages are neither loaded nor saved", report.unsupported_reason
                )
            self._worker_unsupported = True
