"""The adapter's counters among LMCache's own metrics, named like the metrics of LMCache 0.5.6.

LMCache publishes its metrics through OpenTelemetry's global meter provider: to `/metrics` of its
HTTP server, or to a collector. The adapters of a process share one counter for each name, and are
told apart by the attribute `store`. Counters are read when the metrics are collected, not in
LMCache's calls of an adapter.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from ritornello.connector.cache_counts import CACHE_COUNTERS, help_by_reason
from ritornello.connector.meter import Counts

logger = logging.getLogger("ritornello.lmcache")

METER = "lmcache.ritornello"
PREFIX = "lmcache_mp.ritornello_"
COUNTERS = {
    "probed_pages": "Objects that LMCache looked up.",
    "hit_pages": "Looked up objects that can be loaded.",
    "loaded_pages": "Objects read from the store, verified, and put into LMCache's memory.",
    "loaded_bytes": "Bytes read from the store.",
    "load_seconds": "Seconds of loads; concurrent loads count separately.",
    "saved_pages": "Objects stored, including objects that were already stored.",
    "saved_bytes": "Bytes of stored objects, including objects that were already stored.",
    "save_seconds": "Seconds of saves; concurrent saves count separately.",
    "deleted_pages": "Objects that LMCache deleted.",
    "errors": "Failed operations, such as calls to the store.",
    **CACHE_COUNTERS,
}
REASONS = {
    "missed_pages": "Objects that were to be loaded and were not, by reason.",
    "skipped_pages": "Objects that were offered and not stored, by reason.",
    **help_by_reason("objects"),
}

# For each adapter the function that returns its counts, and the value of its attribute `store`. An
# adapter that is dropped disappears from the metrics.
_adapters: "WeakKeyDictionary[Any, tuple[Callable[[Any], Counts], str]]" = WeakKeyDictionary()
_lock = Lock()
_created = False


def publish(adapter: Any, counts: Callable[[Any], Counts], store: str) -> None:
    """Publishes `counts(adapter)` while the adapter exists. If the counters cannot be created, for
    example because OpenTelemetry is missing, logs a warning instead, once per process.
    """
    global _created
    with _lock:
        _adapters[adapter] = (counts, store)
        if _created:
            return
        _created = True
    try:
        from opentelemetry import metrics

        meter = metrics.get_meter(METER)
        for name, text in (COUNTERS | REASONS).items():
            meter.create_observable_counter(
                PREFIX + name, callbacks=[partial(_observe, name)], description=text
            )
    except Exception as error:
        logger.warning(
            "ritornello: no counters among LMCache's metrics: they cannot be created (%s)", error
        )


def _observe(name: str, options: object) -> Iterable[Any]:
    """Returns the amounts of one counter. A counter that has no reasons and was never increased
    reads zero.
    """
    from opentelemetry.metrics import Observation

    with _lock:
        adapters = [*_adapters.items()]
    observed = []
    for adapter, (counts, store) in adapters:
        try:
            amounts = counts(adapter)
        except Exception as error:  # one adapter must not hide the others
            logger.debug("ritornello: the counters of %s could not be read (%s)", store, error)
            continue
        if name in COUNTERS:
            observed.append(Observation(amounts.get(name, 0), {"store": store}))
            continue
        for counter, amount in amounts.items():
            found, _, reason = counter.partition(":")
            if found == name:
                observed.append(Observation(amount, {"store": store, "reason": reason}))
    return observed
