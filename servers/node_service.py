"""A `ritornello serve` process that owns a store, and requests to it."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ritornello.bench.metrics import Metrics
from servers.process import Process, ServerError, free_port, request

COMMAND = Path(sys.executable).with_name("ritornello")
ANSWER_SECONDS = 20.0


@dataclass
class NodeService(Process):
    """The service of the store in `store`, on a loopback address, where reading needs no token."""

    store: Path
    log: Path
    name: str = "ritornello serve"
    port: int = field(default_factory=free_port)
    start_seconds = 60.0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> int:
        """Returns the status of `/readyz`."""
        return self._request("/readyz")[0]

    def metrics(self) -> Metrics:
        return Metrics.parse(self._answer("/metrics").decode())

    def decisions(self) -> list[dict[str, Any]]:
        """Returns the decisions that the owner received last, the last first."""
        listed: list[dict[str, Any]] = json.loads(self._answer("/v1/decisions?limit=1024"))[
            "decisions"
        ]
        return listed

    def explain(self, request_id: str) -> list[dict[str, Any]]:
        """Returns the entries of `POST /v1/explain` about a request."""
        body = json.dumps({"request_id": request_id})
        entries: list[dict[str, Any]] = json.loads(self._answer("/v1/explain", body))["requests"]
        return entries

    def explain_by_command(self, request_id: str, *options: str) -> str:
        """Returns the output of `ritornello explain STORE --request ID`."""
        command = [str(COMMAND), "explain", str(self.store), "--request", request_id, *options]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"ritornello explain: no answer ({error})") from error
        if done.returncode:
            raise ServerError(f"ritornello explain: exit code {done.returncode}: {done.stderr}")
        return done.stdout

    def _answer(self, path: str, body: str | None = None) -> bytes:
        status, answer = self._request(path, body)
        if status != 200:
            raise ServerError(f"{self.name}: {path}: {status} {answer[:300]!r}; see {self.log}")
        return answer

    def _request(self, path: str, body: str | None = None) -> tuple[int, bytes]:
        method, headers = "GET", {}
        if body is not None:
            method, headers = "POST", {"Content-Type": "application/json"}
        try:
            return request(self.port, path, method, body, headers, timeout=ANSWER_SECONDS)
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.name}: no answer ({error}); see {self.log}") from error

    def _command(self) -> list[str]:
        # With `--must-own` the command fails if another process owns the store. Without it, that
        # owner would answer, and explain evictions from before this process started too.
        listen = ["--must-own", "--http", f"127.0.0.1:{self.port}"]
        return [str(COMMAND), "serve", str(self.store), *listen]

    def _environment(self) -> dict[str, str]:
        return {}

    def _is_up(self) -> bool:
        return request(self.port, "/readyz")[0] == 200
