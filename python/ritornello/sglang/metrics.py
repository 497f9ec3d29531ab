"""The storage's counters on SGLang's `/metrics`.

With `--enable-metrics` SGLang sets `PROMETHEUS_MULTIPROC_DIR` before it starts its schedulers, and
`/metrics` returns the counters of `prometheus_client` of all these processes. SGLang's
`StorageMetricsCollector` determines the labels and the class of counters; a subclass of it has
counters that report to Ray instead of Prometheus.
"""

import logging
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from ritornello.connector.cache_counts import CACHE_COUNTERS, help_by_reason
from ritornello.connector.meter import Counts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

logger = logging.getLogger("ritornello.sglang")

PREFIX = "sglang:ritornello_"
# SGLang's name of backends that are loaded by module and class.
BACKEND = "dynamic"
RANKS = ("tp_rank", "dp_rank", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
COUNTERS = {
    "probed_pages": "Pages of prompts that SGLang looked up in the storage.",
    "hit_pages": "Looked up pages that can be loaded.",
    "loaded_pages": "Pages read from the store, verified, and put into host memory.",
    "loaded_bytes": "Bytes read from the store.",
    "load_seconds": "Seconds of loads; time in which loads overlap counts once.",
    "saved_pages": "Pages stored, including pages that were already stored.",
    "saved_bytes": "Bytes of stored pages, including pages that were already stored.",
    "save_seconds": "Seconds of saves.",
    "errors": "Failed operations, such as calls to the store.",
    **CACHE_COUNTERS,
}
REASONS = {
    "missed_pages": "Pages that were to be loaded and were not, by reason.",
    "skipped_pages": "Pages that were offered and not stored, by reason.",
    "refused_pages": "Pages that SGLang passed in a form that is not served, by reason.",
    **help_by_reason("pages"),
}

# Prometheus registers a name once in a process: storages that are attached later use the same
# counters.
_counters: dict[str, Any] = {}
_lock = Lock()


def metrics_of(config: "HiCacheStorageConfig") -> Callable[[Counts], None]:
    """Returns a thread-safe function that adds amounts to the counters. The function does nothing
    if SGLang's metrics are off, or if the counters cannot be created, for example because SGLang's
    metrics classes have changed.
    """
    if not config.enable_storage_metrics:
        return _ignore
    try:
        return _export(_labels(config))
    except Exception as error:
        logger.warning("ritornello: no counters on SGLang's /metrics (%s)", error)
        return _ignore


def _export(labels: dict[str, str]) -> Callable[[Counts], None]:
    with _lock:
        if not _counters:
            _counters.update(_registered(_counter_class(), list(labels)))
    # Created now, so that unused counters read zero.
    children = {name: _counters[name].labels(**labels) for name in COUNTERS}

    def add(amounts: Counts) -> None:
        try:
            for name, amount in amounts.items():
                counter, _, reason = name.partition(":")
                child = children.get(name) or _counters[counter].labels(**labels, reason=reason)
                child.inc(amount)
        except Exception as error:  # counting must not fail a call
            logger.debug(
                "ritornello: the counters could not be increased by %s (%s)", amounts, error
            )

    return add


def _registered(kind: Any, labels: list[str]) -> dict[str, Any]:
    plain = {
        name: kind(name=PREFIX + name, documentation=text, labelnames=labels)
        for name, text in COUNTERS.items()
    }
    by_reason = {
        name: kind(name=PREFIX + name, documentation=text, labelnames=[*labels, "reason"])
        for name, text in REASONS.items()
    }
    return plain | by_reason


def _counter_class() -> Any:
    from sglang.srt.observability.metrics_collector import (
        STAT_LOGGER_ROLE_STORAGE,
        StorageMetricsCollector,
        resolve_collector_class,
    )

    collector = resolve_collector_class(STAT_LOGGER_ROLE_STORAGE, StorageMetricsCollector)
    if collector._counter_cls is not None:
        return collector._counter_cls
    # Imported late: `prometheus_client` reads `PROMETHEUS_MULTIPROC_DIR` when it is imported.
    from prometheus_client import Counter

    return Counter


def _labels(config: "HiCacheStorageConfig") -> dict[str, str]:
    """Returns the labels of SGLang's own metrics of its storage."""
    labels = {"storage_backend": BACKEND}
    labels |= {name: str(getattr(config, name)) for name in RANKS}
    return labels | _extra_labels()


def _extra_labels() -> dict[str, str]:
    """Returns the user's labels (`--extra-metric-labels`); none outside an engine."""
    from sglang.srt.runtime_context import get_observability

    try:
        extra = get_observability().extra_metric_labels
    except ValueError:
        return {}
    return {name: str(value) for name, value in (extra or {}).items()}


def _ignore(amounts: Counts) -> None:
    """Adds nothing."""
