"""Fixtures: our storage backend of SGLang in this process, on a store that all tests of the session
share, and a tiny model for servers of SGLang.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="2", SGLANG_USE_CPU_ENGINE="1")

# Makes the modules in this file's folder and in `tests/engines/sources`, and the package `servers`,
# importable.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "sources"), str(HERE.parents[2])]

from hosts import config  # noqa: E402

from ritornello.connector.identity import ModelIdentity  # noqa: E402
from ritornello.sglang import RitornelloStorage, storage  # noqa: E402
from ritornello.sglang.identity import Engine  # noqa: E402
from servers.environment import shared_model  # noqa: E402

Attach = Callable[..., RitornelloStorage]


@pytest.fixture(scope="session")
def model() -> Path:
    return shared_model("tiny")


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ritornello") / "store"


@pytest.fixture
def attach(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Attach]:
    """Returns a function that attaches the host pool `host` (SGLang's KV buffer in host memory) and
    the side pools `sides`, as SGLang does, to the session's store, to the store at `path`, or to a
    store that the settings `tiers` describe. `v1`: the setting `interface_v1`, with which SGLang
    passes its host memory instead of copies of pages. `said`: other values of fields of SGLang's
    storage configuration. The model has 2 KV heads, a weight fingerprint, and a name that is unique
    to the test.
    """
    caplog.set_level(logging.INFO)
    name = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]

    def engine_of(said: Any) -> Engine:
        return Engine(
            version="0.5.23",
            model=ModelIdentity(name, b"weights"),
            kv_heads=2,
            tp=(said.tp_rank, said.tp_size),
            pp=(said.pp_rank, said.pp_size),
            cp=(said.attn_cp_rank, said.attn_cp_size),
            replicated=said.is_mla_model,
        )

    monkeypatch.setattr(storage, "engine_of", engine_of)
    attached: list[RitornelloStorage] = []

    def attach(
        host: Any,
        *sides: tuple[str, Any],
        v1: bool = True,
        path: str = "",
        tiers: Mapping[str, Any] | None = None,
        **said: Any,
    ) -> Any:
        store = tiers or {"path": path or str(store_path), "capacity": "640MiB"}
        made = RitornelloStorage(config({**store, "interface_v1": int(v1)}, **said), {})
        attached.append(made)
        made.register_mem_pool_host(host)
        for side, pool in (("kv", host), *sides):
            made.register_mem_host_pool_v2(pool, side)
        made.on_host_pools_registered()
        return made

    yield attach
    for made in attached:
        made.close()
