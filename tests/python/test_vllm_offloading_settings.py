"""The connector's settings as settings of vLLM's offloading: tiers, sizes of chunks and host
memory.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ritornello.vllm.offloading_settings import (
    CHUNK_TOKENS,
    GIB,
    HOST_BYTES_MAX,
    MIB,
    OffloadingSettings,
    blocks_of_chunk,
    bytes_of,
    check_host_bytes,
    chunk_blocks,
    default_host_bytes,
    host_rows,
    memory_bytes,
)
from ritornello.vllm.tier.settings import TierSettings

DISK = "disk /kv 200GiB"


@dataclass(frozen=True)
class FullAttentionSpec:
    """Stand-in for vLLM's class."""

    sliding_window: int | None = None


@dataclass(frozen=True)
class SlidingWindowSpec:
    """Stand-in for vLLM's class."""

    sliding_window: int = 128


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec:
    """Stand-in for vLLM's class."""

    attention_chunk_size: int = 128


def chunk_of(*specs: Any, interval: int | None = 0, version: str = "0.33.0") -> int:
    """Returns the blocks of a chunk of groups that have blocks of 32 tokens."""
    return blocks_of_chunk(1 << 10, [(32, spec) for spec in specs], interval, version)


def test_path_and_store_settings_reach_tier() -> None:
    extra = {"path": ["/a", "/b"], "capacity": "2GiB", "read_only": True, "codec": "zstd"}
    settings = OffloadingSettings.parse(extra)
    assert (settings.host_bytes, settings.tier, settings.places) == (None, extra, "/a, /b")
    store = TierSettings.parse(settings.tier).store
    assert (store.directories, store.read_only, store.codec) == (("/a", "/b"), True, "zstd")


@pytest.mark.parametrize(
    ("host_tier", "host"), [([], None), (["host 8GiB"], 8 * GIB), (["host 1.5GB"], 1_500_000_000)]
)
@pytest.mark.parametrize(
    "below",
    [
        [DISK],
        ["disk /a /b 4TiB rate=1GiB"],
        ["disk /kv"],
        [DISK, "s3://bucket/prefix?region=x write=selective(2)"],
    ],
)
def test_host_tier_goes_to_vllm_and_lower_tiers_to_our_tier(
    host_tier: list[str], host: int | None, below: list[str]
) -> None:
    extra = {"prefetch": "timeout(2, 1)", "gate": "always", "read_only": True}
    settings = OffloadingSettings.parse({"tiers": host_tier + below, **extra})
    assert settings.host_bytes == host
    assert settings.tier == {"tiers": below, **extra}
    store = TierSettings.parse(settings.tier).store
    assert (store.tiers, store.gate, store.read_only) == (tuple(below), "always", True)
    assert store.prefetch == "timeout(2, 1)"


def test_store_directories_come_from_disk_tier() -> None:
    tiers = ["disk /a /b 4TiB rate=1GiB", "s3://bucket/prefix"]
    assert TierSettings.parse({"tiers": tiers}).store.directories == ("/a", "/b")


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
        ({"tiers": ["host 8GiB rate=1GiB", DISK]}, "without options"),
        ({"tiers": [DISK, "disk /b"]}, "one disk tier"),
        ({"tiers": ["s3://bucket/prefix", DISK]}, "write only one disk tier, before a remote"),
        ({"tiers": ["disk"]}, "one disk tier"),
        ({"tiers": ["disc /kv 1GiB"]}, "a tier is a disk"),
        ({"tiers": ["host 8GiB", "s3://bucket/prefix"]}, '"tiers" needs a disk'),
        ({"tiers": [DISK, "s3://a/b", "file:///mnt/kv"]}, "write only one remote"),
    ],
)
def test_settings_error_says_what_to_write(extra: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice) as raised:
        OffloadingSettings.parse(extra)
    assert str(raised.value).startswith("kv_connector_extra_config: ")
    assert "\n" not in str(raised.value)


def test_addresses_are_shown_without_options() -> None:
    addresses = ["s3://b?secret=hunter2", "s3://c?secret=hunter2"]
    with pytest.raises(ValueError, match="s3://c") as raised:
        OffloadingSettings.parse({"tiers": [DISK, *addresses]})
    assert "hunter2" not in str(raised.value)
    assert OffloadingSettings.parse({"tiers": [DISK, addresses[0]]}).places == f"{DISK}, s3://b?…"


def test_host_tier_in_list_of_secondary_tier_is_refused() -> None:
    with pytest.raises(ValueError, match='"cpu_bytes_to_use", next to "secondary_tiers"') as raised:
        TierSettings.parse({"tiers": ["host 8GiB", DISK]})
    assert "\n" not in str(raised.value)


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
def test_chunk_has_two_mebibytes_within_token_limit(
    model: str, token_bytes: int, block_tokens: int, blocks: int
) -> None:
    assert chunk_blocks(token_bytes * block_tokens, block_tokens) == blocks
    tokens = blocks * block_tokens
    assert tokens <= CHUNK_TOKENS or blocks == 1, model
    assert tokens * token_bytes >= 2 * MIB or 2 * tokens > CHUNK_TOKENS


