"""Inside vLLM's MultiConnector: what a child connector learns of the engine around it.

A child is made with a copy of the configuration, its handshake may go to its siblings, and the
siblings' may come to it. So here the engine's own configuration is looked up, and workers' facts
are asked for with the work of a step and come back with its report.
"""

import sys
from collections.abc import Mapping
from time import monotonic
from types import FrameType
from typing import Any

from ritornello.vllm.handshake import Place, ShardFacts
from ritornello.vllm.metadata import IDLE, StepMetadata

# Maximum time requests wait for the facts of workers. One step without tokens brings them.
FACTS_SECONDS = 5.0
POLICY_LINE = (
    '"kv_load_failure_policy" is now "recompute" for all connectors of this engine, so that a '
    "failed load fails no request; write it beside the outermost kv_connector"
)
# Fills blocks with made-up values, which would be saved as the KV of a prompt.
MADE_UP = "DecodeBenchConnector"
ASKING = StepMetadata(asks=True)


def engine_config(child: object, base: type) -> Any | None:
    """The configuration the engine reads, where another connector makes `child`; None where the
    engine makes it. `base`: vLLM's connector class. The child's own configuration does not lead to
    the engine's, so the constructor of the outermost connector is found on the stack.
    """
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        maker, config = names.get("self"), names.get("vllm_config")
        if maker is not child and isinstance(maker, base) and config is not None:
            found = config
        frame = frame.f_back
    return found


def refusal(engine: Any | None) -> str:
    """Why nothing is served beside the other connectors; "" where it is."""
    if engine is not None and MADE_UP in _names(engine.kv_transfer_config):
        return f"{MADE_UP} fills blocks with made-up values"
    return ""


def recompute(engine: Any) -> bool:
    """Has the engine compute what could not be loaded; whether it would have failed requests. Read
    by vLLM once its scheduler has made the outermost connector.
    """
    config = engine.kv_transfer_config
    failed: bool = config.kv_load_failure_policy != "recompute"
    config.kv_load_failure_policy = "recompute"
    return failed


def register(factory: Any, name: str, module: str) -> None:
    """Has vLLM resolve the connector by name alone, as it does for children's statistics."""
    try:
        factory.register_connector(name, module, name)
    except ValueError:  # registered already
        return


class Gathering:
    """Facts of `workers` workers. Until all are there, or `FACTS_SECONDS` after the first request,
    requests wait and each step asks for them.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._facts: dict[Place, ShardFacts] = {}
        self._since: float | None = None
        self._over = False

    def waits(self) -> bool:
        """Whether a request is to ask again; starts the clock."""
        now = monotonic()
        self._since = now if self._since is None else self._since
        return not self._over and now - self._since < FACTS_SECONDS

    def metadata(self) -> StepMetadata:
        """The work of a step until all facts are there."""
        return IDLE if self._over else ASKING

    def add(self, facts: Mapping[Place, ShardFacts]) -> Mapping[Place, ShardFacts] | None:
        """The facts of all workers, once; None before and after."""
        self._facts.update(facts)
        if self._over or len(self._facts) < self._workers:
            return None
        self._over = True
        return self._facts


def _names(config: Any) -> set[str]:
    """Class names of all connectors inside `config`."""
    found: set[str] = set()
    for child in config.kv_connector_extra_config.get("connectors", ()):
        found.add(str(child.get("kv_connector")))
        inner = child.get("kv_connector_extra_config") or {}
        found |= {str(c.get("kv_connector")) for c in inner.get("connectors", ())}
    return found
