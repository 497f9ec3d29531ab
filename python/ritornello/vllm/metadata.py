"""What scheduler and worker tell each other once a step. Pickled between processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ritornello.vllm.identity import Identity


@dataclass(frozen=True, slots=True)
class Load:
    """Fill `blocks` with the pages `keys`. `first`: the place of `keys[0]` in its sequence.
    The lease keeps the pages readable; the worker releases it when the load is over.
    """

    request: str
    first: int
    keys: Sequence[bytes]
    blocks: Sequence[int]
    lease: int


@dataclass(frozen=True, slots=True)
class Save:
    """Store `blocks` under `keys`; they are full once this step's forward pass is over.
    `parent`: the key before `keys[0]`, None at the start of a sequence. `retain_until`: they and
    all before them stay until then, in seconds since 1970.
    """

    request: str
    first: int
    keys: Sequence[bytes]
    blocks: Sequence[int]
    parent: bytes | None
    retain_until: float | None = None


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """A step's work. `identity` is there whenever there is work: the epoch in it may change
    between steps, and pages belong to the epoch of the step that read or wrote them.
    """

    identity: Identity | None = None
    loads: Sequence[Load] = ()
    saves: Sequence[Save] = ()


IDLE = StepMetadata()


@dataclass(slots=True)
class WorkerReport:
    """What the scheduler must know of a step. `unsaved`: (request, first page) of saves that did
    not happen and may be asked for again. `refusal`: why this worker can serve nothing.
    """

    unsaved: list[tuple[str, int]] = field(default_factory=list)
    refusal: str = ""

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        return WorkerReport(self.unsaved + other.unsaved, self.refusal or other.refusal)
