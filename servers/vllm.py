"""A `vllm serve` process, and requests to it."""

import json
import time
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from ritornello.bench.metrics import Metrics
from servers.engine import ANSWER_SECONDS, COUNTERS_SECONDS, JSON, Answer, Engine
from servers.environment import fast_dtype
from servers.process import ServerError, request

DRAIN_SECONDS = 20

# vLLM's counter of the source of each prompt token's KV.
TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SOURCES = {
    "local_compute": "computed",
    "local_cache_hit": "local",
    "external_kv_transfer": "external",
}


def connector(**extra: Any) -> dict[str, Any]:
    """Returns vLLM's configuration of Ritornello with the settings `extra`."""
    return {
        "kv_connector": "RitornelloConnector",
        "kv_connector_module_path": "ritornello.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


# Makes vLLM's offloading use a worker that copies CPU tensors; the engine's processes import the
# worker's module.
CPU_SPEC = {"spec_name": "CpuTieringSpec", "spec_module_path": "servers.cpu_offloading"}


def offloading(
    host_bytes: int, blocks_per_chunk: int, tier: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns vLLM's configuration of offloading to `host_bytes` of host memory on CPUs. If `tier`,
    the settings of `RitornelloTier`, is given, this tier is below the host memory.
    """
    tiers = (
        []
        if tier is None
        else [{"type": "RitornelloTier", "module_path": "ritornello.vllm", **tier}]
    )
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **CPU_SPEC,
            "cpu_bytes_to_use": host_bytes,
            "blocks_per_chunk": blocks_per_chunk,
            "offload_prompt_only": False,
            "secondary_tiers": tiers,
        },
    }


def tokens_by_source(counters: Metrics) -> dict[str, int]:
    """Returns the number of prompt tokens so far by source: `computed`, `local` (vLLM's own prefix
    cache) and `external` (the connector).
    """
    counted = counters.by(TOKENS_BY_SOURCE, "source")
    return {told: int(counted.get(source, 0)) for source, told in SOURCES.items()}


# Options of a request whose pages are neither loaded from the store nor saved.
NOT_STORED = {"ritornello.no_load": True, "ritornello.no_store": True}


@dataclass(frozen=True)
class ChatAnswer:
    """`request_id`: the id that vLLM returned."""

    request_id: str
    text: str


@dataclass
class VLLMServer(Engine):
    """`kv_blocks`: number of KV blocks of the engine; None means all that fit in 2 GiB."""

    kv_blocks: int | None = None

    def ask(self, prompt: list[int], answer_tokens: int, remember: bool = True) -> Answer:
        """Streams a greedy answer. With `remember=False` the prompt's pages are neither loaded from
        the store nor saved.
        """
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
            body["kv_transfer_params"] = NOT_STORED
        began, first = time.perf_counter(), 0.0
        tokens: list[int] = []
        for told in self._stream("/v1/completions", body):
            got = told["choices"][0].get("token_ids") or []
            if got and not first:
                first = time.perf_counter() - began
            tokens += got
        return self._answer(first, tokens, answer_tokens)

    def chat(
        self,
        messages: list[dict[str, str]],
        answer_tokens: int,
        request_id: str,
        options: dict[str, Any] | None = None,
    ) -> ChatAnswer:
        """Returns the greedy answer to a conversation. vLLM derives the id that it returns
        from `request_id`. `options`: the connector's options of the request.
        """
        body = {
            "model": "demo",
            "messages": messages,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": options,
        }
        path, headers = "/v1/chat/completions", {**JSON, "X-Request-Id": request_id}
        try:
            status, reply = request(
                self.port, path, "POST", json.dumps(body), headers, timeout=ANSWER_SECONDS
            )
        except (OSError, HTTPException) as error:
            raise self._silent(error) from error
        if status != 200:
            raise ServerError(f"{self.name}: {path}: {status} {reply[:300]!r}")
        told = json.loads(reply)
        return ChatAnswer(told["id"], told["choices"][0]["message"]["content"] or "")

    def counters(self) -> Metrics:
        try:
            answer = request(self.port, "/metrics", timeout=ANSWER_SECONDS)[1]
        except (OSError, HTTPException) as error:
            raise self._silent(error) from error
        return Metrics.parse(answer.decode())

    def settled(self, prompt_tokens: int) -> Metrics:
        """Returns `/metrics` once its counters include `prompt_tokens` tokens in all. vLLM updates
        the counters after it has sent an answer.
        """
        deadline = time.monotonic() + COUNTERS_SECONDS
        while True:
            counters = self.counters()
            if sum(tokens_by_source(counters).values()) >= prompt_tokens:
                return counters
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name}: /metrics does not count {prompt_tokens} prompt tokens after "
                    f"{COUNTERS_SECONDS:.0f} s; see {self.log}"
                )
            time.sleep(0.05)

    def _command(self) -> list[str]:
        command = [str(self.program), "serve", str(self.model), "--served-model-name", "demo"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", fast_dtype()]
        command += ["--enforce-eager", "--block-size", "64", "--disable-uvicorn-access-log"]
        command += ["--max-model-len", str(self.max_tokens), "--max-num-batched-tokens", "2048"]
        # Without this timeout a SIGTERM makes vLLM kill its processes immediately, before pending
        # work ends.
        command += ["--shutdown-timeout", str(DRAIN_SECONDS)]
        if self.kv_blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.kv_blocks)]
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(self.connector)]
        return command

    def _environment(self) -> dict[str, str]:
        return {
            **super()._environment(),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOG_STATS_INTERVAL": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # A spawned process imports vLLM anew, which takes longer than a forked process's start.
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        }
