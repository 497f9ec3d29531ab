"""Measures SGLang's prefills for the gate, which compares loading with computing.

`ModelRunner.forward` computes one step. A step of the target model is measured if exactly one
request computes more than one token in it, this rank runs all layers, and no layer waits for pages
from host memory. On an accelerator events on its stream measure the time, because the method
returns before the step is computed.
"""

import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

logger = logging.getLogger("ritornello.sglang")

# Names of the `forward_mode` of steps that compute prompts.
MODES = ("EXTEND", "MIXED")
# Maximum number of measured steps whose events are not complete yet. Beyond it the oldest
# measurement is dropped. SGLang has only a few steps in flight.
PENDING_MAX = 16

# Arguments: the number of tokens before a prefill, the number of tokens that the prefill computed,
# and its duration in seconds.
Record = Callable[[int, int, float], object]


class Prefills:
    """Prefills of one process. `record` takes each measurement, on the scheduler's thread."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self._watched: Any = None
        # Tokens before and in a prefill, and the events before and after it, oldest first.
        self._pending: deque[tuple[int, int, Any, Any]] = deque(maxlen=PENDING_MAX)

    def watch(self, runner: Any) -> str:
        """Wraps `ModelRunner.forward` once. Returns the reason why it cannot be wrapped; ""
        if it is wrapped.
        """
        if self._watched is not runner:
            if not inspect.isfunction(getattr(runner, "forward", None)):
                return f"{runner.__name__} has no forward"
            runner.forward = self._wrap(runner.forward)
            self._watched = runner
        return ""

    def _wrap(self, method: Any) -> Any:
        @functools.wraps(method)
        def forward(runner: Any, batch: Any, *args: Any, **named: Any) -> Any:
            if self.record is None:
                return method(runner, batch, *args, **named)
            measured = self._begin(runner, batch)
            returned = method(runner, batch, *args, **named)
            if measured is not None:
                self._end(*measured)
            return returned

        return forward

    def _begin(self, runner: Any, batch: Any) -> tuple[int, int, Any, Any] | None:
        """Returns, for a step that is measured, the numbers of tokens before and in the prefill,
        torch's module of the device (None on a CPU), and the start: a recorded event, or on a CPU
        the time in seconds. Returns None for other steps.
        """
        try:
            self._take_complete()
            tokens = prefill_of(runner, batch)
            if tokens is None:
                return None
            if str(runner.device) == "cpu":
                return *tokens, None, perf_counter()
            import torch

            module = torch.get_device_module(runner.device)
            began = module.Event(enable_timing=True)
            began.record()
            return *tokens, module, began
        except Exception as error:
            self._stop(error)
            return None

    def _end(self, before: int, tokens: int, module: Any, began: Any) -> None:
        try:
            if module is None:
                self._take(before, tokens, perf_counter() - began)
                return
            ended = module.Event(enable_timing=True)
            ended.record()
            self._pending.append((before, tokens, began, ended))
        except Exception as error:
            self._stop(error)

    def _take_complete(self) -> None:
        while self._pending and self._pending[0][3].query():
            before, tokens, began, ended = self._pending.popleft()
            self._take(before, tokens, began.elapsed_time(ended) / 1000.0)

    def _take(self, before: int, tokens: int, seconds: float) -> None:
        if self.record is not None:
            self.record(before, tokens, seconds)

    def _stop(self, error: Exception) -> None:
        self.record = None
        self._pending.clear()
        logger.warning(
            "ritornello: prefills are not measured (%s); the gate uses earlier measurements, and "
            "loads all found pages if it has none",
            error,
        )


def prefill_of(runner: Any, batch: Any) -> tuple[int, int] | None:
    """Returns the tokens before a prefill and the tokens in it; None unless exactly one request of
    the step computes more than one token, this rank runs all layers of the target model, and no
    layer waits for pages from host memory.
    """
    if batch.forward_mode.name not in MODES or runner.is_draft_worker:
        return None
    if runner.pp_group.world_size > 1:
        return None
    counter = getattr(runner.token_to_kv_pool, "layer_transfer_counter", None)
    if counter is not None and counter.consumer_index >= 0:
        return None
    lengths, before = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    long = [place for place, length in enumerate(lengths or ()) if length > 1]
    if len(long) != 1 or before is None:
        return None
    return int(before[long[0]]), int(lengths[long[0]])


# One object for the whole process, in which SGLang runs one model.
prefills = Prefills()
