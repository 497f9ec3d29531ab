"""vLLM's KV connector: hands each hook to the scheduler's or the worker's side, and times it."""

# vLLM lives in an environment of its own: to the type checker its classes are Any.
# mypy: allow-subclassing-any

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ritornello.vllm.identity import identity_of
from ritornello.vllm.interface import require_known
from ritornello.vllm.metadata import IDLE, StepMetadata, WorkerReport
from ritornello.vllm.meter import Meter
from ritornello.vllm.metrics import RitornelloPromMetrics, RitornelloStats, stats_of
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import QuietStore
from ritornello.vllm.support import refusal, require_one_shard
from ritornello.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.ritornello")

require_known(KVConnectorBase_V1, vllm.__version__)
KVConnectorMetadata.register(StepMetadata)
KVConnectorWorkerMetadata.register(WorkerReport)


class RitornelloConnector(KVConnectorBase_V1, SupportsHMA):
    """One object in the scheduler's process, one in each worker's. An engine that cannot be
    served (`support.refusal`) has neither side: every hook then answers "nothing".
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_one_shard(vllm_config)
        settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        why = refusal(vllm_config, kv_cache_config)
        self._meter = Meter()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            # Read by vLLM once this constructor is done: a failed load must not fail a request.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            if why:
                logger.warning("ritornello: %s; neither hits nor saves", why)
                return
            store = QuietStore(settings, self._meter)
            # Opened here and not at the first request, so that the process that asks most often
            # is the one that owns the store.
            store.open()
            identity = identity_of(vllm_config, kv_cache_config, _isa(vllm_config), _version())
            if identity.epoch:
                logger.warning(
                    "ritornello: the weights were not loaded from files; "
                    "nothing saved now is found after a restart"
                )
            self._scheduler = SchedulerSide(store, identity, settings.read_only, self._meter)
        elif not why:
            store = QuietStore(settings, self._meter)
            self._worker = WorkerSide(store, kv_cache_config.num_blocks, self._meter)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a future miss, nothing more."""
        return False

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        begun = perf_counter()
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        self._meter.hook(begun)
        return tokens, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._scheduler is None:
            return
        begun = perf_counter()
        self._scheduler.admitted(request, blocks.get_block_ids()[0], num_external_tokens)
        self._meter.hook(begun)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        if self._scheduler is None:
            return IDLE
        begun = perf_counter()
        metadata = self._scheduler.plan(scheduler_output)
        self._meter.hook(begun)
        return metadata

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self._scheduler is None:
            return
        begun = perf_counter()
        report = connector_output.kv_connector_worker_meta
        self._scheduler.reported(
            report if isinstance(report, WorkerReport) else None,
            connector_output.invalid_block_ids,
        )
        self._meter.hook(begun)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            begun = perf_counter()
            self._scheduler.finished(request.request_id)
            self._meter.hook(begun)
        return False, None

    def reset_cache(self) -> bool | None:
        return None if self._scheduler is None else self._scheduler.reset()

    # The worker's side.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._meter.begin_step()

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._meter.end_step()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if self._worker is None or not isinstance(metadata, StepMetadata):
            return
        begun = perf_counter()
        self._worker.load(metadata)
        self._meter.hook(begun)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before the first layer runs."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Pages are saved whole, when the step is over."""

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if self._worker is None or not isinstance(metadata, StepMetadata):
            return
        begun = perf_counter()
        self._worker.save(metadata)
        self._meter.hook(begun)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return None if self._worker is None else self._worker.take_report()

    # Both sides.

    def get_kv_connector_stats(self) -> RitornelloStats | None:
        return stats_of(self._meter.take())

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RitornelloStats | None:
        return RitornelloStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> RitornelloPromMetrics:
        return RitornelloPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _isa(vllm_config: "VllmConfig") -> str:
    """The instruction set whose packing vLLM's CPU attention will choose."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    return str(
        _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    )


def _version() -> str:
    return str(vllm.__version__).partition("+")[0]
