"""The data path of GPU engines: vLLM's own offloading connector, which copies chunks (some
consecutive blocks) between GPU and host memory, with our tier below its host memory.

This module uses vLLM's class of the offloading connector, the keys of its configuration, and
`build_offloading_config`, which computes the size of a block.
tests/engines/vllm_tier/test_tier_interface.py checks these names in the sources of the tested
versions.
"""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

import copy
import logging
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from ritornello.connector.interface import (
    accept_defaults,
    constructor_difference,
    override_difference,
)
from ritornello.vllm import composition, whole_prompts
from ritornello.vllm.engine_config import EngineConfig
from ritornello.vllm.host_layout import stages_refusal
from ritornello.vllm.interface import INTERFACE, PARAMETERS
from ritornello.vllm.offloading_settings import (
    HOST_BYTES_SMALL,
    MIB,
    SHM,
    OffloadingSettings,
    blocks_of_chunk,
    check_host_bytes,
    default_host_bytes,
    host_rows,
    memory_bytes,
    shm_bytes,
)
from ritornello.vllm.weights.engine import guard_of_engine
from ritornello.vllm.weights.guard import WeightGuard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.ritornello")

INTERFACE.require(constructor_difference(OffloadingConnector, PARAMETERS), vllm.__version__)

# vLLM's class of a host tier with further tiers below it.
SPEC = {"spec_name": "TieringOffloadingSpec"}


class OffloadingPath(OffloadingConnector):
    """vLLM's offloading connector, configured by the settings of `RitornelloConnector`. Arguments
    as for `CpuPath`.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
        *,
        connector: KVConnectorBase_V1,
        engine: "VllmConfig | None",
    ) -> None:
        settings = OffloadingSettings.parse(_extra(vllm_config))
        reason = composition.unsafe_to_offload_reason(engine) or whole_prompts.refusal(
            vllm_config, kv_cache_config
        )
        self._serves = not reason
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._guard: WeightGuard | None = None
        if is_scheduler and not reason:
            guard = self._guard = guard_of_engine()
            # Without a tier that serves the engine, Ritornello stores no chunk and needs no new
            # epoch. A reset of vLLM's caches then only records in the guard that no cache holds
            # pages of previous weights. A tier that serves the engine replaces `begin_epoch`.
            guard.begin_epoch = lambda: guard.cover(guard.read())
        tier = _tier(vllm_config, settings) | {
            "engine": EngineConfig(vllm_config, kv_cache_config, self._guard)
        }
        config, summary = _sized(vllm_config, kv_cache_config, settings, [] if reason else [tier])
        if is_scheduler:
            logger.info("ritornello: %s", summary)
            if reason:
                logger.warning("ritornello: %s; pages are neither loaded nor stored", reason)
        super().__init__(config, role, kv_cache_config)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns no tokens in an engine that is not served (`unsafe_to_offload_reason`,
        `whole_prompts`). After a change of the weights the host memory may hold chunks of earlier
        weights: returns no tokens until a reset that includes the connector. vLLM plans the copy to
        the GPU right after this call, and the copy completes even if the weights change before its
        end. Its request continues with KV of the earlier weights, as a running request does.
        """
        if not self._serves:
            return 0, False
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens and self._guard is not None and self._guard.changed():
            return 0, False
        return tokens, is_async

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        settings = OffloadingSettings.parse(_extra(vllm_config))
        config = _configured(vllm_config, secondary_tiers=[_tier(vllm_config, settings)])
        return super().build_prom_metrics(config, metric_types, labelnames, per_engine_labelvalues)


INTERFACE.require(override_difference(OffloadingPath, OffloadingConnector), vllm.__version__)
accept_defaults(OffloadingPath, OffloadingConnector)


def _extra(vllm_config: "VllmConfig") -> dict[str, Any]:
    return dict(vllm_config.kv_transfer_config.kv_connector_extra_config)


def _configured(vllm_config: "VllmConfig", **extra: Any) -> "VllmConfig":
    """Returns a copy of the engine's configuration in which vLLM's offloading connector has the
    settings `extra`.
    """
    config, transfer = copy.copy(vllm_config), copy.copy(vllm_config.kv_transfer_config)
    transfer.kv_connector, transfer.kv_connector_module_path = "OffloadingConnector", None
    # The file of vLLM's host memory is named after `engine_id`. MultiConnector permits a second
    # offloading connector, configured by hand, which would otherwise fill the rows of the same
    # file.
    transfer.engine_id = f"{transfer.engine_id}-ritornello"
    # Answers are stored too, as on CPUs: they are the beginning of the next turn's prompt.
    transfer.kv_connector_extra_config = SPEC | {"offload_prompt_only": False} | extra
    config.kv_transfer_config = transfer
    return config


def _tier(vllm_config: "VllmConfig", settings: OffloadingSettings) -> dict[str, Any]:
    """Returns the configuration of our tier."""
    return {
        "type": "RitornelloTier",
        "module_path": "ritornello.vllm",
        "enable_kv_events": _publishes_events(vllm_config),
        **settings.tier,
    }


def _publishes_events(vllm_config: "VllmConfig") -> bool:
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def _sized(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    settings: OffloadingSettings,
    tiers: list[dict[str, Any]],
) -> "tuple[VllmConfig, str]":
    """Returns a copy of the engine's configuration in which the sizes of chunks and host memory are
    set, and a line for the log that states these sizes. Raises ValueError if the machine lacks the
    host memory, if the memory has no room for a chunk, or if the processes of the engine might
    derive different sizes.
    """
    engines = vllm_config.parallel_config.data_parallel_size_local
    host_bytes = settings.host_bytes
    if host_bytes is None:
        host_bytes = default_host_bytes(engines, memory_bytes(), shm_bytes())
    else:
        check_host_bytes(host_bytes, engines, memory_bytes(), shm_bytes())
    if reason := stages_refusal(vllm_config, kv_cache_config):
        raise ValueError(f"ritornello does not serve this engine: {reason}")
    offloading = build_offloading_config(_configured(vllm_config), kv_cache_config)
    copies = 1 if offloading.replicated_layout else offloading.parallel.world_size
    block_bytes = offloading.worker_kv_bytes_per_block * copies
    block_tokens = max(group.tokens_per_block for group in offloading.groups)
    groups = [
        (group.tokens_per_block, kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec)
        for group in offloading.groups
    ]
    interval = vllm_config.cache_config.prefix_cache_retention_interval
    blocks = blocks_of_chunk(block_bytes, groups, interval, vllm.__version__)
    row_bytes = -(-blocks * block_bytes // PAGESIZE) * PAGESIZE
    rows = host_rows(host_bytes, row_bytes)
    summary = (
        f"vLLM offloads chunks of {blocks * block_tokens} tokens ({row_bytes} bytes) to "
        f"{host_bytes // MIB} MiB of host memory ({rows} chunks), and from there to "
        f"{settings.places}"
    )
    if host_bytes < HOST_BYTES_SMALL:
        summary += (
            f'; {host_bytes // MIB} MiB of host memory is little: write "host 8GiB" in "tiers", '
            f"or enlarge {SHM}"
        )
    config = _configured(
        vllm_config,
        cpu_bytes_to_use=host_bytes,
        blocks_per_chunk=blocks,
        secondary_tiers=tiers,
        self_describing_kv_events=_publishes_events(vllm_config),
    )
    return config, summary
