"""Processes of `benches/gpu_vllm.py`: the generator of the model, and engines."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benches.gpu_vllm_parts.kinds import KINDS, Bench

PARTS = Path(__file__).resolve().parent
Answer = dict[str, Any]
# Variables that processes get, unless the environment of `benches/gpu_vllm.py` has other values.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "4",
    # Engines download nothing, and send no usage statistics.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The address and the network interface that exist on a machine without a network.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Greedy answers need neither FlashInfer's sampler nor torch.compile, and engines start sooner
    # without them.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCHDYNAMO_DISABLE": "1",
}


class EngineError(Exception):
    """An engine or the generator of the model failed, was stopped, or cannot be measured."""


class Process:
    """A Python process of this benchmark. Its log is `OUT/NAME.log`."""

    def __init__(
        self, bench: Bench, name: str, arguments: Sequence[str], variables: dict[str, str]
    ) -> None:
        self.name, self.log, self._bench = name, bench.out / f"{name}.log", bench
        environment = {**ENVIRONMENT, **os.environ, **variables}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self) -> bool:
        """Returns whether the process ended. Raises EngineError if it failed, or still runs when
        the budget is spent.
        """
        code = self._process.poll()
        if code:
            raise EngineError(f"{self.name} ended with exit status {code}: read {self.log}")
        if code is None and monotonic() > self._bench.deadline:
            raise EngineError(
                f"{self.name} was stopped, because the budget is spent: run the command again to "
                f"continue, or give a larger --budget [log {self.log}]"
            )
        return code == 0

    def wait(self) -> None:
        while not self.ended():
            sleep(0.05)

    def stop(self) -> None:
        """Ends the process and its children, unless the process has ended already."""
        for number, seconds in ((signal.SIGTERM, 4), (signal.SIGKILL, 10)):
            if self._process.poll() is not None:
                return
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


class Engine(Process):
    """A process of `engine.py`, which waits for `run`."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._spec = bench.spec(name)
        file = bench.folder / f"{name}.json"
        file.write_text(json.dumps(self._spec))
        Path(self._spec["events"]).write_text("")
        variables = {
            # Let the engine run in the process of `engine.py`, which reads the engine's KV memory.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "RITORNELLO_DEVICE": "own" if KINDS[name].own_copies else "",
        }
        super().__init__(bench, name, [str(PARTS / "engine.py"), str(file)], variables)

    def run(self) -> tuple[dict[str, Any], list[Answer]]:
        """Returns a description of the engine, and its answers."""
        Path(self._spec["go"]).touch()
        events: list[dict[str, Any]] = []
        ended, text = False, ""
        with Path(self._spec["events"]).open() as file:
            while not ended:
                ended = self.ended()
                # The last line may still be incomplete.
                *lines, text = (text + file.read()).split("\n")
                for line in lines:
                    events.append(json.loads(line))
                    shown = {k: v for k, v in events[-1].items() if k not in ("output", "blocks")}
                    print(f"{self.name}: {json.dumps(shown)}", flush=True)
                sleep(0.05)
        if not events or events[-1]["event"] != "end":
            raise EngineError(f"{self.name} ended before its last answer: read {self.log}")
        return events[0], [event for event in events if event["event"] == "answer"]


def model_writer(bench: Bench) -> Process:
    arguments = [str(PARTS / "model.py"), str(bench.weights), json.dumps(bench.config)]
    return Process(bench, "model", arguments, {})
