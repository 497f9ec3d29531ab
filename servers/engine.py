"""An engine's server with an HTTP interface, and requests to it."""

import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers.process import Process, ServerError, free_port, request

ANSWER_SECONDS = 120.0
COUNTERS_SECONDS = 10.0
THREADS = "2"
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    tokens: tuple[int, ...]


@dataclass
class Engine(Process):
    """An engine's server. `connector`: the configuration of the engine's KV storage; None means no
    storage.
    """

    name: str
    program: Path
    model: Path
    log: Path
    max_tokens: int
    connector: Mapping[str, Any] | None = None
    port: int = field(default_factory=free_port)

    def tokenize(self, text: str) -> list[int]:
        body = json.dumps({"model": "demo", "prompt": text})
        path = "/tokenize"
        status, reply = request(self.port, path, "POST", body, JSON, timeout=ANSWER_SECONDS)
        if status != 200:
            raise ServerError(f"{self.name}: {path}: {status} {reply[:300]!r}")
        tokens = json.loads(reply)["tokens"]
        assert isinstance(tokens, list)
        return tokens

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the JSON objects of a streamed answer, as they arrive."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("POST", path, json.dumps(body), JSON)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"{self.name}: {response.status} {response.read()[:300]!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        except OSError as error:
            raise self._silent(error) from error
        finally:
            connection.close()

    def _silent(self, error: Exception) -> ServerError:
        return ServerError(f"{self.name}: no answer ({error}); see {self.log}")

    def _answer(self, ttft_s: float, tokens: list[int], wanted: int) -> Answer:
        if len(tokens) != wanted:
            given = f"the answer has {len(tokens)} tokens instead of {wanted}"
            raise ServerError(f"{self.name}: {given}; see {self.log}")
        return Answer(ttft_s, tuple(tokens))

    def _environment(self) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": THREADS}

    def _is_up(self) -> bool:
        return request(self.port, "/health")[0] == 200
