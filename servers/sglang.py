"""An SGLang server process on CPUs, with Ritornello under its hierarchical cache."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ritornello
from ritornello.bench.metrics import Metrics
from servers.engine import ANSWER_SECONDS, COUNTERS_SECONDS, JSON, Answer, Engine
from servers.environment import fast_dtype
from servers.process import ServerError, request

PAGE = 32
ADMIN = "demo"
STORED_SECONDS = 60.0
# The sources of a prompt's cached tokens, as SGLang's metric names them.
SOURCES = ("device", "host", "storage")


def storage(**settings: Any) -> dict[str, Any]:
    """Returns SGLang's extra configuration for Ritornello: `path` and `capacity`, or `tiers`, and
    further settings.
    """
    return {
        "backend_name": "ritornello",
        "module_path": "ritornello.sglang",
        "class_name": "RitornelloStorage",
        "interface_v1": 1,
        # By default SGLang looks up a prompt in the storage only if its memory lacks 256 tokens or
        # more.
        "prefetch_threshold": PAGE,
        **settings,
    }


def wait_until_stored(path: Path, pages: int) -> None:
    """Waits until `pages` pages are stored. SGLang stores the pages of a prompt after the answer,
    when its scheduler has time.
    """
    deadline = time.monotonic() + STORED_SECONDS
    with ritornello.Store.open(path) as store:
        while (found := store.stats()["pages"]) < pages:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"not all pages were stored within {STORED_SECONDS:.0f} s: {found} of {pages}"
                )
            time.sleep(0.2)


@dataclass(frozen=True)
class Told:
    """An answer, and the prompt's tokens by the source of their KV."""

    answer: Answer
    tokens: Mapping[str, int]


@dataclass
class SGLangServer(Engine):
    """An SGLang server. `connector`: the extra configuration of its storage; None: no storage.
    `metrics`: whether it serves `/metrics`.
    """

    layout: str = "page_first_direct"
    metrics: bool = False
    extra_environment: Mapping[str, str] = field(default_factory=dict)

    def generate(self, prompt: list[int], answer_tokens: int) -> Told:
        """Returns a greedy answer, whose time to the first token is measured on the stream."""
        sampling = {"temperature": 0, "max_new_tokens": answer_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        began, first = time.perf_counter(), 0.0
        last: dict[str, Any] = {}
        for told in self._stream("/generate", body):
            first, last = first or time.perf_counter() - began, told
        answer = self._answer(first, last.get("output_ids", []), answer_tokens)
        meta = last["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        came = {source: int(details.get(source) or 0) for source in SOURCES}
        came["computed"] = len(prompt) - int(meta["cached_tokens"])
        return Told(answer, came)

    def forget(self) -> None:
        """Empties SGLang's caches in memory; the storage keeps everything."""
        self.admin("POST", "/flush_cache")

    def counters(self) -> Metrics:
        return Metrics.parse(request(self.port, "/metrics", timeout=ANSWER_SECONDS)[1].decode())

    def admin(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Calls an endpoint that SGLang serves only while its scheduler is idle; retries for at
        most `COUNTERS_SECONDS`.
        """
        deadline = time.monotonic() + COUNTERS_SECONDS
        while (reply := self._administer(method, path, body))[0] != 200:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name}: {path}: {reply[0]} {reply[1][:300]!r}")
            time.sleep(0.2)

    def _administer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, bytes]:
        headers = {**JSON, "Authorization": f"Bearer {ADMIN}"}
        told = json.dumps(body) if body else None
        return request(self.port, path, method, told, headers, timeout=ANSWER_SECONDS)

    def _command(self) -> list[str]:
        options = {
            "model-path": self.model,
            "served-model-name": "demo",
            "host": "127.0.0.1",
            "port": self.port,
            "admin-api-key": ADMIN,
            "device": "cpu",
            "dtype": fast_dtype(),
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "grammar-backend": "none",
            "mem-fraction-static": 0.1,
            "max-total-tokens": 2 * self.max_tokens,
            "context-length": self.max_tokens,
            "page-size": PAGE,
            "hicache-ratio": 2.0,
            "hicache-io-backend": "direct",
            "hicache-mem-layout": self.layout,
            "hicache-write-policy": "write_through",
            "hicache-storage-prefetch-policy": "wait_complete",
        }
        if self.connector is not None:
            options["hicache-storage-backend"] = "dynamic"
            options["hicache-storage-backend-extra-config"] = json.dumps(self.connector)
        command = [str(self.program), "-m", "sglang.launch_server"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        flags = ["disable-overlap-schedule", "enable-hierarchical-cache", "enable-cache-report"]
        flags += ["skip-server-warmup", *["enable-metrics"] * self.metrics]
        return [*command, *(f"--{name}" for name in flags)]

    def _environment(self) -> dict[str, str]:
        return {
            **super()._environment(),
            "SGLANG_USE_CPU_ENGINE": "1",
            **self.extra_environment,
        }
