"""Settings in SGLang's extra configuration, and the interfaces of SGLang that are accepted."""

from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
from support import blank, keys_of, pages_of

import ritornello as rt
from ritornello.sglang import interface
from ritornello.sglang.interface import INTERFACE, interface_difference
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.settings import ENGINE, Settings
from ritornello.sglang.store import SGLangStore


def test_settings_need_only_a_path_and_ignore_keys_of_sglang() -> None:
    extra = {"path": "/kv", **dict.fromkeys(ENGINE, "x")}
    assert Settings.parse(extra) == Settings("/kv")
    assert Settings.parse(extra).options() == {}


@pytest.mark.parametrize("store", [{"path": "/kv"}, {"tiers": ["disk /kv 200GiB"]}])
def test_file_storage_path_of_sglang_is_ignored(store: dict[str, Any]) -> None:
    """SGLang adds the path for every storage, if the server has its option."""
    extra = {**store, "file_storage_path": "/var/sglang"}
    assert Settings.parse(extra) == Settings.parse(store)


def test_path_may_be_a_list() -> None:
    settings = Settings.parse({"path": ["/a/kv", "/b/kv"], "backend_name": "x"})
    assert settings.directories == ("/a/kv", "/b/kv")
    assert Settings.parse({"path": "/kv"}).directories == ("/kv",)


def test_pages_are_in_all_listed_directories(tmp_path: Path) -> None:
    listed = [str(tmp_path / name) for name in "ab"]
    scope, keys = rt.Scope.opaque("listed", 1 << 20, chained=True), keys_of("listed", 16)
    pages, out = pages_of(keys, 1 << 20), blank(16, 1 << 20)
    store = SGLangStore(Settings.parse({"path": listed, "capacity": "1GiB"}), RateMeter())
    assert store.put(scope, keys, list(pages), None) == 16
    store.close()
    assert list(tmp_path.glob("a/segments/seg-*")) and list(tmp_path.glob("b/seg-*"))
    store = SGLangStore(Settings.parse({"path": listed[0]}), RateMeter())
    assert store.find([scope], keys, None, 16) == 16
    assert store.get(scope, keys, list(out)) == 16
    assert (out == pages).all()
    store.close()


def test_store_settings_are_passed_on() -> None:
    said = {"codec": "split", "eviction": "lru", "admission": "auto", "write_budget": "2TB/day"}
    settings = Settings.parse({"path": "/kv", "capacity": 1 << 30, **said})
    assert settings.capacity == 1 << 30
    assert settings.options() == said


def test_tiers_replace_path() -> None:
    tiers = ["disk /nvme/kv 200GiB", "s3://bucket/prefix"]
    settings = Settings.parse({"tiers": tiers, "prefetch": "best_effort", "interface_v1": 1})
    assert settings.tiers == tuple(tiers)
    assert (settings.prefetch, settings.gate, settings.has_remote) == ("best_effort", "auto", True)


@pytest.mark.parametrize(
    ("remote", "kept"),
    [
        ("s3://bucket/prefix", "s3://bucket/prefix write=none"),
        ("s3://bucket write=write_back rate=1MiB", "s3://bucket rate=1MiB write=none"),
        ("s3://bucket?write=x", "s3://bucket?write=x write=none"),
        ("s3://bucket write=selective(2)", "s3://bucket write=selective(2)"),
        ("", ""),
    ],
)
def test_write_through_to_remote_can_be_removed_from_tiers(remote: str, kept: str) -> None:
    disk = "disk /nvme/kv 200GiB write=write_through"
    settings = Settings.parse({"tiers": [disk, *filter(None, [remote])]})
    assert settings.without_write_through().tiers == (disk, *filter(None, [kept]))
    assert Settings.parse({"path": "/kv"}).without_write_through() == Settings("/kv")


