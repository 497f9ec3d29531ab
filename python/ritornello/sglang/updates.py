"""Detects updates of this process's weights, and flushes of SGLang's caches after them.

SGLang does not report these events to its storage. Weights change in methods of each model runner's
`WeightUpdater`. A flush has happened when the cache controller's `reset` returns: it has waited for
the end of its storage threads, emptied their queues, and started new threads. These methods are
wrapped on their classes, because SGLang looks them up on the class at each call.

Invariant: between the beginning of an update and the next flush, `epoch` differs from `flushed`,
and no storage loads or stores. A page that was computed before an update is therefore never stored
under an epoch that begins with or after the update.
"""

import functools
import logging
from typing import Any

from ritornello.connector.identity import new_epoch
from ritornello.sglang.interface import RECORDER, UPDATE_METHODS, update_methods

logger = logging.getLogger("ritornello.sglang")


class WeightUpdates:
    """Updates in one process. `epoch`: epoch of the current weights, empty until the weights that
    SGLang loaded at its start may have changed. `flushed`: the epoch at the last flush, empty
    before the first. SGLang's scheduler thread makes updates and flushes; any thread may compare
    the epochs.
    """

    def __init__(self) -> None:
        self.epoch = b""
        self.flushed = b""
        self._watched_controller: Any = None

    def begin(self) -> None:
        """Begins an epoch: the weights may have changed."""
        known, self.epoch = self.epoch == self.flushed, new_epoch()
        if known:
            logger.warning(
                "ritornello: the weights may have changed; nothing is stored or loaded "
                "until SGLang's cache is flushed"
            )

    def watch(self, updater: Any, manager: Any, controller: Any) -> bool:
        """Wraps methods of SGLang's `WeightUpdater`, `SchedulerWeightUpdaterManager` and
        `HiCacheController`. Returns False if they are wrapped already.
        """
        if self._watched_controller is controller:
            return False
        self._watched_controller = controller
        methods = update_methods(updater)
        unknown = sorted(set(methods) - set(UPDATE_METHODS))
        if unknown:
            logger.info(
                "ritornello: unknown methods of SGLang count as updates of weights: %s",
                ", ".join(unknown),
            )
        for name in methods:
            setattr(updater, name, self._wrap_update(getattr(updater, name)))
        # The manager calls this method after every successful update, including updates by classes
        # whose methods are not wrapped.
        setattr(manager, RECORDER, self._wrap_update(getattr(manager, RECORDER)))
        controller.reset = self._wrap_reset(controller.reset)
        return True

    def _wrap_update(self, method: Any) -> Any:
        @functools.wraps(method)
        def update(*args: Any, **named: Any) -> Any:
            self.begin()
            return method(*args, **named)

        return update

    def _wrap_reset(self, method: Any) -> Any:
        @functools.wraps(method)
        def reset(controller: Any) -> Any:
            returned = method(controller)
            self.flushed = self.epoch
            on_flush = getattr(controller.storage_backend, "on_flush", None)
            if on_flush is not None:
                on_flush()
            return returned

        return reset


# One object for the whole process, in which SGLang runs one model.
updates = WeightUpdates()
