"""A `vllm serve` process, and requests to it."""

import http.client
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.process import DemoError, Process, free_port, request

DRAIN_SECONDS = 20
ANSWER_SECONDS = 120.0
COUNTERS_SECONDS = 10.0
THREADS = "2"

# vLLM's counters of the source of each prompt token's KV.
SOURCES = {
    "local_compute": "computed",
    "local_cache_hit": "local",
    "external_kv_transfer": "external",
}
SAMPLE = re.compile(r"^(?P<name>[\w:]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)


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
        """Returns prompt tokens so far: computed, from vLLM's own cache, from the connector."""
        name = "vllm:prompt_tokens_by_source_total"
        return {
            told: int(self.total(name, f'source="{source}"')) for source, told in SOURCES.items()
        }


@dataclass
class Server(Process):
    name: str
    program: Path
    model: Path
    log: Path
    max_tokens: int
    connector: Mapping[str, Any] | None = None
    port: int = field(default_factory=free_port)

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
        text = request(self.port, "/metrics", timeout=ANSWER_SECONDS)[1].decode()
        return Counters(
            {(m["name"], m["labels"]): float(m["value"]) for m in SAMPLE.finditer(text)}
        )

    def settled(self, prompt_tokens: int) -> Counters:
        """Returns `/metrics` once it accounts for `prompt_tokens` in all: vLLM writes it after the
        answer has been sent.
        """
        deadline = time.monotonic() + COUNTERS_SECONDS
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
        # Without this timeout vLLM kills its processes immediately, before pending work ends.
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
        status, reply = request(
            self.port, path, "POST", json.dumps(body), JSON, timeout=ANSWER_SECONDS
        )
        if status != 200:
            raise DemoError(f"{self.name}: {path}: {status} {reply[:300]!r}")
        return reply

    def _is_up(self) -> bool:
        return request(self.port, "/health")[0] == 200


JSON = {"Content-Type": "application/json"}