@pytest.mark.parametrize(
    ("extra", "advice"),
    [
        (None, 'needs "path"'),
        ({"path": ""}, 'needs "path"'),
        ({"path": []}, r'"path" is a directory, or a list of directories.* not \[\]'),
        ({"path": ["/a", 3]}, r"/nvme1/kv\W+, not \['/a', 3\]"),
        ({"path": ["/a", ""]}, '"path" is a directory, or a list'),
        ({"path": "/kv", "size": 1}, "unknown key 'size'; ritornello knows path, capacity"),
        ({"path": "/kv", "capacity": 1.5}, '"capacity" is text like "200GiB"'),
        ({"path": "/kv", "capacity": True}, '"capacity" is text like "200GiB"'),
        ({"path": "/kv", "write_budget": [1]}, '"write_budget" is text like'),
        ({"path": "/kv", "codec": 4}, '"codec" is a text'),
        ({"tiers": ["host 8GiB", "disk /kv 1GiB"]}, "--hicache-size .GB. or --hicache-ratio"),
        ({"tiers": ["device 8GiB", "disk /kv 1GiB"]}, "'device 8GiB': SGLang has this tier itself"),
    ],
)
def test_invalid_settings_are_named(extra: dict[str, Any] | None, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        Settings.parse(extra)


def base(**others: Any) -> Any:
    """Returns a stand-in for SGLang's storage base class that has the interface in
    `ritornello.sglang.interface`; `others` adds or replaces members.
    """
    members: dict[str, Any] = {}
    for name, parameters in interface.METHODS.items():
        taken = ", ".join(("self", *(f"{parameter}=None" for parameter in parameters)))
        members[name] = eval(f"lambda {taken}: None")
    members |= {"__abstractmethods__": interface.ABSTRACT, **others}
    return type("Base", (), members)


def fields(name: str, known: frozenset[str], **others: Any) -> Any:
    return make_dataclass(name, sorted(known), namespace=others)


CONFIG = fields("Config", interface.CONFIG, is_storage_writer=True)
TRANSFER = fields("Transfer", interface.TRANSFER)
RESULT = fields("Result", interface.RESULT)


def test_tested_interface_is_accepted() -> None:
    assert interface_difference(base(), CONFIG, TRANSFER, RESULT) == ""


@pytest.mark.parametrize(
    "others",
    [
        {"prefetch_hint": lambda self, keys: None},
        {"exists": lambda self, key, tier=0: False},
        {"exists": lambda self, key, *, tier=0: False},
        {"exists": lambda self, key, *more, **named: False},
        {"__abstractmethods__": interface.ABSTRACT - {"get"}},
    ],
)
def test_interface_with_optional_parts_is_accepted(others: dict[str, Any]) -> None:
    assert interface_difference(base(**others), CONFIG, TRANSFER, RESULT) == ""


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        (
            (
                base(__abstractmethods__={*interface.ABSTRACT, "batch_move"}),
                CONFIG,
                TRANSFER,
                RESULT,
            ),
            "unknown abstract methods: batch_move",
        ),
        (
            (base(exists=lambda self, key, tier: False), CONFIG, TRANSFER, RESULT),
            "exists takes key, tier",
        ),
        (
            (base(exists=lambda self, tier=0, key="": False), CONFIG, TRANSFER, RESULT),
            "exists takes tier, key",
        ),
        (
            (base(batch_get_v1=lambda self, keys, slots: []), CONFIG, TRANSFER, RESULT),
            "batch_get_v1 takes keys, slots",
        ),
        ((base(get_stats=None), CONFIG, TRANSFER, RESULT), "get_stats is missing"),
        (
            (base(), fields("Config", interface.CONFIG - {"tp_rank"}), TRANSFER, RESULT),
            "Config has no tp_rank",
        ),
        ((base(), CONFIG, fields("Transfer", frozenset()), RESULT), "Transfer has no hit_policy"),
    ],
)
def test_unknown_interface_fails_in_one_line(classes: Any, problem: str) -> None:
    storage, config, transfer, result = classes
    with pytest.raises(ImportError, match=problem) as raised:
        INTERFACE.require(interface_difference(storage, config, transfer, result), "9.9")
    assert "SGLang 9.9" in str(raised.value)
    assert "\n" not in str(raised.value)
