"""The interface of the installed LMCache is the interface that the adapter was tested with."""

import inspect

import lmcache
import pytest
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string

from ritornello.lmcache import NativeClient, RitornelloL2Adapter
from ritornello.lmcache.interface import INTERFACE, interface_difference
from ritornello.lmcache.naming import Family, ObjectName, page_key, parse_name


def test_interface_is_the_tested_one() -> None:
    assert lmcache.__version__ == INTERFACE.tested
    assert interface_difference(L2AdapterInterface, ObjectKey) == ""


def test_overrides_take_lmcache_arguments() -> None:
    ours = {name for name in vars(RitornelloL2Adapter) if hasattr(L2AdapterInterface, name)}
    checked = 0
    for name in ours:
        theirs = getattr(L2AdapterInterface, name)
        if name.startswith("_") or not inspect.isfunction(theirs):
            continue
        passed = inspect.signature(theirs).parameters
        assert list(inspect.signature(getattr(RitornelloL2Adapter, name)).parameters) == list(
            passed
        ), name
        checked += 1
    assert checked >= 15
    assert not inspect.isabstract(RitornelloL2Adapter)


def test_client_has_methods_of_bridge() -> None:
    for name in ("event_fd", "drain_completions", "close"):
        assert list(inspect.signature(getattr(NativeClient, name)).parameters) == ["self"]
    for name in ("get", "set"):
        method = getattr(NativeClient, f"submit_batch_{name}")
        assert len(inspect.signature(method).parameters) == 3
    for name in ("exists", "delete"):
        method = getattr(NativeClient, f"submit_batch_{name}")
        assert len(inspect.signature(method).parameters) == 2


def test_bridge_names_are_parsed() -> None:
    for salt in ("", "tenant"):
        key = ObjectKey(b"\x00\xff" * 16, "org/model-7b", 0x02010201, 17, salt)
        family = Family("org/model-7b", 17, salt)
        name = ObjectName(family, page_key(key.kv_rank, key.chunk_hash))
        assert parse_name(_object_key_to_string(key)) == name


def test_unknown_interface_fails_in_one_line() -> None:
    class Another(L2AdapterInterface):
        def submit_store_task(self, keys: object, objects: object, priority: int) -> int:
            return 0

    Another.__abstractmethods__ = L2AdapterInterface.__abstractmethods__
    with pytest.raises(ImportError, match=r"LMCache 0\.6\.0 differs \(submit_store_task"):
        INTERFACE.require(interface_difference(Another, ObjectKey), "0.6.0")
