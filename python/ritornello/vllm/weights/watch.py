"""The worker's side: counts every change of the weights that this process detects.

An announced change (a vLLM method that changes weights) is counted before it begins and, except a
suspension (`SUSPEND_METHODS`), after it ends, whether it succeeded or not. An epoch that begins
with a reset during an update therefore does not cover the update. Other changes are counted when a
check detects them. The parameters' state is checked at the beginning of steps (see
`DECODE_SECONDS`) and, on the data paths `CpuPath` and `DevicePath`, before pages are loaded or
saved. A sample of the parameters' bytes is checked as well at the beginning of a step, if
`SAMPLE_SECONDS` have passed since the last sample, and when the scheduler's process requests it.

Checks compare the parameters with a baseline. An announced change is counted immediately, but the
next baseline is taken when the next step that computes begins. vLLM may load a model with a call
for each tensor, and a baseline for each call would be slow. Until that baseline is taken, checks
compare nothing. No check is needed in this time: the counted change stops all loads and saves until
a reset empties the caches, and the step that computes the first pages after the reset takes the
baseline first, if no earlier step took it.

vLLM calls `install` and `check` in the worker's process.
"""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from time import monotonic
from typing import Any

from ritornello.vllm.weights.adapters import Adapters
from ritornello.vllm.weights.counters import ChangeCounters, count_in
from ritornello.vllm.weights.parameters import Parameters, sample_tensors

logger = logging.getLogger("vllm.ritornello")

# Methods that change weights. A worker that lacks one of `WORKER_METHODS` cannot be watched; the
# other methods may be missing.
WORKER_METHODS = ("start_weight_update", "update_weights", "finish_weight_update", "reload_weights")
WORKER_METHODS_OPTIONAL = ("reset_weights",)
RUNNER_METHODS = ("load_model", "reload_weights")
MODEL_METHODS = ("load_weights",)
# The weights' memory may be unmapped between a call of one of `SUSPEND_METHODS` and a call of
# `RESUME_METHOD`.
SUSPEND_METHODS = ("sleep", "discard")
RESUME_METHOD = "wake_up"
# Loads a LoRA adapter. A private name of vLLM's `WorkerLoRAManager`, read in the sources of 0.32.0
# and 0.33.0. A worker whose manager lacks it cannot be watched.
ADAPTER_METHOD = "_load_adapter"

# A step with as many tokens as requests, which decodes or computes nothing, checks only if the last
# check is at least this old. Other steps check at their beginning, unless they take a new baseline.
DECODE_SECONDS = 0.05
# Time between two samples of the parameters' bytes.
SAMPLE_SECONDS = 5.0


