"""vLLM's secondary tier: passes each call to `Tier`, without vLLM's types."""

# The type checker runs without vLLM, whose classes are therefore Any.
# mypy: allow-subclassing-any

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ritornello.connector.identity import EPOCH_WARNING
from ritornello.connector.interface import (
    accept_constructor_defaults,
    accept_defaults,
    override_difference,
)
from ritornello.connector.meter import Meter
from ritornello.vllm import engine_config, kernels, whole_prompts
from ritornello.vllm.engine_config import EngineConfig
from ritornello.vllm.host_layout import machines_refusal, stages_refusal
from ritornello.vllm.prefill_times import PrefillTimes
from ritornello.vllm.tier.cache import TierCache
from ritornello.vllm.tier.counts import COUNTERS, PREFIX
from ritornello.vllm.tier.host_rows import HostRows
from ritornello.vllm.tier.interface import INTERFACE, interface_difference
from ritornello.vllm.tier.jobs import FinishedJob
from ritornello.vllm.tier.namespace import (
    KernelPlatform,
    namespace_of,
    unsupported_reason,
    windows_refusal,
)
from ritornello.vllm.tier.requests import LookupAnswer
from ritornello.vllm.tier.settings import TierSettings
from ritornello.vllm.tier.store import TierStore
from ritornello.vllm.tier.tier import REFUSAL_REASONS, Tier
from ritornello.vllm.weights.engine import guard_of_engine, observe_steps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger("vllm.ritornello")

INTERFACE.require(
    interface_difference(SecondaryTierManager, TransferJob, JobResult, LookupResult),
    vllm.__version__,
)

T = TypeVar("T")

RESULTS = {
    LookupAnswer.HIT: LookupResult.HIT,
    LookupAnswer.MISS: LookupResult.MISS,
    LookupAnswer.PENDING: LookupResult.RETRY,
}


