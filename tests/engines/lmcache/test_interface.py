"""The adapter interface of each tested version of LMCache, read from sources without imports, and
the names that the installed LMCache's bridge to native clients gives to objects.
"""

import ast
import inspect

import pytest
from declarations import Sources, parameters
from expression_types import Hints
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string
from package_uses import PackageUses
from released import require_alike, require_served, uses_of

from ritornello.lmcache import NativeClient, RitornelloL2Adapter
from ritornello.lmcache.interface import (
    ABSTRACT,
    INTERFACE,
    KEY_FIELDS,
    PARAMETERS,
    TESTED,
    interface_difference,
)
from ritornello.lmcache.naming import Family, ObjectName, page_key, parse_name

DISTRIBUTED = "lmcache.v1.distributed"
ADAPTERS = f"{DISTRIBUTED}.l2_adapters"
BASE = (f"{ADAPTERS}.base", "L2AdapterInterface")


@pytest.fixture(params=TESTED, ids="lmcache-{}".format)
def uses(request: pytest.FixtureRequest) -> PackageUses:
    return uses_of("lmcache", request.param, Hints())


@pytest.fixture
def sources(uses: PackageUses) -> Sources:
    return uses.sources


def test_lmcache_has_everything_that_is_used(uses: PackageUses) -> None:
    require_served(uses, names=50, overrides=15)
    # LMCache does not call `counts`; our metrics and our `report_status` do.
    assert uses.own_methods() == {"RitornelloL2Adapter.counts"}


def test_versions_take_the_same_arguments() -> None:
    require_alike("lmcache", TESTED, Hints())


def test_adapter_base_class_has_tested_interface(sources: Sources) -> None:
    base = sources.methods(*BASE)
    assert sources.abstract(*BASE) == ABSTRACT
    assert {name: tuple(parameters(base[name]).positional) for name in PARAMETERS} == PARAMETERS
    assert sources.fields(f"{DISTRIBUTED}.api", "ObjectKey") == KEY_FIELDS


def test_installed_interface_is_accepted() -> None:
    assert interface_difference(L2AdapterInterface, ObjectKey) == ""
    assert not inspect.isabstract(RitornelloL2Adapter)


def test_plugin_factory_calls_our_constructor(sources: Sources) -> None:
    code = sources.text(f"{ADAPTERS}.plugin_l2_adapter")
    for key in ("adapter_params", "class_name", "module_path"):
        assert f'd.get("{key}"' in code
    assert 'kwargs["l1_memory_desc"] = l1_memory_desc' in code
    assert "return adapter_cls(\n        config.adapter_params" in code
    assert 'register_l2_adapter_factory("plugin", _create_plugin_adapter)' in code
    assert list(inspect.signature(RitornelloL2Adapter).parameters) == ["params", "l1_memory_desc"]


def test_native_plugin_calls_our_client(sources: Sources) -> None:
    code = sources.text(f"{ADAPTERS}.native_plugin_l2_adapter")
    assert "native_client = connector_cls(**config.adapter_params)" in code
    bridge = sources.class_of(f"{ADAPTERS}.native_connector_l2_adapter", "NativeConnectorL2Adapter")
    calls = [node for node in ast.walk(bridge) if isinstance(node, ast.Call)]
    passed = {
        call.func.attr: len(call.args)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) in ("native_client", "self._client")
    }
    assert len(passed) == 7
    for name, arguments in passed.items():
        assert len(inspect.signature(getattr(NativeClient, name)).parameters) == 1 + arguments, name


def test_object_names_of_lmcache_bridge_are_parsed() -> None:
    for salt in ("", "tenant"):
        key = ObjectKey(b"\x00\xff" * 16, "org/model-7b", 0x02010201, 17, salt)
        family = Family("org/model-7b", 17, salt)
        name = ObjectName(family, page_key(key.kv_rank, key.chunk_hash))
        assert parse_name(_object_key_to_string(key)) == name


def test_keys_of_lmcache_lack_lora_adapters(sources: Sources) -> None:
    """If this fails, LMCache may name the adapter: correct docs/engines/lmcache.md."""
    hasher = sources.methods("lmcache.v1.multiprocess.token_hasher", "TokenHasher")
    assert "self.hash_func((prefix_hash, tuple(tokens), None))" in ast.unparse(
        hasher["hash_tokens"]
    )
    key = sources.fields("lmcache.v1.multiprocess.custom_types", "IPCCacheServerKey")
    request = "lmcache.integration.vllm.lmcache_mp_metadata"
    assert not any("lora" in name for name in key)
    assert "lora" not in sources.text(request).lower()


def test_unknown_interface_fails_in_one_line() -> None:
    class Another(L2AdapterInterface):
        def submit_store_task(self, keys: object, objects: object, priority: int) -> int:
            return 0

    Another.__abstractmethods__ = L2AdapterInterface.__abstractmethods__
    with pytest.raises(ImportError, match=r"LMCache 0\.6\.0 differs \(submit_store_task"):
        INTERFACE.require(interface_difference(Another, ObjectKey), "0.6.0")
