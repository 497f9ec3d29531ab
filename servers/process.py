"""The process of a server: started on free ports, awaited, and always stopped."""

import http.client
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self


class ServerError(Exception):
    """A server, its preparation or a request to it failed; the message says which, and why or in
    which log to look.
    """


class StartError(ServerError):
    """A server did not start. `log`: the file with the server's output."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(f"{message}; see {log}")
        self.log = log

    def tail(self, lines: int) -> str:
        """Returns the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Started(ABC):
    """A context manager that stops what it started, even if starting fails."""

    def __enter__(self) -> Self:
        try:
            self.start()
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

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...


class Process(Started):
    """A server's process, started with its children as one process group."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    start_seconds = 600.0
    stop_seconds = 60.0

    def start(self) -> None:
        command, environment = self._command(), {**os.environ, **self._environment()}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StartError(f"{self.name} did not start: it ended", self.log)
            with suppress(OSError):
                if self._is_up():
                    return
            time.sleep(0.25)
        seconds = f"{self.start_seconds:.0f} s"
        raise StartError(f"{self.name} did not start: not up after {seconds}", self.log)

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """Sends `sign` to the server, waits at most `stop_seconds` for its end, and kills all
        processes of its group that are left. After SIGTERM a server finishes its writes before it
        ends.
        """
        process, self.process = self.process, None
        if process is None:
            return
        try:
            process.send_signal(sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.stop_seconds)
        finally:
            # Kill the group even if a signal to this process interrupted the wait.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(self.stop_seconds)

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _environment(self) -> dict[str, str]: ...

    @abstractmethod
    def _is_up(self) -> bool:
        """Returns whether the server is ready; `OSError` means that no process listens."""


def request(
    port: int,
    path: str,
    method: str = "GET",
    body: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 5.0,
) -> tuple[int, bytes]:
    """Returns the status and the body of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def free_port() -> int:
    """Returns a port that is free unless another process takes it before its use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
