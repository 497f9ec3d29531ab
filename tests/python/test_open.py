"""Opening and destroying a store: refused arguments, the remedies that the errors name, policies,
and lists of directories.
"""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import SMALL, CoreLog, keys_of, open_small, pages_of

import ritornello as rt
from ritornello.connector.opening import free_bytes, open_store
from ritornello.connector.settings import StoreSettings
from ritornello.errors import InvalidError, RitornelloError, SettingError


def test_new_store_requires_capacity(where: Path) -> None:
    with pytest.raises(InvalidError, match="capacity"):
        rt.Store.open(where)
    assert not where.exists() or not any(where.iterdir())


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"capacity": "1MiB"}, "at least"),
        ({"capacity": "200G"}, "200GiB .* or 200GB"),
        ({"capacity": "plenty"}, "200GiB"),
        ({"capacity": -5}, "capacity is -5"),
        ({"capacity": [1]}, r"capacity is \[1\]"),
        ({"segment_bytes": 1000}, "segment_bytes"),
        ({"io": "teleport"}, "uring"),
        ({"durability": "eternal"}, "durable"),
        ({"index": "abacus"}, "run, memory"),
        ({"eviction": "random"}, "lru.*s3fifo.*adaptive"),
        ({"codec": "gzip"}, "raw, split, zstd, int8, int4"),
        ({"admission": "never"}, "second_sight"),
        ({"write_budget": "2TB/year"}, "2TB/day"),
        ({"write_budget": "fast"}, "200GiB"),
        ({"write_budget": -1}, "write_budget is -1"),
    ],
)
def test_invalid_options_are_rejected(where: Path, options: dict[str, Any], advice: str) -> None:
    with pytest.raises(InvalidError, match=advice):
        rt.Store.open(where, **{**SMALL, **options})


def test_reopened_store_keeps_its_index_backend(where: Path) -> None:
    try:
        store = rt.Store.open(where, **{**SMALL, "index": "lsm"})
    except InvalidError as error:
        assert "feature" in str(error)
        pytest.skip("the index lsm is not compiled in")
    scope = rt.Scope.opaque("lsm", 4096)
    keys = keys_of("lsm", 5)
    with store:
        store.put_batch(scope, keys, pages_of(keys, 4096))
    with rt.Store.open(where) as store:
        assert store.probe(scope, keys) == 5
        assert (where / "index" / "lsm").is_dir()


def test_capacity_may_be_number_or_text(where: Path) -> None:
    rt.Store.open(where, 64 << 20, segment_bytes=4 << 20).close()
    with rt.Store.open(str(where), "64 MiB") as store:
        assert store.stats()["capacity_bytes"] == 64 << 20
        assert store.path == str(where)


def test_other_capacity_resizes_store(where: Path) -> None:
    open_small(where).close()
    with rt.Store.open(where, "128MiB") as store:
        assert store.stats()["capacity_bytes"] == 128 << 20
        with rt.Store.open(where, "64MiB") as second:
            assert second.stats()["capacity_bytes"] == 128 << 20
        store.resize("64MiB")
        assert store.stats()["capacity_bytes"] == 64 << 20
        with pytest.raises(InvalidError, match="two segments"):
            store.resize(1 << 20)


def test_destroy_removes_unused_store(where: Path) -> None:
    with pytest.raises(InvalidError):
        rt.destroy(where)
    with open_small(where), pytest.raises(InvalidError, match="close it first"):
        rt.destroy(where)
    rt.destroy(where)
    assert not where.exists()


def test_directory_with_foreign_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidError):
        open_small(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_default_capacity_is_used_despite_files_of_system_and_store(tmp_path: Path) -> None:
    settings = StoreSettings(str(tmp_path))
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidError, match="not a Ritornello store"):
        open_store(settings, logging.getLogger())
    (tmp_path / "thesis.tex").rename(tmp_path / "policy.toml")
    (tmp_path / "policy.toml").write_text("")
    # The root of an ext4 file system has a `lost+found`; an interrupted creation of a store leaves
    # a `LOCK`.
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "LOCK").touch()
    open_store(settings, logging.getLogger()).close()


def test_path_to_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(RitornelloError):
        open_small(path)
    assert path.read_text() == ""


