"""The storage interface of the installed SGLang, and the storage that its factory constructs."""

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from hosts import config
from sglang.srt import runtime_context
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from ritornello.sglang import RitornelloStorage, storage
from ritornello.sglang.interface import METHODS, RECORDER, UPDATE_METHODS

DYNAMIC = {
    "backend_name": "ritornello",
    "module_path": "ritornello.sglang",
    "class_name": "RitornelloStorage",
}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_overrides_take_sglang_arguments(name: str) -> None:
    ours = getattr(RitornelloStorage, name)
    assert ours is not getattr(HiCacheStorage, name)
    assert tuple(inspect.signature(ours).parameters) == ("self", *METHODS[name])


def test_no_other_method_is_called() -> None:
    """A method that a new SGLang adds to its base class would be called on our storage, which does
    not override it.
    """
    public = {name for name in vars(HiCacheStorage) if not name.startswith("_")}
    assert public - set(METHODS) == {"on_host_pools_registered"}


def test_sglang_factory_constructs_storage(tmp_path: Path) -> None:
    extra = {**DYNAMIC, "path": str(tmp_path / "store"), "capacity": "640MiB"}
    made = StorageBackendFactory.create_backend("dynamic", config(extra), None)
    assert isinstance(made, RitornelloStorage)
    # No engine runs in this process, so another process must find none of its pages.
    assert made._engine.model.epoch
    made.close()


@pytest.mark.parametrize(
    ("extra", "others", "advice"),
    [
        ({}, {}, 'needs "path", the directory of the store'),
        ({"path": "/kv", "capcity": "1GiB"}, {}, "unknown key 'capcity'"),
        (
            {"path": "/kv"},
            {"dcp_size": 2, "tp_size": 2, "is_mla_model": True, "logical_page_size": 64},
            "does not serve decode context parallel size 2",
        ),
    ],
)
def test_unsupported_setup_fails_in_one_line(
    extra: dict[str, str], others: dict[str, int], advice: str
) -> None:
    with pytest.raises(ValueError, match=advice) as raised:
        StorageBackendFactory.create_backend(
            "dynamic", config({**DYNAMIC, **extra}, **others), None
        )
    assert "\n" not in str(raised.value)


def test_unknown_interface_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch_get_v1(self: object, keys: object, pages: object) -> None: ...

    with monkeypatch.context() as other:
        other.setattr(hicache_storage.HiCacheStorage, "batch_get_v1", batch_get_v1)
        with pytest.raises(ImportError, match="batch_get_v1 takes keys, pages") as raised:
            importlib.reload(storage)
    assert "written for SGLang 0.5.23" in str(raised.value)
    assert "\n" not in str(raised.value)
    importlib.reload(storage)


def test_late_attach_begins_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updater, manager, controller = storage.WATCHED
    watched = [(updater, name) for name in UPDATE_METHODS] + [
        (manager, RECORDER),
        (controller, "reset"),
    ]
    for kind, name in watched:
        monkeypatch.setattr(kind, name, getattr(kind, name))
    for name, value in (("epoch", b""), ("flushed", b""), ("_watched_controller", None)):
        monkeypatch.setattr(storage.updates, name, value)
    memory = SimpleNamespace(hicache_storage_backend=None)
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    importlib.reload(storage)
    assert storage.updates.epoch != storage.updates.flushed
