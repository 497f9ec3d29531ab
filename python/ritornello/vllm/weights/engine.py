"""Wraps methods of vLLM's engine core, in the scheduler's process.

All calls to workers and all resets of the prefix cache pass through the engine core, one at a time,
never while it schedules a step. After a call of one of `CALL_METHODS`, before the next step is
scheduled, every worker checks its weights. Workers also check their weights before a reset, so that
the epoch that begins with the reset covers the changes that they find.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from ritornello.vllm.weights import watch
from ritornello.vllm.weights.counters import ChangeCounters
from ritornello.vllm.weights.guard import WeightGuard

logger = logging.getLogger("vllm.ritornello")

# Methods of vLLM's EngineCore that are wrapped: methods that may change weights (`CALL_METHODS`),
# the reset of the prefix cache, and the admission of a request (`ADMIT_METHOD`).
CALL_METHODS = ("collective_rpc", "add_lora")
RESET_METHOD = "reset_prefix_cache"
# vLLM's base class of connectors; its `reset_cache` does nothing.
CONNECTOR = "KVConnectorBase_V1"
ADMIT_METHOD = "add_request"


class StepObserver(Protocol):
    """`scheduled` and `completed` are called with vLLM's `SchedulerOutput` of a step, when the step
    was scheduled, and when its output arrived.
    """

    def scheduled(self, step: Any, /) -> object: ...
    def completed(self, step: Any, /) -> object: ...


class EngineHooks:
    """Hooks of one process. A guard is made while vLLM constructs an engine core, and is assigned
    to the engine core whose hooked method is called next. The called engine core is the constructed
    one, because vLLM runs one engine core in a process at a time.
    """

    def __init__(self) -> None:
        self._unassigned: WeakSet[WeightGuard] = WeakSet()
        self._guards: WeakKeyDictionary[Any, WeakSet[WeightGuard]] = WeakKeyDictionary()
        # The counters of each engine core; None if its workers cannot be watched.
        self._counters: WeakKeyDictionary[Any, ChangeCounters | None] = WeakKeyDictionary()
        self._hooked: set[type] = set()
        # Observers of the engine core that is being constructed, which are not assigned yet, and
        # observers by engine core.
        self._new_observers: WeakSet[StepObserver] = WeakSet()
        self._observers: WeakKeyDictionary[Any, WeakSet[StepObserver]] = WeakKeyDictionary()

    def observe_steps(self, observer: "StepObserver") -> None:
        """Tells `observer` about the steps of the engine core that is being constructed, as long as
        the observer lives. A guard must have been made for the same engine core.
        """
        self._new_observers.add(observer)

    def guard(self, engine_core: type) -> WeightGuard:
        """Returns a guard for the engine core of this class that is being constructed."""
        if engine_core not in self._hooked:
            self._hooked.add(engine_core)
            self._hook(engine_core)
        guard = WeightGuard()
        self._unassigned.add(guard)
        return guard

    def _hook(self, kind: Any) -> None:
        for name in CALL_METHODS:
            setattr(kind, name, self._wrap_call(getattr(kind, name)))
        setattr(kind, RESET_METHOD, self._wrap_reset(getattr(kind, RESET_METHOD)))
        setattr(kind, ADMIT_METHOD, self._wrap_admit(getattr(kind, ADMIT_METHOD)))

    def _wrap_admit(self, method: Any) -> Any:
        @functools.wraps(method)
        def admit(core: Any, *args: Any, **named: Any) -> Any:
            self._install(core)
            return method(core, *args, **named)

        return admit

    def _wrap_call(self, method: Any) -> Any:
        @functools.wraps(method)
        def call(core: Any, *args: Any, **named: Any) -> Any:
            self._install(core)
            try:
                return method(core, *args, **named)
            finally:
                self._check_workers(core)
                for guard in self._guards.get(core, ()):
                    guard.cover_if_unused()

        return call

    def _wrap_reset(self, method: Any) -> Any:
        @functools.wraps(method)
        def reset(
            core: Any, reset_running_requests: bool = False, reset_connector: bool = False
        ) -> Any:
            self._install(core)
            self._check_workers(core)
            emptied = method(core, reset_running_requests, reset_connector)
            if emptied:
                connector = core.scheduler.connector
                unresettable = _unresettable(connector) if reset_connector else []
                for guard in self._guards.get(core, ()):
                    guard.on_reset(connector, reset_connector, unresettable)
            return emptied

        return reset

    def _install(self, core: Any) -> None:
        """Installs a watch in every worker, before the first request, call or reset."""
        if not self._unassigned:
            return
        if core not in self._counters:
            self._counters[core] = self._watch_workers(core)
            self._hook_schedule(core)
        counters = self._counters[core]
        guards = self._guards.setdefault(core, WeakSet())
        while self._unassigned:
            guard = self._unassigned.pop()
            guards.add(guard)
            if counters is not None:
                guard.set_counters(counters)
        observers = self._observers.setdefault(core, WeakSet())
        while self._new_observers:
            observers.add(self._new_observers.pop())

    def _hook_schedule(self, core: Any) -> None:
        """Wraps the scheduler's methods, so that guards learn of every step that computes or loads,
        and observers of all steps.
        """
        scheduler = core.scheduler
        method, update = scheduler.schedule, scheduler.update_from_output

        @functools.wraps(method)
        def schedule(*args: Any, **named: Any) -> Any:
            if scheduler.has_unfinished_requests():
                for guard in self._guards.get(core, ()):
                    guard.mark_used()
            step = method(*args, **named)
            for observer in self._observers.get(core, ()):
                _attempt(observer.scheduled, step)
            return step

        @functools.wraps(update)
        def update_from_output(step: Any, *args: Any, **named: Any) -> Any:
            for observer in self._observers.get(core, ()):
                _attempt(observer.completed, step)
            return update(step, *args, **named)

        scheduler.schedule, scheduler.update_from_output = schedule, update_from_output

    def _watch_workers(self, core: Any) -> ChangeCounters | None:
        slots = core.vllm_config.parallel_config.world_size + 1
        try:
            counters, path = ChangeCounters.create(slots)
            try:
                core.model_executor.collective_rpc(watch.install, args=(str(path), slots))
            finally:
                path.unlink()
        except Exception as error:  # an untested kind of executor must still serve
            logger.warning(
                "ritornello: the weights cannot be watched (%s: %s); pages are neither "
                "loaded nor saved",
                type(error).__name__,
                error,
            )
            return None
        return counters

    def _check_workers(self, core: Any) -> None:
        """Lets the workers check their weights, which count as changed if this call fails."""
        counters = self._counters.get(core)
        if counters is None:
            return
        try:
            for slot, count in core.model_executor.collective_rpc(watch.check):
                counters.raise_to(slot, count)
        except Exception as error:
            logger.warning(
                "ritornello: the workers could not check their weights, which therefore count as "
                "changed (%s)",
                error,
            )
            counters.add(core.vllm_config.parallel_config.world_size)


def _unresettable(connector: Any) -> list[str]:
    """Returns the class names of connectors inside `connector` that do not override `reset_cache`.
    Such connectors may keep pages, although MultiConnector counts them as reset.
    """
    inner = getattr(connector, "sub_connectors", None)
    if inner:
        return [name for child in inner for name in _unresettable(child)]
    kind = type(connector)
    maker = next((one for one in kind.__mro__ if "reset_cache" in vars(one)), None)
    return [kind.__name__] if maker is not None and maker.__name__ == CONNECTOR else []


def _attempt(action: Callable[[Any], object], step: Any) -> None:
    """Calls an observer. Its failure is logged, because it must not fail the step."""
    try:
        action(step)
    except Exception as error:
        logger.debug("ritornello: a step could not be observed (%s)", error)


_hooks = EngineHooks()


def guard_of_engine() -> WeightGuard:
    """Returns a guard for the engine core that vLLM is constructing. Called while vLLM constructs
    its scheduler.
    """
    from vllm.v1.engine.core import EngineCore

    return _hooks.guard(EngineCore)


def observe_steps(observer: StepObserver) -> None:
    """See `EngineHooks.observe_steps`. Called after `guard_of_engine`."""
    _hooks.observe_steps(observer)
