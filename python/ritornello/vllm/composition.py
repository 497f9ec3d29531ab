"""The connector as one of several connectors inside vLLM's MultiConnector.

Before the first step, vLLM passes messages of the workers to the scheduler's connector (the
handshake). MultiConnector passes the messages of one connector to all its connectors. This module
therefore requests each worker's `ShardFacts`, the layout of its KV memory, with a step, and takes
them from the step's reports.
"""

from collections.abc import Mapping
from time import monotonic
from typing import Any

from ritornello.vllm.handshake import ShardFacts, WorkerRank
from ritornello.vllm.metadata import IDLE, StepMetadata

# Maximum time that requests wait for the `ShardFacts` of all workers, which arrive with the first
# step's report.
FACTS_SECONDS = 5.0
POLICY_LINE = (
    '"kv_load_failure_policy" is now "recompute" for all connectors of this engine, so that a '
    "failed load fails no request; set it next to the outermost kv_connector to avoid this warning"
)
# A connector that fills blocks with dummy values, which must not be saved as the KV of a prompt.
DUMMY = "DecodeBenchConnector"
# Connectors that load only between steps, in the tested versions of vLLM.
LOAD_BETWEEN_STEPS = frozenset({"MooncakeConnector", "NixlConnector"})
# vLLM's names of Ritornello's connector, and of the connector that contains it.
OWN = frozenset({"MultiConnector", "RitornelloConnector"})
REQUEST_FACTS = StepMetadata(request_facts=True)


def unsupported_reason(engine: Any | None) -> str:
    """Returns why this connector must not load or save beside the engine's other connectors; "" if
    it may.
    """
    if engine is not None and DUMMY in _names(engine.kv_transfer_config):
        return f"{DUMMY} fills blocks with dummy values"
    return ""


def unsafe_to_offload_reason(engine: Any | None) -> str:
    """Returns why vLLM's offloading must not save pages beside the engine's other connectors; "" if
    it may.

    vLLM's offloading saves the pages of a step before vLLM reports whether loads by other
    connectors in that step succeeded, so after a failed load it would save memory that holds no KV.
    """
    names = set() if engine is None else _names(engine.kv_transfer_config)
    others = sorted(names - OWN - LOAD_BETWEEN_STEPS)
    if not others:
        return unsupported_reason(engine)
    return (
        f"{', '.join(others)} may load pages during a step, and vLLM's offloading would save them "
        "even if the load failed"
    )


def recompute(engine: Any) -> bool:
    """Sets the engine to recompute after a failed load; returns whether the policy changed. The
    change takes effect because vLLM's scheduler reads the policy after it has constructed the
    outermost connector.
    """
    config = engine.kv_transfer_config
    failed: bool = config.kv_load_failure_policy != "recompute"
    config.kv_load_failure_policy = "recompute"
    return failed


class FactsCollector:
    """Collects the `ShardFacts` of `workers` workers. Until all have arrived, every step requests
    them, and requests to the engine wait, at most `FACTS_SECONDS` after the first call of
    `pending`.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._facts: dict[WorkerRank, ShardFacts] = {}
        self._since: float | None = None
        self._over = False

    def pending(self) -> bool:
        """Returns whether a request must wait; the first call starts the timeout."""
        now = monotonic()
        self._since = now if self._since is None else self._since
        return not self._over and now - self._since < FACTS_SECONDS

    def step_metadata(self) -> StepMetadata:
        """Returns the metadata of a step without transfers: it requests the `ShardFacts` until all
        workers have sent them.
        """
        return IDLE if self._over else REQUEST_FACTS

    def add(self, facts: Mapping[WorkerRank, ShardFacts]) -> Mapping[WorkerRank, ShardFacts] | None:
        """Adds facts. Returns the `ShardFacts` of all workers if this call completes them, else
        None.
        """
        self._facts.update(facts)
        if self._over or len(self._facts) < self._workers:
            return None
        self._over = True
        return self._facts


def _names(config: Any) -> set[str]:
    """Returns the class names of the connectors inside `config`, and inside these connectors."""
    found: set[str] = set()
    for child in config.kv_connector_extra_config.get("connectors", ()):
        found.add(str(child.get("kv_connector")))
        inner = child.get("kv_connector_extra_config") or {}
        found |= {str(c.get("kv_connector")) for c in inner.get("connectors", ())}
    return found