def test_damaged_manifest_is_reported(where: Path) -> None:
    with open_small(where) as store:
        store.put_batch(rt.Scope.opaque("x", 64), keys_of("x", 1), pages_of(keys_of("x", 1), 64))
    for path in where.iterdir():
        if path.is_file() and re.search("manifest", path.name, re.IGNORECASE):
            path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(RitornelloError, match="manifest"):
        rt.Store.open(where)


@pytest.mark.parametrize("mount_point", [False, True])
def test_loss_of_first_directory_spares_the_others(tmp_path: Path, *, mount_point: bool) -> None:
    first, *others = listed = [tmp_path / name for name in "abc"]
    keys, scope = keys_of("x", 40), rt.Scope.opaque("x", 65536)
    with open_small(listed) as store:
        assert store.put_batch(scope, keys, list(pages_of(keys, 65536))) == 40

    def others_files() -> dict[Path, bytes]:
        files = (path for other in others for path in other.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    before = others_files()
    assert {path.name for path in before} > {"VOLUME"}
    shutil.rmtree(first)
    if mount_point:
        # The mount point of a disk that is not mounted is an empty directory.
        first.mkdir()
    settings = StoreSettings([str(path) for path in listed], "64MiB")
    for _ in range(2):
        with pytest.raises(InvalidError, match="holds a volume of another store") as refused:
            open_store(settings, logging.getLogger())
        assert "the store's own directory is wrong: mount or name the right one" in str(
            refused.value
        )
        command = " ".join(["ritornello paths restore", *map(str, listed)])
        assert f"`{command}`" in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(InvalidError, match="not a Ritornello store"):
        open_small(others)
    assert others_files() == before
    for other in others:
        shutil.rmtree(other)
    with open_small(listed) as store:
        assert store.probe(scope, keys) == 0


def test_policy_is_strict_without_a_file(where: Path) -> None:
    with open_small(where) as store:
        assert not store.policy.allow_weak_hashes
        assert not store.policy.allow_request_retention and store.policy.deny_clients == []
        store.policy.check_hash("sha256")
        with pytest.raises(InvalidError, match=r"allow_weak_hashes = true.*policy\.toml"):
            store.policy.check_hash("xxhash")
    with pytest.raises(RitornelloError):
        store.policy  # noqa: B018


def test_policy_is_read_at_every_open(where: Path) -> None:
    where.mkdir(exist_ok=True)
    policy = where / "policy.toml"
    policy.write_text("allow_weak_hashes = true\n")
    with open_small(where) as store:
        assert store.policy.allow_weak_hashes
        store.policy.check_hash("xxhash")
        policy.unlink()
        assert store.policy.allow_weak_hashes
        with rt.Store.open(where) as second:
            assert not second.policy.allow_weak_hashes


def test_policy_permits_retention_and_denies_calls(where: Path) -> None:
    where.mkdir(exist_ok=True)
    text = 'allow_request_retention = true\ndeny_clients = ["drop_scope", "clear"]\n'
    (where / "policy.toml").write_text(text)
    with open_small(where) as store:
        assert store.policy.allow_request_retention
        assert store.policy.deny_clients == ["clear", "drop_scope"]
        store.clear()


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("allow_weak_hash = true", r"unknown field `allow_weak_hash`.*line=1"),
        ("\nallow_weak_hashes = 'yes'", "line=2"),
        ("[policy]\n", "allow_weak_hashes = true"),
        ('deny_clients = ["flush"]', r"unknown variant `flush`.*line=1"),
    ],
)
def test_store_with_invalid_policy_is_not_opened(where: Path, text: str, advice: str) -> None:
    where.mkdir(exist_ok=True)
    (where / "policy.toml").write_text(text)
    with pytest.raises(InvalidError, match=advice):
        open_small(where)


def test_destroy_removes_policy(where: Path) -> None:
    where.mkdir(exist_ok=True)
    (where / "policy.toml").write_text("allow_weak_hashes = true")
    open_small(where).close()
    rt.destroy(where)
    assert not where.exists()


def test_cache_has_policy_of_lowest_tier(where: Path) -> None:
    tiers = [f"host 16MiB {where}/host", f"disk {where}/disk 64MiB"]
    for tier, allowed in (("host", False), ("disk", True)):
        (where / tier).mkdir(parents=True)
        (where / tier / "policy.toml").write_text("allow_weak_hashes = true")
        with rt.Cache.open(tiers) as cache:
            assert cache.policy.allow_weak_hashes is allowed
        rt.destroy(where / "disk")


