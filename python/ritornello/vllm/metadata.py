"""What scheduler and worker tell each other once a step. Pickled between processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ritornello.vllm.handshake import ShardFacts, WorkerRank
from ritornello.vllm.identity import Identity


class Pages(NamedTuple):
    """Consecutive pages of one part: fill or store `blocks` under `keys`. `first`: the place of
    `keys[0]` in its sequence. `before`: the keys before it where the part is a chain, all of them
    for a store that must know them all, else the last.
    """

    part: int
    first: int
    keys: Sequence[bytes]
    blocks: Sequence[int]
    before: Sequence[bytes] = ()

    @property
    def parent(self) -> bytes | None:
        return self.before[-1] if self.before else None


class Load(NamedTuple):
    """Fill the blocks of a request, each layer's before this step runs that layer or, `asynchronous`,
    while other requests go on. The scheduler's side holds leases on the pages until it hears that
    the load is over.
    """

    request: str
    pages: Sequence[Pages]
    asynchronous: bool = False


class Save(NamedTuple):
    """Store blocks that are full once this step's forward pass is over. `retain_until`: they and
    all before them stay until then, in seconds since 1970.
    """

    request: str
    pages: Pages
    retain_until: float | None = None


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """A step's work. `identity` comes with the first work there is and whenever it has changed (a
    reset changes the epoch): it holds for this step and those after it. `prefill`: what the step
    computes, tokens before it and tokens, where somebody wants to know how long that takes.
    Inside MultiConnector: `step` is the number of a step whose outcome workers report (0: none),
    `finished_sending` names finished requests whose blocks vLLM may free after the step, and
    `request_facts` asks every worker for its facts.
    `covered`: comes with the identity; the changes of the weights that its epoch covers, empty
    where they are not watched.
    """

    identity: Identity | None = None
    loads: Sequence[Load] = ()
    saves: Sequence[Save] = ()
    prefill: tuple[int, int] | None = None
    step: int = 0
    finished_sending: Sequence[str] = ()
    request_facts: bool = False
    covered: bytes = b""


IDLE = StepMetadata()


@dataclass(slots=True)
class WorkerReport:
    """What the scheduler must know of a step. `unsaved`: (request, part, first page) of saves that
    did not happen and may be asked for again. `failed`: requests whose load did not bring all.
    `refusal`: why this worker can serve nothing. `prefill`: tokens before what was computed,
    tokens, seconds. `loads`: tier, bytes, seconds of what was read. `load_seconds`: seconds of each
    request's load. `step`: the number of the completed step. `facts`: of each worker, if requested.
    `changes`: of a worker on another machine, the changes of its weights by slot.
    """

    unsaved: list[tuple[str, int, int]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    refusal: str = ""
    prefill: tuple[int, int, float] | None = None
    loads: list[tuple[str, int, float]] = field(default_factory=list)
    load_seconds: dict[str, float] = field(default_factory=dict)
    step: int = 0
    facts: dict[WorkerRank, ShardFacts] = field(default_factory=dict)
    changes: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        both = self.load_seconds.keys() | other.load_seconds.keys()
        return WorkerReport(
            self.unsaved + other.unsaved,
            self.failed | other.failed,
            self.refusal or other.refusal,
            self.prefill or other.prefill,
            self.loads + other.loads,
            {
                name: max(self.load_seconds.get(name, 0.0), other.load_seconds.get(name, 0.0))
                for name in both
            },
            max(self.step, other.step),
            self.facts | other.facts,
            self.changes | other.changes,
        )
