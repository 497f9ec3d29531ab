"""Messages between the scheduler's side and the workers, one per step. Pickled between
processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ritornello.vllm.handshake import ShardFacts, WorkerRank
from ritornello.vllm.identity import Identity


class PageBlocks(NamedTuple):
    """The blocks of consecutive pages of one KV cache group, to be filled with or stored as the
    pages `keys`. `first`: index of `keys[0]` in its sequence. `before`: keys of pages before page
    `first`, if the group needs all pages: all these keys if the store has a remote, otherwise the
    last of them.
    """

    group: int
    first: int
    keys: Sequence[bytes]
    blocks: Sequence[int]
    before: Sequence[bytes] = ()

    @property
    def parent(self) -> bytes | None:
        return self.before[-1] if self.before else None


class Load(NamedTuple):
    """Fills the blocks of a request. Each layer is filled before the step runs the layer or, if
    `asynchronous`, while other requests run. The scheduler's side holds leases on the pages until
    the load is reported.
    """

    request: str
    pages: Sequence[PageBlocks]
    asynchronous: bool = False


class Save(NamedTuple):
    """Stores blocks that are full after this step's forward pass. `retain_until`: a time in seconds
    since 1970, until which these pages and all pages before them are retained.
    """

    request: str
    pages: PageBlocks
    retain_until: float | None = None


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Work of one step.

    `identity` is sent with the first work and after every change (a reset changes the epoch), and
    is valid until the next identity. `covered` is sent with it: `WeightGuard.covered`, the counts
    of weight changes when the identity's epoch began, empty if weights are not watched. `prefill`:
    the numbers of tokens before the step's prefill and in it, if workers measure its duration.
    `freed`: requests that finished or were preempted since the last step: the engine may give their
    blocks to other requests.

    Inside MultiConnector: `step` is the number of a step whose outcome workers report (0: no
    report), `finished_sending` names finished requests whose blocks vLLM may free after the step,
    and `request_facts` asks every worker for its `ShardFacts`.
    """

    identity: Identity | None = None
    loads: Sequence[Load] = ()
    saves: Sequence[Save] = ()
    prefill: tuple[int, int] | None = None
    step: int = 0
    finished_sending: Sequence[str] = ()
    request_facts: bool = False
    covered: bytes = b""
    freed: Sequence[str] = ()


IDLE = StepMetadata()


@dataclass(slots=True)
class WorkerReport:
    """Result of a step. `unsaved`: (request, group, first page) of pages to be saved again: of
    saves that failed and may be repeated, and of pages that a load did not fill. `failed`: requests
    whose load missed a page. `unsupported_reason`: why this worker is not served. `prefill`: a
    measured prefill, as (tokens before it, tokens computed, seconds). `loads`: totals of measured
    reads, as (tier, bytes, seconds); a tier may have several. `load_seconds`: by request, the
    duration of its load or, for a load that arrives layer by layer, the time that the step waited
    for its loads. `step`: the number of the completed step. `facts`: the `ShardFacts` of each
    worker, if requested. `changes`: from a worker on another machine, its count of weight changes,
    by its slot in `ChangeCounters`. `unregistered`: each worker that cannot register its KV memory
    yet, with the reason, and each worker that could not and now can, with "".
    """

    unsaved: list[tuple[str, int, int]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    unsupported_reason: str = ""
    prefill: tuple[int, int, float] | None = None
    loads: list[tuple[str, int, float]] = field(default_factory=list)
    load_seconds: dict[str, float] = field(default_factory=dict)
    step: int = 0
    facts: dict[WorkerRank, ShardFacts] = field(default_factory=dict)
    changes: dict[int, int] = field(default_factory=dict)
    unregistered: dict[WorkerRank, str] = field(default_factory=dict)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        both = self.load_seconds.keys() | other.load_seconds.keys()
        return WorkerReport(
            self.unsaved + other.unsaved,
            self.failed | other.failed,
            self.unsupported_reason or other.unsupported_reason,
            self.prefill or other.prefill,
            self.loads + other.loads,
            {
                name: max(self.load_seconds.get(name, 0.0), other.load_seconds.get(name, 0.0))
                for name in both
            },
            max(self.step, other.step),
            self.facts | other.facts,
            self.changes | other.changes,
            self.unregistered | other.unregistered,
        )