def test_states_of_last_blocks_need_chunks_of_one_block() -> None:
    aligned, all_blocks = (SimpleNamespace(mamba_cache_mode=mode) for mode in ("align", "all"))
    assert chunk_of(FullAttentionSpec(), aligned) == 1
    assert chunk_of(SimpleNamespace(kv_cache_specs={"a": aligned, "b": aligned})) == 1
    assert chunk_of(FullAttentionSpec(), all_blocks) == 8


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.31.0rc1", "dev"])
@pytest.mark.parametrize("spec", [SlidingWindowSpec(), ChunkedLocalAttentionSpec()], ids=repr)
def test_window_needs_chunks_of_one_block_if_vllm_offloads_parts(spec: Any, version: str) -> None:
    full = FullAttentionSpec()
    assert chunk_of(full, spec, version=version) == 1
    assert chunk_of(SimpleNamespace(kv_cache_specs={"a": spec}), version=version) == 1
    assert chunk_of(full, FullAttentionSpec(sliding_window=128), version=version) == 8
    assert chunk_of(full, SimpleNamespace(mamba_cache_mode="all"), version=version) == 8
    for newer in ("0.33.0", "0.33.1+cu130", "0.40.0", "1.0.0"):
        assert chunk_of(full, spec, version=newer) == 8


@pytest.mark.parametrize(
    ("interval", "blocks"),
    [(None, 8), (0, 8), (512, 8), (640, 4), (1000, 1), (96, 1), (320, 2), (64, 2)],
)
def test_retention_interval_is_multiple_of_chunks_with_bounds(
    interval: int | None, blocks: int
) -> None:
    window, full = SlidingWindowSpec(), FullAttentionSpec()
    state = SimpleNamespace(mamba_cache_mode="all")
    assert chunk_of(full, window, interval=interval) == blocks
    assert chunk_of(full, state, interval=interval) == blocks
    layers = SimpleNamespace(kv_cache_specs={"a": window, "b": window})
    assert chunk_of(full, layers, interval=interval) == blocks
    assert chunk_of(full, interval=interval) == 8, "vLLM requires nothing of full attention"


def test_retention_interval_is_multiple_of_chunks_of_each_group() -> None:
    groups = [(16, FullAttentionSpec()), (32, SlidingWindowSpec()), (64, SlidingWindowSpec())]
    assert blocks_of_chunk(1 << 10, groups, 512, "0.33.0") == 4
    assert blocks_of_chunk(1 << 10, groups, 128, "0.33.0") == 2
    assert blocks_of_chunk(1 << 10, groups, 96, "0.33.0") == 1


def test_default_host_memory_is_share_of_machine() -> None:
    assert default_host_bytes(1, 64 * GIB, 32 * GIB) == 16 * GIB
    assert default_host_bytes(4, 64 * GIB, 32 * GIB) == 4 * GIB
    assert default_host_bytes(0, 64 * GIB, 32 * GIB) == 16 * GIB
    assert default_host_bytes(1, 2048 * GIB, 1024 * GIB) == HOST_BYTES_MAX
    assert default_host_bytes(1, 64 * GIB, 64 * MIB) == 57 * MIB, (
        "the default /dev/shm of docker, 64 MiB, must suffice"
    )


def test_host_memory_smaller_than_a_chunk_is_refused() -> None:
    assert host_rows(8 * MIB, 2 * MIB) == 4
    with pytest.raises(ValueError, match=r"no room for a chunk of 2097152 bytes.*--shm-size"):
        host_rows(MIB, 2 * MIB)


@pytest.mark.parametrize(
    ("host", "engines", "memory", "shm"),
    [
        (8 * GIB, 1, 8 * GIB, 8 * GIB),
        (8 * GIB, 0, 8 * GIB, 9 * GIB),
        (2 * GIB, 4, 9 * GIB, 8 * GIB),
    ],
)
def test_host_memory_that_fits_is_accepted(host: int, engines: int, memory: int, shm: int) -> None:
    check_host_bytes(host, engines, memory, shm)


@pytest.mark.parametrize(
    ("host", "engines", "memory", "shm", "advice"),
    [
        (
            900 * GIB,
            1,
            64 * GIB,
            128 * GIB,
            'asks for 921600 MiB, and the memory .* group has 65536 MiB: .*"host 65536MiB"',
        ),
        (8 * GIB, 1, 64 * GIB, 64 * MIB, '/dev/shm has 64 MiB: .*"host 64MiB".*--shm-size'),
        (20 * GIB, 4, 64 * GIB, 64 * GIB, 'for each of 4 engines, .*"host 16384MiB"'),
        (8 * GIB + 1, 1, 8 * GIB, 8 * GIB, "asks for 8193 MiB, .* has 8192 MiB"),
    ],
)
def test_host_memory_beyond_the_machine_is_refused(
    host: int, engines: int, memory: int, shm: int, advice: str
) -> None:
    with pytest.raises(ValueError, match=advice) as raised:
        check_host_bytes(host, engines, memory, shm)
    assert str(raised.value).startswith('kv_connector_extra_config: "host" in "tiers"')
    assert "\n" not in str(raised.value)


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
def test_sizes_are_parsed_by_rules_of_store(text: str, expected: int) -> None:
    assert bytes_of(text) == expected