class RitornelloTier(SecondaryTierManager):
    """One instance in the scheduler's process. If the engine is not served
    (`unsupported_reason` and `windows_refusal` of `namespace`, `host_layout`), lookups miss and
    nothing is stored.

    `engine`: the engine's configuration, from `OffloadingPath`; if it is None,
    `engine_config.of_spec` looks it up.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None,
        engine: EngineConfig | None = None,
        **tier_config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.parse(tier_config)
        self._settings = settings
        self.locality = None if settings.locality is None else Locality(settings.locality)
        self._meter = Meter()
        self._logged: set[str] = set()
        self._results: list[JobResult] = []
        # Requests with a load that could not be started. Their lookups miss, because a second load
        # would fail as well.
        self._failed_requests: set[str] = set()
        self._events: list[OffloadingEvent] | None = None
        if settings.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
            if not offloading_spec.kv_events_config.self_describing_kv_events:
                logger.warning(
                    'ritornello: events name no tokens without "self_describing_kv_events": true '
                    "in kv_connector_extra_config; routers cannot use them"
                )
        elif settings.enable_kv_events:
            logger.warning(
                'ritornello: "enable_kv_events" does nothing without vLLM\'s own KV events '
                "(--kv-events-config)"
            )
        self._async_lookups: AsyncLookups | None = None
        self._tier: Tier | None = None
        row_bytes = self.block_size_bytes
        engine = engine or engine_config.of_spec(offloading_spec)
        reason = unsupported_reason(
            engine.vllm_config if engine else None, offloading_spec.config, row_bytes
        )
        if engine is not None:
            reason = (
                reason
                or machines_refusal(engine.vllm_config.parallel_config)
                or whole_prompts.refusal(engine.vllm_config, engine.kv_cache_config)
                or stages_refusal(engine.vllm_config, engine.kv_cache_config)
                or windows_refusal(
                    offloading_spec.config, engine.kv_cache_config, kernels.version()
                )
            )
        if reason or engine is None:
            logger.warning("ritornello: %s; pages are neither loaded nor stored", reason)
            return
        vllm_config = engine.vllm_config
        namespace = namespace_of(
            vllm_config,
            engine.kv_cache_config,
            offloading_spec.config,
            row_bytes,
            platform_of(vllm_config, offloading_spec),
        )
        if namespace.model.epoch:
            logger.warning(f"ritornello: {EPOCH_WARNING}", "stored")
        rows = HostRows(primary_kv_view, row_bytes, settings.store.directories)
        kind = TierCache if settings.store.tiers else TierStore
        store = kind(settings.store, self._meter, namespace.model.hash_algorithm)
        guard = engine.guard or guard_of_engine()
        tier = self._tier = Tier(store, namespace, rows, settings, self._meter, guard)
        guard.begin_epoch = tier.on_caches_reset
        self._prefill_times = PrefillTimes(tier.record_prefill)
        observe_steps(self._prefill_times)

    # Requests.

    def on_new_request(self, req_context: "ReqContext") -> RequestOffloadingContext:
        self._attempt("on_new_request", lambda tier: tier.begin_request(req_context), None)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: "ReqContext") -> None:
        def action(tier: Tier) -> None:
            tier.end_request(req_context)
            if self._async_lookups is not None:
                self._async_lookups.cleanup(req_context.req_id)

        self._failed_requests.discard(req_context.req_id)
        self._attempt("on_request_finished", action, None)

    def lookup(self, key: "OffloadKey", req_context: "ReqContext") -> LookupResult:
        tier = self._tier
        if tier is None or req_context.req_id in self._failed_requests:
            return LookupResult.MISS
        try:
            answer = tier.lookup(key, req_context)
            if answer is LookupAnswer.PENDING and not tier.has_tiers:
                if self._async_lookups is None:
                    self._async_lookups = AsyncLookups(tier, self.tier_type)
                found = self._async_lookups.lookup(key, req_context)
                if found is not None:
                    answer = tier.confirm_lookup(key, req_context, found)
            return RESULTS[answer]
        except Exception as error:
            self._failed("lookup", error)
            return LookupResult.MISS

    def touch(self, keys: "Collection[OffloadKey]", req_context: "ReqContext") -> None:
        self._attempt("touch", lambda tier: tier.touch(keys), None)

    # Jobs.

    def submit_store(self, job_metadata: TransferJob) -> None:
        if self._tier is None:
            self._results.append(
                JobResult(job_id=job_metadata.job_id, success=True, transfer_bytes=0)
            )
            return
        try:
            self._tier.save(job_metadata)
        except Exception as error:
            self._failed("submit_store", error)
            self._results.append(JobResult(job_id=job_metadata.job_id, success=False))

    def submit_load(self, job_metadata: TransferJob) -> None:
        try:
            if self._tier is not None:
                self._tier.load(job_metadata)
                return
        except Exception as error:
            self._failed("submit_load", error)
            self._failed_requests.add(job_metadata.req_context.req_id)
        self._results.append(JobResult(job_id=job_metadata.job_id, success=False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._results = self._results, []
        none: list[FinishedJob] = []
        for finished in self._attempt("get_finished_jobs", lambda tier: tier.take_finished(), none):
            try:
                results.append(self._result(finished))
            except Exception as error:
                self._failed("get_finished_jobs", error)
                results.append(JobResult(job_id=finished.job.number, success=False))
        return results

    def on_schedule_end(self, context: "ScheduleEndContext") -> None:
        def action(tier: Tier) -> None:
            if context:
                tier.end_step(context.preempted_req_ids or (), context.new_req_ids or ())
            else:
                tier.end_step()
            if self._async_lookups is not None:
                self._async_lookups.flush()

        self._attempt("on_schedule_end", action, None)

    def drain_jobs(self) -> None:
        self._attempt("drain_jobs", lambda tier: tier.reset(), None)

    def shutdown(self) -> None:
        """Raises on failure: vLLM then keeps the host tier's memory, which may still be in use."""
        tier, self._tier = self._tier, None
        try:
            if tier is not None:
                tier.close()
        except Exception as error:
            self._failed("shutdown", error)
            raise
        finally:
            if self._async_lookups is not None:
                self._async_lookups.shutdown()

    # Events and metrics.

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def get_stats(self) -> "OffloadingConnectorStats | None":
        counts = self._meter.take()
        if not counts:
            return None
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )

        stats = OffloadingConnectorStats()
        for counter, amount in counts.items():
            name, _, reason = counter.partition(":")
            labels = (reason,) if COUNTERS[name][1] else ()
            stats.increase_counter(PREFIX + name, amount, labels)
        return stats

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> "dict[str, OffloadingMetricMetadata]":
        return {
            PREFIX + name: OffloadingCounterMetadata(help_text, ("reason",) if by_reason else ())
            for name, (help_text, by_reason) in COUNTERS.items()
        }

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        others = ("type", "module_path", "backpressure", "engine")
        settings = {key: value for key, value in tier_config.items() if key not in others}
        return tuple(config_info_of(TierSettings.parse(settings)))

    def config_info(self) -> Mapping[str, str | int | float | bool]:
        return config_info_of(self._settings)

    def _result(self, finished: FinishedJob) -> JobResult:
        """Returns vLLM's result. Chunks that the store refused (`REFUSAL_REASONS`) are not reported
        as a failure, because vLLM's back-pressure, if it is configured, may store less after
        failures.
        """
        job = finished.job
        moved = [key for key, ok in zip(job.keys, finished.ok, strict=True) if ok]
        if self._events is not None:
            self._record_event(finished, moved)
        complete = len(moved) == len(job.keys)
        if not job.load:
            complete = complete or set(finished.reasons) <= REFUSAL_REASONS
        return JobResult(
            job_id=job.number,
            success=complete,
            successful_keys=moved if job.load and moved and not complete else None,
            transfer_time=finished.seconds,
            transfer_bytes=finished.bytes,
        )

    def _record_event(self, finished: FinishedJob, moved: "list[OffloadKey]") -> None:
        """Records an event for vLLM's publisher: a put stored chunks, or a load found that chunks
        are no longer stored (removed). `ownership` is omitted: Dynamo drops events with an owner
        that it does not know.
        """
        job = finished.job
        keys = finished.gone if job.load else moved
        if keys and self._events is not None:
            self._events.append(
                OffloadingEvent(
                    keys=keys,
                    medium=self.medium,
                    removed=job.load,
                    locality=self.locality,
                )
            )

    def _attempt(self, operation: str, action: Callable[[Tier], T], default: T) -> T:
        """Returns `action(tier)`, or `default` without a tier or if it fails."""
        if self._tier is None:
            return default
        try:
            return action(self._tier)
        except Exception as error:
            self._failed(operation, error)
            return default

    def _failed(self, operation: str, error: Exception) -> None:
        """Counts a failure, and logs the first of each operation. A failure of the tier must not
        fail a request.
        """
        self._meter.add(f"errors:{operation}")
        if operation not in self._logged:
            self._logged.add(operation)
            logger.exception("ritornello: %s failed (%s); counted as an error", operation, error)


