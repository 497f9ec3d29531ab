"""A `vllm serve` process: started on a free port, waited for, asked, and always stopped."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_SECONDS = 600.0
STOP_SECONDS = 60.0
DRAIN_SECONDS = 20
ANSWER_SECONDS = 120.0
SETTLE_SECONDS = 10.0
THREADS = "2"

# vLLM's own account of where each prompt token's KV came from.
SOURCES = {
    "local_compute": "computed",
    "local_cache_hit": "local",
    "external_kv_transfer": "external",
}
SAMPLE = re.compile(r"^(?P<name>[\w:]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)


class DemoError(Exception):
    """Something the demonstration needs did not work; the message says what and where to look."""


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Counters:
    """`/metrics` at one moment: samples by name and label."""

    samples: Mapping[tuple[str, str], float]

    def total(self, name: str, label: str = "") -> float:
        return sum(v for (n, labels), v in self.samples.items() if n == name and label in labels)

    def tokens(self) -> dict[str, int]:
        """Prompt tokens so far: computed, from vLLM's own cache, from the connector."""
        name = "vllm:prompt_tokens_by_source_total"
        return {
            told: int(self.total(name, f'source="{source}"')) for source, told in SOURCES.items()
        }


@dataclass
class Server:
    """Use as a context manager: the process group is gone when it is left, however it is left."""

    name: str
    program: Path
    model: Path
    log: Path
    max_tokens: int
    connector: Mapping[str, Any] | None = None
    port: int = field(default_factory=lambda: free_port())
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command, environment = self._command(), {**os.environ, **self._environment()}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Asks the server to end, so that it finishes what it is writing; then insists."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_SECONDS)

    def tokenize(self, text: str) -> list[int]:
        reply = self._post("/tokenize", {"model": "demo", "prompt": text})
        tokens = json.loads(reply)["tokens"]
        assert isinstance(tokens, list)
        return tokens

    def ask(self, prompt: list[int], answer_tokens: int, remember: bool = True) -> Answer:
        """Streams a greedy answer. `remember=False` keeps the prompt out of the store."""
        body: dict[str, Any] = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if not remember:
            body["kv_transfer_params"] = {"ritornello.no_load": True, "ritornello.no_store": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        payload = json.dumps(body)
        began = time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", payload, JSON)
            response = connection.getresponse()
            if response.status != 200:
                raise DemoError(f"{self.name}: {response.status} {response.read()[:300]!r}")
            first = 0.0
            tokens: list[int] = []
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                got = json.loads(line[6:])["choices"][0].get("token_ids") or []
                if got and not first:
                    first = time.perf_counter() - began
                tokens += got
        except OSError as error:
            raise DemoError(f"{self.name}: no answer ({error}); see {self.log}") from error
        finally:
            connection.close()
        if len(tokens) != answer_tokens:
            raise DemoError(f"{self.name}: {len(tokens)} tokens instead of {answer_tokens}")
        return Answer(first, tuple(tokens))

    def counters(self) -> Counters:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        return Counters(
            {(m["name"], m["labels"]): float(m["value"]) for m in SAMPLE.finditer(text)}
        )

    def settled(self, prompt_tokens: int) -> Counters:
        """`/metrics` once it accounts for `prompt_tokens` in all: vLLM writes it after the
        answer has been sent.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            counters = self.counters()
            if sum(counters.tokens().values()) >= prompt_tokens:
                return counters
            if time.monotonic() > deadline:
                raise DemoError(f"{self.name}: /metrics does not account for the last answer")
            time.sleep(0.05)

    def _command(self) -> list[str]:
        command = [str(self.program), "serve", str(self.model), "--served-model-name", "demo"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16"]
        command += ["--enforce-eager", "--block-size", "64", "--disable-uvicorn-access-log"]
        command += ["--max-model-len", str(self.max_tokens), "--max-num-batched-tokens", "2048"]
        # Without it vLLM kills its processes at once, before anything can be finished.
        command += ["--shutdown-timeout", str(DRAIN_SECONDS)]
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(self.connector)]
        return command

    def _environment(self) -> dict[str, str]:
        return {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": THREADS,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOG_STATS_INTERVAL": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("POST", path, json.dumps(body), JSON)
            response = connection.getresponse()
            reply = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise DemoError(f"{self.name}: {path}: {response.status} {reply[:300]!r}")
        return reply

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise DemoError(f"{self.name}: the engine ended while starting; see {self.log}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.25)
        raise DemoError(f"{self.name}: not up after {START_SECONDS:.0f} s; see {self.log}")


JSON = {"Content-Type": "application/json"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
