"""Translates the connector's settings into settings of vLLM's offloading and of the tier below it.
vLLM offloads KV to host memory in chunks of some consecutive blocks. The sizes of a chunk and of
the host memory follow from the model and the machine, and are equal in all processes of an engine.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ritornello.vllm.settings import PLACE, Settings

MIB, GIB = 1 << 20, 1 << 30
# A chunk has at least CHUNK_BYTES, which keep a disk busy, unless it reaches CHUNK_TOKENS: a prompt
# is found in whole chunks, and a prompt that is shorter than a chunk is not stored.
CHUNK_BYTES = 2 * MIB
CHUNK_TOKENS = 256
# The default size of vLLM's host memory: the share of the memory of the machine (or of the control
# group) and of /dev/shm that all engines of one vLLM take together, and the maximum for one engine.
# vLLM allocates and pins this memory at start.
HOST_SHARE, SHM_SHARE, HOST_BYTES_MAX = 0.25, 0.9, 64 * GIB
# Host memory below this size is reported, because concurrent requests may not fit into it.
HOST_BYTES_SMALL = GIB
# vLLM's folder for the host memory.
SHM = "/dev/shm"
DEVICE_WORDS = ("device", "gpu", "cuda", "hbm", "vram")
UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
# Control groups of version 1 express "no limit" as a number near 2^63.
NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class OffloadingSettings:
    """`host_bytes`: the size of vLLM's host memory, None for the default. `tier`: the settings of
    `RitornelloTier`. `notes`: lines for the log.
    """

    host_bytes: int | None
    tier: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, extra: dict[str, Any]) -> "OffloadingSettings":
        """Parses the connector's `kv_connector_extra_config`. ValueError says what to write
        instead.
        """
        settings = Settings.parse(extra)
        if not settings.tiers:
            return cls(None, dict(extra))
        host, tier = _places(settings.tiers)
        notes = tuple(
            f'{PLACE}: "{name}" has no effect on this device: vLLM loads what is found; for one '
            'request, {"ritornello.no_load": true} in kv_transfer_params excludes the store'
            for name in ("gate", "prefetch")
            if name in extra
        )
        return cls(host, tier | {"read_only": settings.read_only}, notes)


def _places(tiers: Sequence[str]) -> tuple[int | None, dict[str, Any]]:
    """Returns the size of the host tier, and directories and capacity of the disk tier."""
    host: int | None = None
    disk: dict[str, Any] = {}
    for text in tiers:
        kind, *words = text.split()
        option = next((word for word in words if "=" in word.partition("/")[0]), None)
        if kind in DEVICE_WORDS:
            raise _refused(
                text,
                "vLLM sizes its device memory itself: --gpu-memory-utilization or "
                "--kv-cache-memory-bytes",
            )
        if kind not in ("host", "disk"):
            raise _refused(
                kind.partition("?")[0],
                'on this device vLLM reaches remotes itself: {"type": "obj"} or {"type": "fs"} in '
                '"secondary_tiers" of its OffloadingConnector, beside RitornelloTier '
                "(docs/engines/vllm-tier.md)",
            )
        if option:
            raise _refused(
                text,
                f'"{option}" has no effect here: vLLM writes every chunk to the tiers below its '
                'host memory; "backpressure" of its OffloadingConnector limits the rate '
                "(docs/engines/vllm-tier.md)",
            )
        if kind == "host":
            if host is not None or disk or len(words) != 1:
                raise _refused(
                    text, f'vLLM has one host tier, in {SHM}: first in the list, as "host 8GiB"'
                )
            host = bytes_of(words[0])
        else:
            if disk or not words:
                raise _refused(text, 'one disk tier is used, as "disk /nvme/kv 200GiB"')
            *places, last = words
            sized = bool(places) and "/" not in last
            disk = {"path": places if sized else words} | ({"capacity": last} if sized else {})
    if not disk:
        raise ValueError(
            f'{PLACE}: "tiers" needs a disk, as "disk /nvme/kv 200GiB"; host memory alone is '
            "vLLM's own --kv-offloading-size, without a connector"
        )
    return host, disk


def _refused(tier: str, instead: str) -> ValueError:
    return ValueError(f'{PLACE}: "tiers": {tier!r}: {instead}')


def bytes_of(text: str) -> int:
    """Returns a size such as "8GiB" in bytes, by the rules of the store."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip().lower())
    if found is None or found[2] not in UNITS:
        raise ValueError(f"{PLACE}: a size is a number and a unit, such as 8GiB, not {text!r}")
    return int(float(found[1]) * UNITS[found[2]])


def chunk_blocks(block_bytes: int, block_tokens: int) -> int:
    """Returns how many consecutive blocks vLLM offloads as one chunk. `block_bytes`: one block, all
    layers and workers. `block_tokens`: the largest block of all KV cache groups.
    """
    blocks = 1
    while blocks * block_bytes < CHUNK_BYTES and 2 * blocks * block_tokens <= CHUNK_TOKENS:
        blocks *= 2
    return blocks


def default_host_bytes(engines: int, memory: int, shm: int) -> int:
    """Returns the default size of the host memory of one of `engines` engines on a machine with
    `memory` bytes, and a /dev/shm of `shm` bytes.
    """
    share = min(int(memory * HOST_SHARE), int(shm * SHM_SHARE)) // max(engines, 1)
    return min(share, HOST_BYTES_MAX) // MIB * MIB


def host_rows(host_bytes: int, row_bytes: int) -> int:
    """Returns how many chunks of `row_bytes` the host memory holds. ValueError if it holds none."""
    rows = host_bytes // max(row_bytes, 1)
    if rows < 1:
        raise ValueError(
            f"{PLACE}: a host memory of {host_bytes} bytes has no room for a chunk of {row_bytes} "
            f'bytes: write a larger "host" in "tiers", as "host 8GiB", or enlarge {SHM} '
            "(docker run --shm-size)"
        )
    return rows


def shm_bytes() -> int:
    """Returns the size of the file system in which vLLM allocates its host memory."""
    found = os.statvfs(SHM)
    return found.f_blocks * found.f_frsize


def memory_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the machine's memory, or the tightest limit of the control groups that hold this
    process, if this is less.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_number(root / "memory/memory.limit_in_bytes")]
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    own = next((line[3:] for line in groups if line.startswith("0::")), "/")
    group = root / own.lstrip("/")
    limits += [_number(folder / "memory.max") for folder in (group, *group.parents)]
    return min([machine, *(limit for limit in limits if limit and limit < NO_LIMIT)])


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
