"""The data path of CPU engines, and the base of `DevicePath`: copies between the engine's KV memory
and the store. Passes vLLM's calls to the scheduler's or the worker's side, and times most of them.
"""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ritornello.connector.interface import accept_defaults, override_difference
from ritornello.vllm import composition, kernels
from ritornello.vllm.cache_store import CacheStore
from ritornello.vllm.handshake import ShardFacts, group_layouts
from ritornello.vllm.identity import identity_of
from ritornello.vllm.interface import INTERFACE
from ritornello.vllm.kv_memory import HostMemory, KvMemory
from ritornello.vllm.metadata import IDLE, StepMetadata, WorkerReport
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.metrics import RitornelloPromMetrics, RitornelloStats
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import VllmStore
from ritornello.vllm.support import (
    require_no_context_parallel,
    requires_async_loads,
    startup_warnings,
    unsupported_reason,
)
from ritornello.vllm.weights.engine import guard_of_engine
from ritornello.vllm.weights.guard import WeightGuard
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

# vLLM's names for the store's tiers. vLLM has no name for a remote, so it counts as unspecified.
SOURCES = {
    "host": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "remote": CacheHitSource.EXTERNAL_UNSPECIFIED,
}

KVConnectorMetadata.register(StepMetadata)
KVConnectorWorkerMetadata.register(WorkerReport)
KVConnectorHandshakeMetadata.register(ShardFacts)


