"""A real `lmcache server`, called by `lmcache bench server`: killed, and started again."""

import re
import signal
import time
from pathlib import Path

from harness import AdapterKind

from servers.lmcache import LMCacheServer, broken_claims
from servers.process import request


def test_killed_server_finds_everything_again(adapter_kind: AdapterKind, tmp_path: Path) -> None:
    adapter = adapter_kind.spec()
    with LMCacheServer(adapter, tmp_path / "cold.log") as server:
        cold = server.ask(2)
        # Wait until the puts are durable: the store syncs every two seconds.
        time.sleep(5)
        server.stop(signal.SIGKILL)
    with LMCacheServer(adapter, tmp_path / "warm.log") as server:
        warm = server.ask(2)
        _, metrics = request(server.http, "/metrics")
    assert broken_claims(cold, warm) == []
    if adapter_kind.kind == "plugin":
        loaded = re.search(
            rb"^lmcache_mp_ritornello_loaded_pages_total\{.*\} (\S+)$", metrics, re.M
        )
        assert loaded and float(loaded[1]) > 0
    assert all(asked.chunks == 4 for asked in cold.values())
