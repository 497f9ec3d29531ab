"""Checks that the installed vLLM has the tested interface of secondary tiers."""

from typing import Any

from ritornello.connector.interface import (
    EngineInterface,
    abstract_difference,
    constructor_difference,
    field_difference,
    missing_hooks,
    record_difference,
)
from ritornello.vllm.interface import TESTED

INTERFACE = EngineInterface(
    "ritornello.vllm.RitornelloTier", "vLLM", TESTED, "interface of secondary tiers"
)

ABSTRACT = frozenset(
    {"drain_jobs", "get_finished_jobs", "lookup", "on_new_request", "submit_load", "submit_store"}
)
# Optional methods of a tier. The check requires them: a vLLM without one of these methods would
# never call our override of the method, and raise no error.
HOOKS = frozenset(
    {
        "build_metric_definitions",
        "get_stats",
        "on_request_finished",
        "on_schedule_end",
        "shutdown",
        "take_events",
        "touch",
    }
)
PARAMETERS = ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector")
JOB = ("job_id", "keys", "chunk_ids", "is_promotion", "req_context", "submit_time")
RESULT = ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes")
ANSWERS = frozenset({"HIT", "MISS", "RETRY"})


def interface_difference(base: Any, job: Any, result: Any, answers: Any) -> str:
    """Returns why the tier cannot work with vLLM's interface of tiers: the first difference from
    the tested interface that is not accepted; "" if there is none. `base`: the class of tiers.
    `job`, `result`: dataclasses of its arguments and results. `answers`: the enum of lookup
    results.
    """
    lost = sorted(ANSWERS - set(answers.__members__))
    return (
        abstract_difference(base, ABSTRACT)
        or missing_hooks(base, HOOKS)
        or constructor_difference(base, PARAMETERS)
        or field_difference(job.__name__, job, JOB)
        or record_difference(result.__name__, result, RESULT)
        or (f"a lookup cannot answer {', '.join(lost)}" if lost else "")
    )
