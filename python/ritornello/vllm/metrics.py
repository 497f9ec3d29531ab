"""The connector's counters on vLLM's `/metrics`, through vLLM's connector statistics."""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ritornello.connector.cache_counts import CACHE_COUNTERS, help_by_reason
from ritornello.connector.meter import Counts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = {
    "probed_pages": "Full pages of prompts that were not in the engine's own prefix cache.",
    "hit_pages": "Probed pages that were to be loaded from the store.",
    "loaded_pages": "Pages read from the store, verified, and put into KV memory.",
    "loaded_bytes": "Bytes read from the store.",
    "load_seconds": "Time that the engine waited for loads.",
    "layer_wait_seconds": "Part of load_seconds: time that layers waited during steps.",
    "layer_loads": "Loads that arrived layer by layer while a step computed.",
    "step_loads": "Loads that a step waited for before its first layer.",
    "apart_loads": "Asynchronous loads: no step waited for them, and other requests ran.",
    "saved_pages": "Pages stored, including pages that were already stored.",
    "saved_bytes": "Bytes written to the store.",
    "save_seconds": "Time that the engine spent handing pages over to be saved.",
    "failed_pages": "Pages that were to be loaded, could not be, and were computed instead.",
    "errors": "Failed operations, such as calls to the store.",
    "ignored_retentions": "Requests for retention that the store's policy does not permit.",
    "hook_seconds": "Time inside the connector's hooks, scheduler and worker together.",
    "step_seconds": "Time of the engine's steps, measured by the worker.",
    "steps": "Engine steps.",
    **CACHE_COUNTERS,
}
REASONS = {
    "missed_pages": "Pages that were probed, or were to be loaded, and were not loaded, by reason.",
    "skipped_pages": "Pages that were offered and not stored, by reason.",
    **help_by_reason("objects"),
}


class RitornelloStats(KVConnectorStats):
    """Counts of one interval. `data` maps a counter's name, or "name:reason", to an amount."""

    def reset(self) -> None:
        self.data: Counts = {}

    def aggregate(self, other: KVConnectorStats) -> "RitornelloStats":
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0.0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns pages by counter, and time in hooks per time in steps, for vLLM's log line."""
        summary: dict[str, int | float] = {
            name: int(self.data[name])
            for name in COUNTERS
            if name.endswith("_pages") and self.data.get(name)
        }
        steps = self.data.get("step_seconds", 0.0)
        if steps:
            summary["hook_share"] = round(self.data.get("hook_seconds", 0.0) / steps, 5)
        return summary

    def is_empty(self) -> bool:
        return not self.data


class RitornelloPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each count, `vllm:ritornello_<name>_total`, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(
                name=f"vllm:ritornello_{name}", documentation=help_text, labelnames=labelnames
            )
            for name, help_text in COUNTERS.items()
        }
        # Created up front, so that unused counters read zero.
        self._children = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }
        self._by_reason = {
            name: self._counter_cls(
                name=f"vllm:ritornello_{name}",
                documentation=help_text,
                labelnames=[*labelnames, "reason"],
            )
            for name, help_text in REASONS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        children = self._children[engine_idx]
        for name, amount in transfer_stats_data.items():
            counter, _, reason = name.partition(":")
            if reason:
                values = self.per_engine_labelvalues[engine_idx]
                self._by_reason[counter].labels(*values, reason).inc(amount)
            else:
                children[counter].inc(amount)
