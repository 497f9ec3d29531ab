"""The connector's settings as settings of vLLM's offloading: tiers, sizes of chunks and host
memory.
"""

from pathlib import Path
from typing import Any

import pytest

from ritornello.vllm.offloading_settings import (
    CHUNK_TOKENS,
    GIB,
    HOST_BYTES_MAX,
    MIB,
    OffloadingSettings,
    bytes_of,
    chunk_blocks,
    default_host_bytes,
    host_rows,
    memory_bytes,
)
from ritornello.vllm.tier.settings import TierSettings

DISK = "disk /kv 200GiB"


def test_path_and_store_settings_reach_tier() -> None:
    extra = {"path": ["/a", "/b"], "capacity": "2GiB", "read_only": True, "codec": "zstd"}
    settings = OffloadingSettings.parse(extra)
    assert (settings.host_bytes, settings.tier, settings.notes) == (None, extra, ())
    store = TierSettings.parse(settings.tier).store
    assert (store.directories, store.read_only, store.codec) == (("/a", "/b"), True, "zstd")


@pytest.mark.parametrize(
    ("tiers", "host", "tier"),
    [
        ([DISK], None, {"path": ["/kv"], "capacity": "200GiB"}),
        (["host 8GiB", DISK], 8 * GIB, {"path": ["/kv"], "capacity": "200GiB"}),
        (["host 1.5GB", "disk /kv"], 1_500_000_000, {"path": ["/kv"]}),
        (["disk /a /b 4TiB"], None, {"path": ["/a", "/b"], "capacity": "4TiB"}),
        (["disk /a /b"], None, {"path": ["/a", "/b"]}),
    ],
)
def test_tiers_become_host_memory_and_store(
    tiers: list[str], host: int | None, tier: dict[str, Any]
) -> None:
    settings = OffloadingSettings.parse({"tiers": tiers, "read_only": True})
    assert settings.host_bytes == host
    assert settings.tier == tier | {"read_only": True}
    assert TierSettings.parse(settings.tier).store.read_only


@pytest.mark.parametrize(
    ("extra", "advice"),
    [
        ({"path": "/kv", "host": "8GiB"}, "unknown key 'host'"),
        ({"tiers": ["gpu 20GiB", DISK]}, "--gpu-memory-utilization or --kv-cache-memory-bytes"),
        ({"tiers": ["host 8GiB"]}, "--kv-offloading-size"),
        ({"tiers": ["host 8GiB /dev/shm/kv", DISK]}, 'one host tier, in /dev/shm: .*"host 8GiB"'),
        ({"tiers": ["host 1GiB", "host 2GiB", DISK]}, "one host tier"),
        ({"tiers": [DISK, "host 8GiB"]}, "first in the list"),
        ({"tiers": ["host", DISK]}, '"host 8GiB"'),
        ({"tiers": ["host 8G", DISK]}, "a number and a unit, such as 8GiB, not '8G'"),
        ({"tiers": [DISK, "disk /b"]}, "one disk tier"),
        ({"tiers": ["disk"]}, "one disk tier"),
        ({"tiers": [DISK, "s3://bucket/prefix"]}, '{"type": "obj"} or {"type": "fs"} in "second'),
        ({"tiers": [DISK, "file:///mnt/kv"]}, '"type": "fs"'),
        ({"tiers": ["host 8GiB", f"{DISK} rate=1GiB"]}, '"rate=1GiB" has no effect here'),
        ({"tiers": ["host 8GiB", f"{DISK} write=write_back"]}, "vLLM writes every chunk"),
    ],
)
def test_settings_that_vllm_has_are_named(extra: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice) as raised:
        OffloadingSettings.parse(extra)
    assert str(raised.value).startswith("kv_connector_extra_config: ")
    assert "\n" not in str(raised.value)


def test_error_hides_options_of_address() -> None:
    with pytest.raises(ValueError, match="s3://b") as raised:
        OffloadingSettings.parse({"tiers": [DISK, "s3://b?secret=hunter2"]})
    assert "hunter2" not in str(raised.value)


def test_settings_without_effect_are_noted() -> None:
    (gate,) = OffloadingSettings.parse({"tiers": [DISK], "gate": "never"}).notes
    assert '"gate" has no effect' in gate
    assert len(OffloadingSettings.parse({"tiers": [DISK], "prefetch": "timeout"}).notes) == 1


@pytest.mark.parametrize(
    ("model", "token_bytes", "block_tokens", "blocks"),
    [
        ("Qwen2.5 0.5B", 12 << 10, 16, 16),
        ("Llama 3 8B", 128 << 10, 16, 1),
        ("Llama 3 8B, blocks of 64", 128 << 10, 64, 1),
        ("Llama 3 70B", 320 << 10, 16, 1),
        ("DeepSeek V3", 70_272, 64, 1),
        ("Qwen2.5 7B", 56 << 10, 16, 4),
        ("a tiny model", 1 << 10, 32, 8),
        ("blocks above the limit", 1 << 10, 528, 1),
    ],
)
def test_chunk_is_some_mebibytes(
    model: str, token_bytes: int, block_tokens: int, blocks: int
) -> None:
    assert chunk_blocks(token_bytes * block_tokens, block_tokens) == blocks
    tokens = blocks * block_tokens
    assert tokens <= CHUNK_TOKENS or blocks == 1, model
    assert tokens * token_bytes >= 2 * MIB or 2 * tokens > CHUNK_TOKENS


def test_default_host_memory_is_share_of_machine() -> None:
    assert default_host_bytes(1, 64 * GIB, 32 * GIB) == 16 * GIB
    assert default_host_bytes(4, 64 * GIB, 32 * GIB) == 4 * GIB
    assert default_host_bytes(0, 64 * GIB, 32 * GIB) == 16 * GIB
    assert default_host_bytes(1, 2048 * GIB, 1024 * GIB) == HOST_BYTES_MAX
    assert default_host_bytes(1, 64 * GIB, 64 * MIB) == 57 * MIB, "docker's /dev/shm"


def test_host_memory_without_room_is_refused() -> None:
    assert host_rows(8 * MIB, 2 * MIB) == 4
    with pytest.raises(ValueError, match=r"no room for a chunk of 2097152 bytes.*--shm-size"):
        host_rows(MIB, 2 * MIB)


def test_memory_limit_of_control_group_counts(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) > 64 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    machine = memory_bytes(tmp_path)
    (tmp_path / "memory.max").write_text(f"{32 * MIB}\n")
    assert memory_bytes(tmp_path) == 32 * MIB
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{1 << 63}\n")
    assert memory_bytes(tmp_path) == machine
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{16 * MIB}\n")
    assert memory_bytes(tmp_path) == 16 * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 * GIB), (" 1.5 gib", 3 * GIB // 2), ("2TB", 2 * 10**12), ("4096", 4096)],
)
def test_sizes_are_read_as_by_the_store(text: str, expected: int) -> None:
    assert bytes_of(text) == expected
