"""Settings in vLLM's configuration, and options of one request."""

from logging import getLogger
from pathlib import Path
from typing import Any

import pytest
from support import keys_of, pages_of

import ritornello as rt
from ritornello.connector.opening import open_store
from ritornello.vllm.settings import DEFAULT_OPTIONS, YEAR, RequestOptions, Settings


def test_settings_need_only_a_path() -> None:
    assert Settings.parse({"path": "/kv"}) == Settings("/kv", read_only=False)


def test_path_may_be_a_list() -> None:
    settings = Settings.parse({"path": ["/a/kv", "/b/kv"], "read_only": True})
    assert (settings.directories, settings.read_only) == (("/a/kv", "/b/kv"), True)
    assert Settings.parse({"path": "/kv"}).directories == ("/kv",)


def test_capacity_and_read_only_are_parsed() -> None:
    extra = {"path": "/kv", "capacity": "2GiB", "read_only": True}
    assert Settings.parse(extra) == Settings("/kv", "2GiB", read_only=True)


def test_store_settings_are_passed_on() -> None:
    said = {"codec": "split", "eviction": "lru", "admission": "auto", "write_budget": "2TB/day"}
    settings = Settings.parse({"path": "/kv", **said})
    assert settings.options() == said
    assert Settings.parse({"path": "/kv"}).options() == {}


def test_tiers_replace_path() -> None:
    tiers = ["host 8GiB", "disk /kv 200GiB", "s3://bucket/prefix"]
    settings = Settings.parse({"tiers": tiers, "prefetch": "best_effort", "gate": "always"})
    assert settings == Settings("", tiers=tuple(tiers), prefetch="best_effort", gate="always")
    assert settings.has_remote
    assert not Settings.parse({"tiers": tiers[:2]}).has_remote
    assert "hunter2" not in repr(Settings.parse({"tiers": [*tiers[:2], "m:C?password=hunter2"]}))
    assert not Settings.parse({"path": "/kv"}).has_remote


def test_read_only_engine_does_not_write_the_remote(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    local = f"disk {tmp_path}/kv 64MiB"
    tiers = [local, f"file://{tmp_path}/far write=selective(1)"]
    keys, scope = keys_of("found", 4), rt.Scope.opaque("read only", 4096, chained=True)
    for read_only, written in ((True, 0), (False, len(keys))):
        settings = Settings.parse({"tiers": tiers, "read_only": read_only})
        assert settings.tiers == tuple(tiers)
        with open_store(settings, getLogger(__name__)) as store:
            cache: Any = store
            cache.submit_put(scope, keys, pages_of(keys, 4096)).wait(60)
            for lease in cache.lookup(scope, keys, gate="always").leases:
                cache.release(lease)
            cache.flush()
            assert cache.stats()["tiers"][1]["written_pages"] == written
    assert Settings.parse({"tiers": [local], "read_only": True}).opened_tiers == (local,)


@pytest.mark.parametrize(
    ("extra", "advice"),
    [
        ({}, 'needs "path"'),
        ({"path": ""}, 'needs "path"'),
        ({"path": []}, r'"path" is a directory, or a list of directories.* not \[\]'),
        ({"path": ["/a", 3]}, r"/nvme1/kv\W+, not \['/a', 3\]"),
        ({"path": ["/a", ""]}, '"path" is a directory, or a list'),
        ({"path": "/kv", "size": 1}, "unknown key 'size'; ritornello knows path, capacity"),
        ({"path": "/kv", "capacity": 1.5}, '"capacity" is text like "200GiB"'),
        ({"path": "/kv", "capacity": True}, '"capacity" is text like "200GiB"'),
        ({"path": "/kv", "read_only": "no"}, '"read_only" is true or false'),
        ({"path": "/kv", "codec": 4}, '"codec" is a text'),
        ({"path": "/kv", "gate": "auto"}, '"gate" is permitted only beside "tiers"'),
        ({"tiers": ["host 1GiB"], "path": "/kv"}, '"path" is not permitted beside "tiers"'),
        ({"tiers": "host 1GiB"}, '"tiers" is a list like'),
        ({"tiers": []}, '"tiers" is a list like'),
        ({"tiers": [" "]}, '"tiers" is a list like'),
        ({"tiers": ["host 1GiB"], "gate": "maybe"}, "one of auto, always, never"),
        ({"tiers": ["host 1GiB"], "prefetch": 3}, '"prefetch" is text: "best_effort"'),
        (
            {"path": "/kv", "write_budget": 1.5},
            '"write_budget" is text like "200GiB"',
        ),
    ],
)
def test_invalid_settings_are_named(extra: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        Settings.parse(extra)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_request_loads_and_stores_by_default(params: dict[str, Any] | None) -> None:
    assert RequestOptions.parse(params) == DEFAULT_OPTIONS


def test_request_can_opt_out() -> None:
    assert RequestOptions.parse({"ritornello.no_load": True}) == RequestOptions(loads=False)
    assert RequestOptions.parse({"ritornello.no_store": True}) == RequestOptions(stores=False)
    assert RequestOptions.parse({"ritornello.no_store": "yes"}) == DEFAULT_OPTIONS


def test_invalid_retention_is_ignored() -> None:
    assert RequestOptions.parse({"ritornello.retain": 90}) == RequestOptions(retain=90.0)
    assert RequestOptions.parse({"ritornello.retain": float("inf")}) == RequestOptions(retain=YEAR)
    for odd in (0, -1, float("nan"), True, "1h", None, [5]):
        assert RequestOptions.parse({"ritornello.retain": odd}) == DEFAULT_OPTIONS
