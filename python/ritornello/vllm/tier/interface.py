"""Checks that the installed vLLM has the tested interface of secondary tiers."""

import inspect
from typing import Any

TESTED = "0.32 and 0.33"

ABSTRACT = frozenset(
    {"drain_jobs", "get_finished_jobs", "lookup", "on_new_request", "submit_load", "submit_store"}
)
# Hooks whose absence would go unnoticed: vLLM would not call them.
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
PARAMETERS = (
    "self",
    "offloading_spec",
    "primary_kv_view",
    "tier_type",
    "backpressure_detector",
)
JOB = ("job_id", "keys", "chunk_ids", "is_promotion", "req_context", "submit_time")
RESULT = ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes")
ANSWERS = frozenset({"HIT", "MISS", "RETRY"})


def interface_difference(base: Any, job: Any, result: Any, answers: Any) -> str:
    """Returns how vLLM's interface of tiers differs from the tested interface; "" if they are
    equal. `base`: the class of tiers. `job`, `result`: dataclasses of its arguments and results.
    `answers`: the enum of lookups.
    """
    abstract = frozenset(base.__abstractmethods__)
    if abstract != ABSTRACT:
        return f"abstract methods differ: {', '.join(sorted(abstract ^ ABSTRACT))}"
    missing = sorted(name for name in HOOKS if not hasattr(base, name))
    if missing:
        return f"hooks are missing: {', '.join(missing)}"
    parameters = tuple(inspect.signature(base.__init__).parameters)
    if parameters != PARAMETERS:
        return f"the constructor takes {', '.join(parameters[1:])}"
    for kind, expected in ((job, JOB), (result, RESULT)):
        fields = tuple(inspect.signature(kind).parameters)
        if fields != expected:
            return f"{kind.__name__} has {', '.join(fields)}"
    lost = sorted(ANSWERS - set(answers.__members__))
    return f"a lookup cannot answer {', '.join(lost)}" if lost else ""


def require_tested_interface(base: Any, job: Any, result: Any, answers: Any, version: str) -> None:
    """Raises ImportError, in one line, for an untested interface."""
    problem = interface_difference(base, job, result, answers)
    if problem:
        raise ImportError(
            f"ritornello.vllm.RitornelloTier was written for vLLM {TESTED}; the interface of "
            f"secondary tiers of vLLM {version} differs ({problem}): use one of those "
            "versions, or a newer ritornello"
        )
