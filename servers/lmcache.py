"""A real `lmcache server` without a GPU, and requests to it."""

import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers.environment import program
from servers.process import Process, ServerError, free_port, request

PROGRAM = program("lmcache", "lmcache")
ASK_SECONDS = 240.0
CAPACITY = "1GiB"
# A small model: four layers, two heads of 64, and a cache of 2048 tokens.
SHAPE = "(2,128,16,2,64):float16:4"
BLOCKS = "128"
TOKENS = "1024"
QUIET = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
LOOKUP = re.compile(r"\[seq (\d+)/cold\] LOOKUP: (\d+)/(\d+) chunks hit \(([\d.]+) ms\)")
CHECKSUM = re.compile(r"\[seq (\d+)/(?:cold|warm)\] CHECKSUM: (\w+)")


@dataclass
class Asked:
    """The outcome of a request. `hits`, `lookup_ms`: chunks that its first lookup found, and the
    time of this lookup. `chunks`: the number of the request's chunks. `checksums`: the checksums of
    the engine's memory that LMCache's benchmark printed for the request.
    """

    hits: int
    chunks: int
    lookup_ms: float
    checksums: set[str] = field(default_factory=set)


@dataclass
class LMCacheServer(Process):
    """An `lmcache server`. `port`: where engines send their requests. `http`: the port of its
    health endpoint.
    """

    adapter: dict[str, Any]
    log: Path
    port: int = field(default_factory=free_port)
    http: int = field(default_factory=free_port)

    name = "lmcache server"
    start_seconds = 240.0

    def ask(self, requests: int) -> dict[int, Asked]:
        """Sends `requests` requests; each is looked up, stored and retrieved."""
        command = [
            *(str(PROGRAM), "bench", "server", "--mode", "cpu"),
            *("--rpc-url", f"tcp://127.0.0.1:{self.port}"),
            *("--url", f"http://127.0.0.1:{self.http}"),
            *("--num-tokens", TOKENS, "--kvcache-shape-spec", SHAPE, "--num-blocks", BLOCKS),
            *("--start", "0", "--end", str(requests), "--interval", "0"),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            env={**os.environ, **QUIET},
            check=False,
        )
        with self.log.with_suffix(".requests.log").open("w") as log:
            log.write(done.stdout + done.stderr)
        asked = {
            int(number): Asked(int(hits), int(chunks), float(ms))
            for number, hits, chunks, ms in LOOKUP.findall(done.stdout)
        }
        for number, checksum in CHECKSUM.findall(done.stdout):
            asked[int(number)].checksums.add(checksum)
        if done.returncode or len(asked) != requests:
            raise ServerError(f"lmcache bench server failed; see {log.name}")
        return asked

    def _command(self) -> list[str]:
        return [
            *(str(PROGRAM), "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-port", str(self.http), "--l1-size-gb", "1", "--eviction-policy", "LRU"),
            *("--supported-transfer-mode", "engine_driven"),
            *("--l2-adapter", json.dumps(self.adapter)),
        ]

    def _environment(self) -> dict[str, str]:
        return QUIET

    def _is_up(self) -> bool:
        return request(self.http, "/healthcheck")[0] == 200


def adapter_of(path: Path, kind: str = "plugin", **params: Any) -> dict[str, Any]:
    """Returns the value of LMCache's `--l2-adapter` for an adapter of one of its two kinds.
    `params`: further settings of the adapter; `tiers` replaces the store at `path`.
    """
    place = {} if "tiers" in params else {"path": str(path), "capacity": CAPACITY}
    return {
        "type": kind,
        "module_path": "ritornello.lmcache",
        "class_name": {"plugin": "RitornelloL2Adapter", "native_plugin": "NativeClient"}[kind],
        "adapter_params": {**place, **params},
    }


def broken_claims(cold: dict[int, Asked], warm: dict[int, Asked]) -> list[str]:
    """Compares the requests to a server that began with an empty store (`cold`) and to a second
    server on the same store (`warm`). Three claims: the first server finds nothing, the second
    server finds all chunks, and all checksums of a request are equal. Returns a message for each
    claim that did not hold.
    """
    broken = []
    for number, first in cold.items():
        again = warm[number]
        if first.hits:
            broken.append(f"request {number}: {first.hits} chunks were found in the empty store")
        if again.hits != again.chunks:
            found = f"{again.hits} of {again.chunks} chunks were found after the restart"
            broken.append(f"request {number}: {found}")
        if len(first.checksums | again.checksums) != 1:
            broken.append(f"request {number}: the bytes differ from the stored bytes")
    return broken
