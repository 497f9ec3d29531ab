"""A real S3 server on this machine, in a folder: VersityGW or MinIO."""

from dataclasses import dataclass, field
from pathlib import Path

from servers.process import Process, ServerError, free_port, request

BUCKET = "bench"
ACCESS, SECRET = "ritornello", "ritornello-secret"
KINDS = ("versitygw", "minio")


@dataclass
class S3Server(Process):
    """An S3 server. `program`: its path, whose name is in `KINDS`; `folder`: where it stores
    objects.
    """

    program: Path
    folder: Path
    log: Path
    port: int = field(default_factory=free_port)

    start_seconds = 60.0
    stop_seconds = 10.0

    def __post_init__(self) -> None:
        self.name = self.program.name

    def start(self) -> None:
        # Both servers represent a bucket as a directory.
        (self.folder / BUCKET).mkdir(parents=True, exist_ok=True)
        if not self.program.exists():
            raise ServerError(f"{self.program} does not exist: make s3")
        super().start()

    def address(self, prefix: str) -> str:
        """Returns the address of a remote tier on this server, under `prefix`."""
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self.port}"

    @staticmethod
    def environment() -> dict[str, str]:
        """Returns the environment variables that a client needs besides the address."""
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

    def _environment(self) -> dict[str, str]:
        return {"MINIO_ROOT_USER": ACCESS, "MINIO_ROOT_PASSWORD": SECRET}

    def _is_up(self) -> bool:
        return request(self.port, "/")[0] < 500
