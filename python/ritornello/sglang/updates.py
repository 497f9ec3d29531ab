"""Whether SGLang changed this process's weights, and whether its caches were emptied since.

SGLang tells its storage of neither. What changes weights are the methods of each model runner's
`WeightUpdater`; what proves a flush is that the cache controller's `reset` returned: by then its
storage threads have ended and their queues are empty. Both are watched on the classes, because
SGLang looks them up there at each call.

Invariant: from the first moment of an update until a flush the current epoch is not the flushed
one, and a storage serves and stores under the flushed one only. So a page that was computed
before an update is never under an epoch of after it.
"""

import functools
import logging
from typing import Any

from ritornello.model import new_epoch
from ritornello.sglang.interface import RECORDER, UPDATES

logger = logging.getLogger("ritornello.sglang")


class WeightUpdates:
    """Of one process. `epoch`: of its weights as they are now, empty while they are those that
    SGLang loaded at its start. `on_flush`: the epoch at the last flush. Updates and flushes come
    from SGLang's scheduler thread; any thread may compare.
    """

    def __init__(self) -> None:
        self.epoch = b""
        self.on_flush = b""
        self._watched: Any = None

    def begin(self) -> None:
        """The weights may be others from now on."""
        known, self.epoch = self.epoch == self.on_flush, new_epoch()
        if known:
            logger.warning(
                "ritornello: the weights may be others than before; nothing is stored or loaded "
                "until SGLang's cache is flushed"
            )

    def watch(self, updater: Any, manager: Any, controller: Any) -> bool:
        """Wraps methods of SGLang's `WeightUpdater`, `SchedulerWeightUpdaterManager` and
        `HiCacheController`. False where they are wrapped already.
        """
        if self._watched is controller:
            return False
        self._watched = controller
        for name in UPDATES:
            setattr(updater, name, self._update(getattr(updater, name)))
        # Once more for updaters of other kinds: every update that succeeds is recorded.
        setattr(manager, RECORDER, self._update(getattr(manager, RECORDER)))
        controller.reset = self._reset(controller.reset)
        return True

    def _update(self, method: Any) -> Any:
        @functools.wraps(method)
        def update(*args: Any, **named: Any) -> Any:
            self.begin()
            return method(*args, **named)

        return update

    def _reset(self, method: Any) -> Any:
        @functools.wraps(method)
        def reset(controller: Any) -> Any:
            returned = method(controller)
            self.on_flush = self.epoch
            flushed = getattr(controller.storage_backend, "flushed", None)
            if flushed is not None:
                flushed()
            return returned

        return reset


# SGLang runs one model in a process.
updates = WeightUpdates()
