"""Tells the scheduler whether the engine's weights changed since the current epoch began."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ritornello.vllm.weights.counters import ChangeCounters

logger = logging.getLogger("vllm.ritornello")


class WeightGuard:
    """Guard of one connector or tier. Weights count as changed until every worker has a watch.
    `begin_epoch` is called when all caches of the engine are empty: it must begin an epoch if the
    weights changed, and call `cover`. `owner`: Ritornello's connector if it copies pages itself
    (`CpuPath`, `DevicePath`), else None. If vLLM calls `owner` directly, and not inside a
    `MultiConnector`, no other connector keeps KV, so a reset of the prefix cache alone begins an
    epoch. `covered`: the counts of changes when the current epoch began; workers compare their
    counts with `covered`.
    """

    def __init__(self) -> None:
        self.begin_epoch: Callable[[], object] = lambda: None
        self.owner: Any = None
        self._counters: ChangeCounters | None = None
        self.covered = b""
        self._warned = False
        # Whether no page was computed or loaded since changes were last covered.
        self._idle_since_cover = False

    def set_counters(self, counters: ChangeCounters) -> None:
        """Starts watching. The caller ensures that all workers count changes, and that no page has
        been computed yet.
        """
        self._counters = counters
        self.cover(counters.read())

    def changed(self) -> bool:
        """Returns whether pages of the current epoch may belong to weights that differ from the
        engine's weights.
        """
        if self._counters is None:
            return True
        if not self.differs(self.read()):
            return False
        if not self._warned:
            self._warned = True
            logger.warning(
                "ritornello: the weights may have changed; pages are neither loaded nor saved "
                "until vLLM's prefix cache is reset"
            )
        return True

    def merge_counts(self, changes: Mapping[int, int]) -> None:
        """Takes the counts of workers on other machines, by slot (the index of a counter)."""
        for slot, count in changes.items():
            if self._counters is not None:
                self._counters.raise_to(slot, count)

    def read(self) -> bytes | None:
        """Returns the counts of changes so far, for `differs` and `cover`; None if weights are not
        watched.
        """
        return None if self._counters is None else self._counters.read()

    def differs(self, reading: bytes | None) -> bool:
        """Returns whether a reading has changes that the current epoch does not cover."""
        return reading is None or reading != self.covered

    def cover(self, reading: bytes | None) -> None:
        """Declares that the current epoch covers the changes of a reading: no cache of the engine
        holds pages computed before them. Pass the reading that `differs` compared: a change that is
        counted after that reading needs a further epoch.
        """
        if reading is not None:
            self.covered = reading
            self._warned, self._idle_since_cover = False, True

    def on_reset(self, connector: Any, reset: bool, unresettable: Sequence[str] = ()) -> None:
        """Called when the engine's prefix cache is empty, and the cache of `connector` as well if
        `reset`. Without `reset`, a connector that is not `owner` may still hold pages of earlier
        weights. `unresettable`: names of connectors that cannot be reset.
        """
        if unresettable:
            if self.differs(self.read()):
                logger.warning(
                    "ritornello: the weights changed, and %s cannot be reset; pages are neither "
                    "loaded nor saved until the engine is started again",
                    ", ".join(unresettable),
                )
        elif reset or (self.owner is not None and connector is self.owner):
            self.begin_epoch()

    def mark_used(self) -> None:
        """Called before a step of an engine with unfinished requests: from now on its caches may
        hold pages.
        """
        self._idle_since_cover = False

    def cover_if_unused(self) -> None:
        """Begins an epoch if the weights changed, and no page was computed or loaded since changes
        were last covered: the caches hold no page of earlier weights, so no reset is needed.
        """
        if self._idle_since_cover and self.differs(self.read()):
            self.begin_epoch()