INTERFACE.require(override_difference(RitornelloTier, SecondaryTierManager), vllm.__version__)
accept_defaults(RitornelloTier, SecondaryTierManager)
accept_constructor_defaults(RitornelloTier, SecondaryTierManager)


class AsyncLookups(AsyncLookupManager):
    """Lookups in a store that another process owns, batched on vLLM's lookup thread."""

    def __init__(self, tier: Tier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: "list[OffloadKey]", req_context: "ReqContext") -> Iterable[bool]:
        return self._tier.batch_lookup(keys, req_context)


def config_info_of(settings: TierSettings) -> dict[str, str]:
    """Returns the labels of `vllm:kv_offload_config_info`."""
    store = settings.store
    if store.tiers:
        return {
            "ritornello_tiers": ", ".join(store.shown_tiers),
            "ritornello_prefetch": store.prefetch,
            "ritornello_gate": store.gate,
            "ritornello_read_only": str(store.read_only),
        }
    return {
        "ritornello_path": ",".join(store.directories),
        "ritornello_capacity": str(store.capacity or "default"),
        "ritornello_read_only": str(store.read_only),
        "ritornello_codec": store.codec or "raw",
    }


def platform_of(vllm_config: "VllmConfig", spec: "OffloadingSpec") -> KernelPlatform:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
        canonical_format_id,
    )

    config = spec.config
    canonical = canonical_format_id(config.kv_cache_layout) if config.canonical_layout else ""
    return KernelPlatform(kernels.version(), kernels.packing(vllm_config), str(canonical))
