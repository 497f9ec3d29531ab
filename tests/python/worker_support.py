"""The worker's side of vLLM's connector, with a stand-in for the store whose gets and puts have the
outcomes that a test chooses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm_shapes import FIRST, identity

from ritornello.vllm.cache_groups import ObjectId
from ritornello.vllm.identity import Identity
from ritornello.vllm.metadata import Load, PageBlocks, Save, StepMetadata
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.shard import HeldObjects, PageObject
from ritornello.vllm.worker import WorkerSide

KEYS = (b"k0" * 8, b"k1" * 8, b"k2" * 8)


def outcome(*ok: bool, reason: str = "") -> Any:
    pages = (*ok, False).index(False)
    return SimpleNamespace(ok=list(ok), pages=pages, bytes=pages * 4096, reason=reason, seconds=0)


@dataclass
class FakeStore:
    """Stand-in for the worker's store. `outcomes`: the results of the next gets and puts, in the
    order of their submission, or the words "late" (the ticket is not done until it is cancelled),
    "interrupted" (the wait raises KeyboardInterrupt) and "busy" (the put is refused). `events`: the
    calls that wait for a ticket or for one of its sections, cancel a ticket and wait, protect a
    save from later steps of the engine, or close the store, in order.
    """

    outcomes: list[Any] = field(default_factory=list)
    cancelled: int = 0
    puts: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    wants_timings: bool = False
    memory_problem: Callable[[], str] = str
    # For each get and put, in order: the stream whose queued work it waits for.
    streams: list[int | None] = field(default_factory=list)
    sections: list[Sequence[int]] = field(default_factory=list)

    def open(self) -> bool:
        return True

    def submit_get(
        self,
        identity: Identity,
        object_id: ObjectId,
        pool: Any,
        pages: PageBlocks,
        timeout: float,
        sections: Sequence[int] = (),
        stream: int | None = None,
    ) -> Any:
        self.sections.append(sections)
        self.streams.append(stream)
        return self._ticket()

    def time_limit(self, nbytes: int, least: float) -> float:
        return least

    def wait_section(self, ticket: Any, number: int, timeout: float) -> bool:
        self.events.append(f"group {number}")
        return bool(ticket.outcome != "late")

    def submit_put(
        self,
        identity: Identity,
        object_id: ObjectId,
        pool: Any,
        pages: PageBlocks,
        until: float | None,
        stream: int | None = None,
    ) -> Any:
        self.puts.append((object_id, pages.keys, pages.blocks, pages.parent))
        self.streams.append(stream)
        if self.outcomes[0] == "busy":
            return self.outcomes.pop(0)
        return self._ticket() or "error"

    def protect(self, memory: Any, ticket: Any) -> None:
        self.events.append("protect")

    def take_loads(self) -> list[tuple[str, int, float]]:
        return [("disk", 4096, 0.5)]

    def report_stats(self) -> None:
        pass

    def is_done(self, ticket: Any) -> bool:
        return ticket.outcome != "late" or self.cancelled > 0

    def request_cancel(self, ticket: Any) -> None:
        self.cancelled += 1

    def wait(self, ticket: Any, timeout: float | None) -> Any:
        if ticket.outcome == "interrupted":
            raise KeyboardInterrupt
        self.events.append("wait")
        return None if ticket.outcome == "late" else ticket.outcome

    def cancel_and_wait(self, ticket: Any) -> Any:
        self.cancelled += 1
        self.events.append("cancel")
        return outcome(True, False, False, reason="deadline")

    def close(self) -> None:
        self.events.append("close")

    def _ticket(self) -> Any:
        found = self.outcomes.pop(0)
        return found and SimpleNamespace(outcome=found)


def ready(store: Any, meter: StepMeter, *objects: PageObject, groups: int = 1) -> WorkerSide:
    """Returns a worker that holds `objects` of each page, by default the object `FIRST`, in an
    engine with `groups` KV cache groups. The objects have no memory.
    """
    made = WorkerSide(store, 8, [([], 2)] * groups, meter)
    held = list(objects) or [held_object(FIRST)]
    made._held = HeldObjects(
        identity(),
        [[one for one in held if one.object_id.group == group] for group in range(groups)],
    )
    return made


def held_object(object_id: ObjectId, *, is_writer: bool = True) -> PageObject:
    pool: Any = SimpleNamespace(page_bytes=4096, pages=list)
    return PageObject(object_id, pool, is_writer)


def loading(*names: str, asynchronous: bool = False) -> StepMetadata:
    loads = [Load(name, [PageBlocks(0, 4, KEYS, (10, 11, 12))], asynchronous) for name in names]
    saves = [Save(name, PageBlocks(0, 7, KEYS[:1], (13,), KEYS[2:])) for name in names]
    return StepMetadata(None, loads, saves)


def saving(name: str, *keys: bytes) -> StepMetadata:
    return StepMetadata(
        None, (), [Save(name, PageBlocks(0, 0, keys, tuple(range(1, len(keys) + 1))))]
    )