class CpuPath(KVConnectorBase_V1, SupportsHMA):
    """One instance in the scheduler's process, one in each worker. In an engine that is not served
    (`unsupported_reason` of `support` and of `composition`, `_memory_refusal`), both the
    scheduler's and the worker's side are None. Every hook then reports that there is nothing to do,
    and the handshake returns the reason, except inside MultiConnector, where it returns None.

    `connector`: the connector that vLLM calls. `engine`: the engine's configuration if another
    connector constructs `connector`, else None.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
        *,
        connector: KVConnectorBase_V1,
        engine: "VllmConfig | None",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_no_context_parallel(vllm_config)
        self._settings = self._parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._connector, self._engine = connector, engine
        reason = (
            unsupported_reason(vllm_config, kv_cache_config)
            or self._memory_refusal(kv_cache_config)
            or composition.unsupported_reason(self._engine)
        )
        self._meter = StepMeter()
        kind = CacheStore if self._settings.tiers else VllmStore
        self._store: VllmStore = kind(self._settings, self._meter)
        self._store.wants_timings = self._workers_measure_prefills()
        if not reason:
            self._store.expect_hash(str(vllm_config.cache_config.prefix_caching_hash_algo))
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._unsupported_reason = reason
        self._facts: composition.FactsCollector | None = None
        if self._engine and not reason:
            workers = vllm_config.parallel_config.world_size
            self._facts = composition.FactsCollector(workers)
        self._guard: WeightGuard | None = None
        if role is KVConnectorRole.SCHEDULER:
            # Set vLLM's `kv_load_failure_policy` to "recompute", so that a failed load fails no
            # request. vLLM reads the policy after this constructor returns.
            outer = self._engine or vllm_config
            if composition.recompute(outer) and self._engine is not None:
                logger.warning("ritornello: %s", composition.POLICY_LINE)
            if reason:
                logger.warning("ritornello: %s; pages are neither loaded nor saved", reason)
            else:
                # Open the store now instead of at the first request: if the store has no owner, the
                # scheduler's process, which makes most calls, becomes the owner.
                self._store.open()
                self._guard = guard_of_engine()
                self._observe_prefills()
        elif not reason:
            self._worker = WorkerSide(
                self._store,
                kv_cache_config.num_blocks,
                [
                    (list(group.layer_names), group.kv_cache_spec.num_kv_heads)
                    for group in kv_cache_config.kv_cache_groups
                ],
                self._meter,
                (get_pp_group().rank_in_group, get_tp_group().rank_in_group),
                memory=self._make_kv_memory(),
            )

    # Methods that a subclass overrides if the KV memory is not in host memory.

    @classmethod
    def _parse_settings(cls, extra: dict[str, Any]) -> Settings:
        return Settings.parse_on_cpus(extra)

    def _make_kv_memory(self) -> KvMemory:
        return HostMemory()

    def _memory_refusal(self, kv_cache_config: "KVCacheConfig") -> str:
        """Returns why this kind of KV memory is not served; "" if it is."""
        return ""

    def _block_layout(self, vllm_config: "VllmConfig", spec: Any) -> str:
        """Returns the name that scopes give to the arrangement of bytes in the blocks of the KV
        cache group with this `spec`.
        """
        return kernels.block_layout(vllm_config, spec)

    def _workers_measure_prefills(self) -> bool:
        """Returns whether workers measure prefills: a worker computes a step between two calls of
        its hooks, so the time between them is the step's.
        """
        return True

    def _observe_prefills(self) -> None:
        """Starts to measure prefills in the scheduler's process, in a subclass whose workers cannot
        measure them. Called after `guard_of_engine`.
        """

    def _loads_apart(self) -> bool:
        """Returns whether all loads must be asynchronous, because no step may wait for a load."""
        return requires_async_loads(self._vllm_config, self._kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: vLLM may drop a save, after which a later lookup misses the pages."""
        return False

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Starts serving with the layouts of the workers' KV memory in `metadata`. Inside
        MultiConnector `metadata` may belong to another connector, and is then ignored.
        """
        if not self._unsupported_reason and self._engine is None:
            self._start_serving(metadata)

    def _start_serving(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        try:
            side = self._make_scheduler_side(metadata)
        except Exception as error:  # the engine must run even if its KV cannot be stored
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            logger.warning("ritornello: %s%s; pages are neither loaded nor saved", kind, error)
            return
        if self._kv_cache_manager is not None:
            side.bind_cache(self._kv_cache_manager)
        self._scheduler = side

    def _make_scheduler_side(self, metadata: Mapping[tuple[int, int], Any]) -> SchedulerSide:
        config, caches = self._vllm_config, self._kv_cache_config
        parallel = config.parallel_config
        stages, ranks = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
        found = group_layouts(metadata, stages, ranks, len(caches.kv_cache_groups))
        identity = identity_of(config, caches, found, partial(self._block_layout, config))
        for line in startup_warnings(identity):
            logger.warning("ritornello: %s", line)
        side = SchedulerSide(
            self._store,
            identity,
            self._meter,
            read_only=self._settings.read_only,
            asynchronous=self._loads_apart(),
            has_remote=self._settings.has_remote,
            composed=self._engine is not None,
            guard=self._guard,
        )
        if self._guard is not None:
            self._guard.owner = self._connector
            self._guard.begin_epoch = side.on_caches_reset
        return side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind_cache(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        """Starts transfers from the remote while the request is queued."""
        if self._scheduler is not None and self._settings.has_remote:
            with self._meter.hook():
                self._scheduler.matched_tokens(request, 0)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            is_waiting = self._facts is not None and self._facts.pending()
            return None if is_waiting else 0, False
        with self._meter.hook():
            return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            with self._meter.hook():
                block_ids = blocks.get_block_ids()
                self._scheduler.request_admitted(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        tiers = self._scheduler.sources(request, num_external_tokens) if self._scheduler else {}
        if not tiers:
            return {self._cache_hit_source: num_external_tokens} if num_external_tokens else {}
        return {SOURCES[tier]: tokens for tier, tokens in tiers.items()}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        if self._scheduler is None:
            return self._facts.step_metadata() if self._facts else IDLE
        with self._meter.hook():
            return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = connector_output.kv_connector_worker_meta
        if self._facts is not None and isinstance(report, WorkerReport):
            facts = self._facts.add(report.facts)
            if facts is not None:
                self._start_serving(facts)
        if self._scheduler is None:
            return
        with self._meter.hook():
            self._scheduler.complete_step(
                report if isinstance(report, WorkerReport) else None,
                connector_output.invalid_block_ids,
                connector_output.finished_recving or set(),
                connector_output.failed_recving,
            )

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        with self._meter.hook():
            return self._scheduler.request_finished(request.request_id), None

    def reset_cache(self) -> bool | None:
        return None if self._scheduler is None else self._scheduler.reset()

    # The worker's side.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> ShardFacts | None:
        if self._engine is not None or not _is_outermost(self._connector):
            return None  # MultiConnector sends one child's handshake to all children
        if self._worker is None:
            return (
                ShardFacts(unsupported_reason=self._unsupported_reason)
                if self._unsupported_reason
                else None
            )
        return self._worker.facts()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._meter.begin_step()
        if self._worker is not None and isinstance(connector_metadata, StepMetadata):
            self._worker.begin_step(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._meter.end_step()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if self._worker is not None and isinstance(metadata, StepMetadata):
            with self._meter.hook():
                self._worker.load(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.step_loads.await_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Does nothing: pages are saved whole, at the end of the step."""

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if self._worker is not None and isinstance(metadata, StepMetadata):
            with self._meter.hook():
                self._worker.save(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        with self._meter.hook():
            finished, failed = self._worker.take_completed_loads()
        # With one KV cache group, vLLM learns the failed blocks, and keeps the blocks before the
        # first failed block. With several groups the connector cannot name blocks, and vLLM
        # computes the whole request.
        groups = len(self._kv_cache_config.kv_cache_groups)
        return KVConnectorTransferResults(
            finished_sending=self._worker.results.take_finished_sending(),
            finished_recving=finished,
            failed_recving=failed if groups > 1 else set(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.results.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return None if self._worker is None else self._worker.results.take_report()

    # Both sides.

    def get_kv_connector_stats(self) -> RitornelloStats | None:
        counts = self._meter.take_report()
        return RitornelloStats(data=counts) if counts else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._store.close()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Returns False: vLLM's sleep mode moves the KV memory, to whose addresses the workers'
        transfers refer. vLLM 0.33 calls this method at start-up.
        """
        return False

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


for base in (KVConnectorBase_V1, SupportsHMA):
    INTERFACE.require(override_difference(CpuPath, base), vllm.__version__)
    accept_defaults(CpuPath, base)


def _is_outermost(connector: KVConnectorBase_V1) -> bool:
    """Returns whether vLLM's worker calls `connector` directly, not through MultiConnector. True
    outside a worker too.
    """
    return not has_kv_transfer_group() or get_kv_transfer_group() is connector
