"""A real S3 server on this machine, in a folder: VersityGW, or MinIO."""

import http.client
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from demo.server import DemoError, free_port

START_SECONDS = 60.0
STOP_SECONDS = 10.0
BUCKET = "bench"
ACCESS, SECRET = "ritornello", "ritornello-secret"
KINDS = ("versitygw", "minio")


@dataclass
class S3Server:
    """Use as a context manager. `program` is one of `KINDS`; `folder` keeps the objects."""

    program: Path
    folder: Path
    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # A bucket is a directory to both of them.
        (self.folder / BUCKET).mkdir(parents=True, exist_ok=True)
        if not self.program.exists():
            raise DemoError(f"{self.program} is not there: make s3")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(),
                stdout=log,
                stderr=log,
                env={**os.environ, "MINIO_ROOT_USER": ACCESS, "MINIO_ROOT_PASSWORD": SECRET},
                start_new_session=True,
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
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_SECONDS)

    def address(self, prefix: str) -> str:
        """A prefix as a tier."""
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self.port}"

    @staticmethod
    def environment() -> dict[str, str]:
        """What a client needs to know besides the address."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def _command(self) -> list[str]:
        where = f"127.0.0.1:{self.port}"
        if self.program.name == "minio":
            return [str(self.program), "server", "--quiet", "--address", where, str(self.folder)]
        keys = ["--access", ACCESS, "--secret", SECRET]
        return [str(self.program), *keys, "--port", where, "posix", str(self.folder)]

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/")
                if connection.getresponse().status < 500:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.2)
        raise DemoError(f"{self.program.name} did not start; see {self.log}")