def test_connectors_create_store_next_to_policy(where: Path) -> None:
    where.mkdir(exist_ok=True)
    (where / "policy.toml").write_text("allow_weak_hashes = true")
    with pytest.raises(InvalidError):
        open_store(StoreSettings(str(where), capacity="1 potato"), logging.getLogger("test"))
    with open_store(StoreSettings(str(where)), logging.getLogger("test")) as store:
        assert store.policy.allow_weak_hashes


def names_of(tmp_path: Path, names: str) -> list[Path]:
    return [tmp_path / name for name in names]


def test_path_may_be_a_list_of_directories(tmp_path: Path) -> None:
    scope, keys = rt.Scope.opaque("spread", 4096), keys_of("spread", 40)
    with rt.Store.open(names_of(tmp_path, "abc"), **SMALL) as store:
        assert store.path == str(tmp_path / "a")
        assert len(store.stats()["paths"]) == 3
        assert store.stats()["capacity_bytes"] == 64 << 20
        assert store.put_batch(scope, keys, pages_of(keys, 4096)) == 40
    with rt.Store.open(tuple(map(str, names_of(tmp_path, "abcd")))) as store:
        assert len(store.stats()["paths"]) == 4
        assert store.probe(scope, keys) == 40


@pytest.mark.parametrize(
    ("path", "advice"),
    [([], r"path is \[\]: pass a directory, or a list"), (3, "path is 3"), ([3], r"path is \[3\]")],
)
def test_path_of_wrong_type_is_refused(path: Any, advice: str) -> None:
    with pytest.raises(SettingError, match=advice):
        rt.Store.open(path, "64MiB")


def test_invalid_lists_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "b").mkdir()
    open_small(tmp_path / "other").close()
    for names, advice in (
        (["a", "b", "b"], "listed twice"),
        (["a", "b", "link"], "listed twice"),
        (["a", "a/b"], "inside another"),
        (["a", "other/segments/b"], "belongs to another store"),
    ):
        with pytest.raises(InvalidError, match=advice) as refused:
            open_small([tmp_path / name for name in names])
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "a").exists()


def test_directories_that_differ_from_list_are_logged(tmp_path: Path, core_log: CoreLog) -> None:
    open_small(names_of(tmp_path, "ab")).close()
    assert not core_log.take()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    open_small([tmp_path / "a", tmp_path / "thesis"]).close()
    first, second = core_log.take("ritornello paths drain")
    assert f"ritornello paths add {tmp_path}/a {tmp_path}/thesis" in first
    assert "not empty" in first
    assert f"keeps them: {tmp_path}/b (`ritornello paths drain {tmp_path}/a DIR`" in second
    # A path that is not a list causes no warning about other directories.
    open_small(tmp_path / "a").close()
    assert not core_log.take()
    open_small([tmp_path / "a"]).close()
    assert core_log.take("ritornello paths drain")


def test_default_capacity_counts_each_file_system_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listed = [str(path) for path in names_of(tmp_path, "abc")]
    free = shutil.disk_usage(tmp_path).free
    assert abs(free_bytes(listed) - free) < 1 << 30
    shm = Path("/dev/shm")
    if shm.is_dir() and shm.stat().st_dev != tmp_path.stat().st_dev:
        both = free + shutil.disk_usage(shm).free
        assert abs(free_bytes([*listed, "/dev/shm/missing/kv"]) - both) < 1 << 30
    monkeypatch.setattr("ritornello.connector.opening.free_bytes", lambda _: 256 << 20)
    # The default capacity, half of the 256 MiB that are free, is too small for two segments.
    with pytest.raises(InvalidError, match="two segments"):
        open_store(StoreSettings(listed), logging.getLogger("test"))
    monkeypatch.setattr("ritornello.connector.opening.free_bytes", lambda _: 4 << 30)
    with open_store(StoreSettings(listed), logging.getLogger("test")) as store:
        assert store.stats()["capacity_bytes"] == 2 << 30
        assert len(store.stats()["paths"]) == 3
    assert f"created the store in {', '.join(listed)} with half" in caplog.text
