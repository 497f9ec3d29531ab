"""A real `lmcache server`, called by `lmcache bench server`: killed, and started again."""

import signal
import time
from pathlib import Path

from harness import AdapterKind

from servers.lmcache import LMCacheServer, broken_claims


def test_killed_server_finds_everything_again(adapter_kind: AdapterKind, tmp_path: Path) -> None:
    adapter = adapter_kind.spec()
    with LMCacheServer(adapter, tmp_path / "cold.log") as server:
        cold = server.ask(2)
        # The store makes visible puts durable within this time.
        time.sleep(5)
        server.stop(signal.SIGKILL)
    with LMCacheServer(adapter, tmp_path / "warm.log") as server:
        warm = server.ask(2)
    assert broken_claims(cold, warm) == []
    assert all(asked.chunks == 4 for asked in cold.values())
