"""The scheduler's side: whether the weights are those that the current epoch was begun with."""

import logging
from collections.abc import Callable, Mapping

from ritornello.vllm.weights.counters import ChangeCounters

logger = logging.getLogger("vllm.ritornello")


class WeightGuard:
    """Of one connector or tier. Until a watch is installed in every worker the weights count as
    changed. `emptied` is called when vLLM has emptied its prefix cache, and told whether that of
    its connectors was reset with it; `renew` when an epoch under which nothing was computed is of
    weights before. Both begin an epoch, where they can, and cover the changes.
    """

    def __init__(self) -> None:
        self.emptied: Callable[[bool], None] = lambda connector: None
        self.renew: Callable[[], object] = lambda: None
        self._counters: ChangeCounters | None = None
        self._covered = b""
        self._said = False
        # Nothing was computed or loaded since the last changes were covered.
        self._unused = False

    def watched(self, counters: ChangeCounters) -> None:
        """All workers count changes from now on, and nothing was computed before."""
        self._counters = counters
        self.cover()

    def changed(self) -> bool:
        """Whether pages of the current epoch may be of other weights than the engine's."""
        if self._counters is None:
            return True
        if not self._differs():
            return False
        if not self._said:
            self._said = True
            logger.warning(
                "ritornello: the weights may be others than before; neither hits nor saves until "
                "vLLM's prefix cache is reset"
            )
        return True

    def hear(self, changes: Mapping[int, int]) -> None:
        """What workers on other machines have counted, by slot."""
        for slot, count in changes.items():
            if self._counters is not None:
                self._counters.raise_to(slot, count)

    def cover(self) -> None:
        """An epoch begins, and no cache of the engine holds anything of before."""
        if self._counters is not None:
            self._covered = self._counters.read()
            self._said, self._unused = False, True

    def used(self) -> None:
        """The engine is about to compute something."""
        self._unused = False

    def refresh(self) -> None:
        """Weights that change while the engine's caches are empty need no other reset."""
        if self._unused and self._differs():
            self.renew()

    def _differs(self) -> bool:
        return self._counters is not None and self._counters.read() != self._covered

    @property
    def covered(self) -> bytes:
        """The changes that the current epoch covers, for workers to compare theirs with."""
        return self._covered
