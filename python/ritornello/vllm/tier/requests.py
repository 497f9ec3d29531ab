"""The state that the tier keeps for each of vLLM's requests, and for the lookups of their chunks
(pages of vLLM's host tier).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from ritornello.vllm.settings import RequestOptions
from ritornello.vllm.tier.cache import Prompt
from ritornello.vllm.tier.call_thread import Call
from ritornello.vllm.tier.sequence import KeySequence

if TYPE_CHECKING:
    from ritornello._core import DecisionOutcome, Lookup


class LookupAnswer(Enum):
    HIT = auto()
    MISS = auto()
    PENDING = auto()


@dataclass(slots=True)
class Decision:
    """A load that the gate decided: chunks number `first` to `end - 1` of a prompt."""

    lookup: "Lookup"
    first: int
    end: int


class RecordedDecision(NamedTuple):
    """A decision about the chunk `first` of a request and the following chunks: `found` chunks were
    found, `loaded` chunks are loaded. `next`: the chunk after the loaded chunks; None if it is not
    known.
    """

    outcome: "DecisionOutcome"
    first: bytes
    found: int
    loaded: int
    detail: str
    next: bytes | None

    def covers(self, later: "RecordedDecision") -> bool:
        """Returns whether `later` begins directly after the chunks that this decision loads, loads
        no chunk, and finds no chunk that this decision has not found.
        """
        return (
            self.loaded > 0
            and later.first == self.next
            and not later.loaded
            and later.found <= self.found - self.loaded
        )


@dataclass(slots=True)
class PromptLookup:
    """The lookup of the leading chunks, of one window or of one other chunk of a request, in one KV
    cache group, and its repetitions. `call` is in progress, or its answer is not used yet.
    `pending`: the last answer was pending, and the next lookup is due at `next_at`. `pending_in`:
    the last step in which the answer was pending; in this step it is pending for all chunks. `end`:
    the request may load the chunks before this number; None until the first decision; 0 for a
    window whose last chunk is missing. `incomplete`: a lookup of the window found that it lacks
    chunks. `decision`: the decision of the last lookup, until a load takes it.
    """

    keys: Sequence[bytes]
    prompt: Prompt
    call: Call | None = None
    started: float = 0.0
    pending: bool = False
    pending_in: int = -1
    next_at: float = 0.0
    end: int | None = None
    incomplete: bool = False
    decision: Decision | None = None


@dataclass(slots=True)
class WindowSearch:
    """The search of one request for a window, in one group. `first`: the last key of the window
    that is looked up first. `incomplete`: number of windows that were found to lack chunks.
    `until`: the time of `monotonic` after which further windows are looked up on this machine only.
    `step`: the scheduler's step to which `pending` and `keys` belong. `pending`: number of windows
    that have no answer yet and are not known to lack a chunk. `keys`: the chunks of all windows
    that have no answer yet.
    """

    first: bytes
    until: float
    incomplete: int = 0
    step: int = -1
    pending: int = 0
    keys: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class RequestState:
    """State of a request. `answers`: for one step, whether each chunk that was looked up may be
    loaded. `failed`: chunks that a load of the request did not fill. The lookup thread may append
    to `leases` at any time. `prompts`: with several tiers, the lookups of the request, by name: the
    group's number for the leading chunks of a chained group, the last key for a window of another
    group, the chunk's own key for a single chunk. `searches`: searches for windows, by group.
    `prefix_pending_in`: the step in which the answer of a chained group is pending. `recorded`: by
    group, the last decision that was recorded (`DecisionLog`).
    """

    options: RequestOptions
    sequences: dict[int, KeySequence]
    answers: dict[bytes, bool] = field(default_factory=dict)
    leases: deque[Any] = field(default_factory=deque)
    failed: set[bytes] = field(default_factory=set)
    prompts: dict[int | bytes, PromptLookup] = field(default_factory=dict)
    searches: dict[int, WindowSearch] = field(default_factory=dict)
    prefix_pending_in: int = -1
    recorded: dict[int, RecordedDecision] = field(default_factory=dict)