class WeightWatch:
    """Watch of one worker process. `shared`: the counters are shared by all processes. Hooks may
    run on any thread; a change that several checks could detect is counted once.
    """

    def __init__(
        self,
        parameters: Parameters,
        counters: ChangeCounters,
        slot: int,
        *,
        shared: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._parameters = parameters
        self._counters = counters
        self.slot = slot
        self.shared = shared
        self._clock = clock
        self._lock = RLock()
        self._adapters = Adapters()
        self._suspended = False
        # A change was counted, and no baseline was taken since.
        self._baseline_stale = False
        self._checked_at = self._sampled_at = clock()

    @property
    def count(self) -> int:
        return self._counters.count(self.slot)

    def covered_by(self, covered: bytes) -> bool:
        """Returns whether no change was counted since the reading `covered`: by any process, or
        only by this process if the scheduler runs on another machine.
        """
        if self.shared:
            return self._counters.read() == covered
        return self.count == count_in(covered, self.slot)

    def record(self, what: str) -> None:
        """Counts a change. The next step that computes takes the baseline."""
        with self._lock:
            self._counters.add(self.slot)
            known, self._baseline_stale = self._baseline_stale, True
        if not known:
            logger.info("ritornello: the weights may have changed (%s)", what)

    def check(self) -> None:
        """Counts a change if the parameters' state differs from the baseline."""
        with self._lock:
            self._checked_at = self._clock()
            if not self._baseline_stale and self._parameters.state_changed():
                self.record("parameters were written or replaced")
                self._take_baseline()

    def sample(self) -> None:
        """Calls `check`, and counts a change if the parameters' sampled bytes differ from the
        baseline.
        """
        with self._lock:
            self.check()
            self._sampled_at = self._clock()
            if (
                not self._baseline_stale
                and not self._suspended
                and self._parameters.sample_changed()
            ):
                self.record("bytes of parameters differ")
                self._take_baseline()

    def _take_baseline(self) -> None:
        """Makes the current parameters the baseline."""
        with self._lock:
            self._parameters.take_baseline(sampled=not self._suspended)
            self._baseline_stale = False

    def begin_step(self, tokens: int, requests: int) -> None:
        """Called before a step of `tokens` tokens of `requests` requests."""
        now = self._clock()
        if tokens:
            with self._lock:
                # The weights are in memory in a step that computes, even if no wake-up was
                # announced.
                self._suspended = False
                if self._baseline_stale:
                    self._take_baseline()
                    self._checked_at = self._sampled_at = now
                    return
        if now - self._sampled_at >= SAMPLE_SECONDS:
            self.sample()
        elif tokens != requests or now - self._checked_at >= DECODE_SECONDS:
            self.check()

    def attach(self, worker: Any) -> None:
        """Wraps the methods of vLLM's worker, model runner and model that this module names."""
        runner = worker.model_runner
        for owner, names in (
            (worker, (*WORKER_METHODS, *WORKER_METHODS_OPTIONAL)),
            (runner, RUNNER_METHODS),
            (runner.get_model(), MODEL_METHODS),
        ):
            for name in names:
                self._wrap(owner, name, self._wrap_update)
        for name in SUSPEND_METHODS:
            self._wrap(worker, name, self._wrap_suspend)
        self._wrap(worker, RESUME_METHOD, self._wrap_resume)
        self._wrap(worker, "execute_model", self._wrap_step)
        adapters = getattr(runner, "lora_manager", None)
        if adapters is not None:
            self._wrap(adapters, ADAPTER_METHOD, self._wrap_load_adapter)

    def _wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        method = getattr(owner, name, None)
        if method is not None:
            setattr(owner, name, functools.wraps(method)(wrapper(method)))

    def _wrap_update(self, method: Any) -> Any:
        def update(*args: Any, **named: Any) -> Any:
            self.record(f"{method.__name__} began")
            try:
                return method(*args, **named)
            finally:
                self.record(f"{method.__name__} ended")

        return update

    def _wrap_suspend(self, method: Any) -> Any:
        """Wraps a method that may discard the weights: `sleep` discards them at a level above 1,
        `discard` unless its argument names only other kinds of memory, such as the KV cache.
        """

        def suspend(*args: Any, **named: Any) -> Any:
            given = (*args, *named.values())
            discards = method.__name__ == "discard"
            if discards and given and "weights" not in given[0]:
                return method(*args, **named)
            with self._lock:
                self._suspended = True
            if discards or given not in ((), (1,), (0,)):
                self.record(method.__name__)
            return method(*args, **named)

        return suspend

    def _wrap_resume(self, method: Any) -> Any:
        def resume(tags: Any = None) -> Any:
            returned = method(tags)
            if tags is None or "weights" in tags:
                with self._lock:
                    self._suspended = False
            return returned

        return resume

    def _wrap_step(self, method: Any) -> Any:
        def execute_model(step: Any, *args: Any, **named: Any) -> Any:
            self.begin_step(step.total_num_scheduled_tokens, len(step.num_scheduled_tokens))
            return method(step, *args, **named)

        return execute_model

    def _wrap_load_adapter(self, method: Any) -> Any:
        def load_adapter(request: Any) -> Any:
            name, path = request.lora_name, request.lora_path
            if self._adapters.replaced(name, path, in_place=request.load_inplace):
                self.record(f"LoRA adapter {name} was replaced")
            try:
                return method(request)
            finally:
                if self._adapters.replaced(name, path, in_place=False):
                    self.record(f"LoRA adapter {name} was written while it was loaded")

        return load_adapter


# vLLM runs one worker in a process.
_watch: WeightWatch | None = None


def current() -> WeightWatch | None:
    """Returns this process's watch; None before the engine core has installed it."""
    return _watch


def install(worker: Any, path: str, slots: int) -> tuple[int, int]:
    """Installs a watch; vLLM calls this in each worker. Returns the worker's slot and its count of
    changes, 0. Raises if the worker cannot be watched.
    """
    global _watch
    worker = getattr(worker, "worker", worker)
    missing = [name for name in (*WORKER_METHODS, "execute_model") if not hasattr(worker, name)]
    adapters = getattr(getattr(worker, "model_runner", None), "lora_manager", None)
    if adapters is not None and not hasattr(adapters, ADAPTER_METHOD):
        missing.append(f"lora_manager.{ADAPTER_METHOD}")
    if missing:
        raise RuntimeError(f"the worker has no {', '.join(missing)}")
    # The last slot belongs to the scheduler's process.
    slot = worker.rank % (slots - 1)
    counters = ChangeCounters.attach(Path(path), slots)
    balanced = worker.vllm_config.parallel_config.enable_eplb
    _watch = WeightWatch(
        Parameters(
            lambda: worker.model_runner.get_model().named_modules(),
            sample_tensors,
            # Experts that vLLM moves to balance load are skipped: a move does not change KV.
            lambda name: bool(balanced) and "experts" in name,
        ),
        counters or ChangeCounters.private(slots),
        slot,
        shared=counters is not None,
    )
    _watch.attach(worker)
    return slot, 0


def check(worker: Any) -> tuple[int, int]:
    """Checks the weights; vLLM calls this in each worker. Returns the worker's slot and its count
    of changes.
    """
    if _watch is None:
        raise RuntimeError("the weights of this worker are not watched")
    _watch.sample()
    return _watch.slot, _watch.count
