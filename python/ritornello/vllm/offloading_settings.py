"""Translates the connector's settings into settings of vLLM's offloading and of the tier below it.
vLLM offloads KV to host memory in chunks of some consecutive blocks. The sizes of a chunk and of
the host memory follow from the settings, the model and the machine, and are equal in all processes
of an engine: `host_layout` refuses engines in which they may differ.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ritornello.connector.engine_tiers import EngineTiers
from ritornello.vllm.settings import GPU_MEMORY, PLACE, Settings
from ritornello.vllm.tier.namespace import has_window, is_unbounded, offloads_parts

MIB, GIB = 1 << 20, 1 << 30
# The number of blocks in a chunk is doubled until the chunk has CHUNK_BYTES: transfers of this size
# keep a disk busy. A chunk of several blocks has at most CHUNK_TOKENS, because a prompt that is
# shorter than a chunk is not stored.
CHUNK_BYTES = 2 * MIB
CHUNK_TOKENS = 256
# Limits of the default size of vLLM's host memory. All engines of one vLLM together take at most
# HOST_SHARE of the memory of the machine (or of the control group), and at most SHM_SHARE of
# /dev/shm; one engine takes at most HOST_BYTES_MAX. vLLM allocates and pins this memory at start.
HOST_SHARE, SHM_SHARE, HOST_BYTES_MAX = 0.25, 0.9, 64 * GIB
# Host memory below this size is reported, because concurrent requests may not fit into it.
HOST_BYTES_SMALL = GIB
# vLLM's folder for the host memory.
SHM = "/dev/shm"
# Checks the tiers below the host tier.
ENGINE_TIERS = EngineTiers(
    PLACE,
    device=GPU_MEMORY,
    host=f'vLLM has one host tier, in {SHM}: write it first in the list, as "host 8GiB", '
    "without options",
)
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
    `RitornelloTier`.
    """

    host_bytes: int | None
    tier: dict[str, Any] = field(default_factory=dict)

    @property
    def places(self) -> str:
        """The tiers or directories of `RitornelloTier`, for the log."""
        store = Settings.parse(self.tier)
        return ", ".join(store.shown_tiers or store.directories)

    @classmethod
    def parse(cls, extra: dict[str, Any]) -> "OffloadingSettings":
        """Parses the connector's `kv_connector_extra_config`. ValueError says what to write
        instead.
        """
        settings = Settings.parse(extra)
        if not settings.tiers:
            return cls(None, dict(extra))
        host, below = _split(settings.tiers)
        return cls(host, {**extra, "tiers": below})


def _split(tiers: Sequence[str]) -> tuple[int | None, list[str]]:
    """Returns the size of vLLM's host memory, None for the default, and the tiers below it."""
    host, below = None, list(tiers)
    kind, *words = tiers[0].split()
    if kind == "host":
        below = below[1:]
        if len(words) != 1:
            raise ENGINE_TIERS.refusal_of(tiers[0], ENGINE_TIERS.host)
        host = bytes_of(words[0])
        if not below:
            raise ValueError(
                f'{PLACE}: "tiers" needs a disk, as "disk /nvme/kv 200GiB"; for host memory '
                "alone, use vLLM's own --kv-offloading-size without this connector"
            )
    ENGINE_TIERS.check(below)
    return host, below


def bytes_of(text: str) -> int:
    """Returns a size such as "8GiB" in bytes, by the rules of the store. Raises ValueError for a
    text of another form.
    """
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


def blocks_of_chunk(
    block_bytes: int,
    groups: Sequence[tuple[int, Any]],
    retention_interval: int | None,
    version: str,
) -> int:
    """Returns how many consecutive blocks vLLM offloads as one chunk of an engine. `block_bytes`:
    one block, all layers and workers. `groups`: the tokens of a block, and the spec, of each KV
    cache group. `retention_interval`: vLLM's `--prefix-cache-retention-interval`, which must be a
    multiple of the chunks of each group with a window or a state; otherwise vLLM does not start.
    `version`: the version of vLLM. A chunk of which vLLM may offload a part only is one block.
    """
    specs = [(tokens, group_spec(spec)) for tokens, spec in groups]
    if needs_single_blocks(spec for _, spec in specs):
        return 1
    if offloads_parts(version) and any(has_window(spec) for _, spec in specs):
        return 1
    blocks = chunk_blocks(block_bytes, max(tokens for tokens, _ in specs))
    bounded = [tokens for tokens, spec in specs if not is_unbounded(spec)]
    while blocks > 1 and any((retention_interval or 0) % (blocks * n) for n in bounded):
        blocks //= 2
    return blocks


def group_spec(spec: Any) -> Any:
    """Returns the spec that a KV cache group has in the scheduler. On a worker the spec of a group
    may contain a spec for each layer: the scheduler's spec is the first layer's.
    """
    layers = getattr(spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else spec


def needs_single_blocks(specs: Iterable[Any]) -> bool:
    """Returns whether a chunk must be one block, because a KV cache group keeps a state only at the
    end of a prompt's last whole block (vLLM's mode "align"). vLLM offloads this state only if a
    chunk ends with this block, and without the state vLLM loads nothing of the prompt. `specs`: the
    `group_spec` of each group.
    """
    return any(getattr(spec, "mamba_cache_mode", "") == "align" for spec in specs)


def default_host_bytes(engines: int, memory: int, shm: int) -> int:
    """Returns the default size of the host memory of one of `engines` engines on a machine with
    `memory` bytes, and a /dev/shm of `shm` bytes: a number of bytes, rounded down to whole MiB.
    """
    share = min(int(memory * HOST_SHARE), int(shm * SHM_SHARE)) // max(engines, 1)
    return min(share, HOST_BYTES_MAX) // MIB * MIB


def check_host_bytes(host_bytes: int, engines: int, memory: int, shm: int) -> None:
    """Raises ValueError if the host memory of `engines` engines, of `host_bytes` each, exceeds the
    `memory` bytes of the machine or of its control group, or the `shm` bytes of /dev/shm. vLLM
    checks the free space in /dev/shm only, and the kernel kills an engine that exceeds its memory.
    """
    engines = max(engines, 1)
    limit = min(memory, shm)
    if host_bytes * engines <= limit:
        return
    fits = f'write at most "host {limit // engines // MIB}MiB" in "tiers"'
    if memory <= shm:
        place = "the memory of this machine or of its control group"
    else:
        place, fits = SHM, f"{fits}, or enlarge {SHM} (docker run --shm-size)"
    each = f" for each of {engines} engines" if engines > 1 else ""
    raise ValueError(
        f'{PLACE}: "host" in "tiers" asks for {-(-host_bytes // MIB)} MiB{each}, and {place} has '
        f"{limit // MIB} MiB: {fits}"
    )


def host_rows(host_bytes: int, row_bytes: int) -> int:
    """Returns how many chunks of `row_bytes` the host memory holds. ValueError if it has no room
    for a chunk.
    """
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
    """Returns the machine's memory or, if it is less, the tightest limit of the process's control
    group and of the groups that contain it. Of control groups of version 1 only the limit of the
    mounted root counts.
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
