"""Saves of steps in which other connectors fill blocks.

vLLM tells which blocks a load did not fill when the step that used them is over, and only the
scheduler's side hears it of all connectors and workers. Invariants:
* A save leaves `plan` only when every step up to the one that filled its pages, in which a load
  was waited for, is known to be over, and no block of its request was reported as not filled.
* A save leaves only while its blocks still belong to its request: vLLM keeps them for a finished
  request of which `holds` was true, until a worker reports the request as sent.
* Without such loads saves leave in their own step.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ritornello.vllm.metadata import Save

Table = Sequence[Sequence[int]]


class Tables(Protocol):
    """What is used of vLLM's KV cache manager."""

    @property
    def block_pool(self) -> Any: ...

    def get_block_ids(self, request_id: str, /) -> Table: ...


class Step(Protocol):
    """What is used of a SchedulerOutput."""

    num_scheduled_tokens: Mapping[str, int]


@dataclass(slots=True)
class Unconfirmed:
    """A step whose outcome is not known. `loads`: it waits for loads. `tables`: block tables of its
    requests.
    """

    number: int
    loads: bool
    saves: list[Save]
    tables: dict[str, Table]


@dataclass(slots=True)
class Work:
    """For one step: `saves` that leave, its `number` (0 where its outcome needs no report), and the
    finished requests whose blocks are free when it is over.
    """

    saves: list[Save] = field(default_factory=list)
    number: int = 0
    sent: tuple[str, ...] = ()


@dataclass(slots=True)
class Verdict:
    """Of a step that is over: saves that are dropped, and blocks that hold nothing of use, with all
    behind them in their requests.
    """

    dropped: list[Save] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)


class Confirmation:
    def __init__(self) -> None:
        self._number = 0
        # The first of them waits for loads.
        self._steps: deque[Unconfirmed] = deque()
        self._ready: list[Save] = []
        self._leaving: set[str] = set()

    def plan(self, step: Step, saves: Sequence[Save], tables: Tables) -> Work:
        """What leaves with a step that fills the pages of `saves`."""
        ready, self._ready = self._ready, []
        work = Work([kept for save in ready if (kept := _current(save, tables)) is not None])
        # A vLLM that does not say so may load in every step.
        loads = bool(getattr(step, "has_sync_kv_loads", True))
        if loads or self._steps:
            self._number += 1
            work.number = self._number
            held = {name: tables.get_block_ids(name) for name in step.num_scheduled_tokens}
            self._steps.append(Unconfirmed(work.number, loads, list(saves), held))
        else:
            work.saves += saves
        waiting = {save.request for save in self._pending()}
        work.sent = tuple(sorted(self._leaving - waiting))
        self._leaving &= waiting
        return work

    def over(self, number: int, invalid: Collection[int], failed: Collection[str]) -> Verdict:
        """Steps up to `number` are over. `invalid`: blocks that were not filled; `failed`: requests
        whose load failed, where blocks are not told.
        """
        verdict = Verdict()
        if invalid or failed:
            self._drop(verdict, {*invalid}, {*failed})
        while self._steps and (self._steps[0].number <= number or not self._steps[0].loads):
            self._ready += self._steps.popleft().saves
        return verdict

    def holds(self, request_id: str, tables: Tables) -> bool:
        """Whether vLLM is to keep the blocks of a request that has finished."""
        mine = [save for save in (*self._pending(), *self._ready) if save.request == request_id]
        if all(_current(save, tables) is None for save in mine):
            self.discard(request_id)
            return False
        self._leaving.add(request_id)
        return True

    def discard(self, request_id: str) -> None:
        """The request has other blocks than before, or none."""
        self._filter(lambda save: save.request != request_id)

    def clear(self) -> None:
        """Nothing that was computed until now is saved."""
        self._filter(lambda _: False)

    def _pending(self) -> Iterator[Save]:
        for step in self._steps:
            yield from step.saves

    def _filter(self, keep: "Predicate") -> None:
        self._ready = [save for save in self._ready if keep(save)]
        for step in self._steps:
            step.saves = [save for save in step.saves if keep(save)]

    def _drop(self, verdict: Verdict, invalid: set[int], failed: set[str]) -> None:
        """Steps that are already under way go on with what they were given: all of them count, and
        so does what was about to leave.
        """
        bad = set(failed)
        for step in self._steps:
            for name, table in step.tables.items():
                for blocks in table:
                    place = next((i for i, block in enumerate(blocks) if block in invalid), None)
                    if place is not None:
                        bad.add(name)
                        verdict.stale.update(blocks[place:])
        for save in (*self._ready, *self._pending()):
            if save.request in bad or not invalid.isdisjoint(save.pages.blocks):
                bad.add(save.request)
                verdict.dropped.append(save)
        self._filter(lambda save: save.request not in bad)


class Predicate(Protocol):
    def __call__(self, save: Save, /) -> bool: ...


def _current(save: Save, tables: Tables) -> Save | None:
    """What of a save still lies in its request's blocks. A window leaves its first blocks behind,
    as null blocks; anything else means that the request was preempted.
    """
    pages, null = save.pages, tables.block_pool.null_block.block_id
    table = tables.get_block_ids(save.request)
    now = tuple(table[pages.part][pages.first : pages.first + len(pages.blocks)]) if table else ()
    gone = 0
    while gone < len(now) and now[gone] == null != pages.blocks[gone]:
        gone += 1
    if gone == len(pages.blocks) or now[gone:] != tuple(pages.blocks[gone:]):
        return None
    if not gone:
        return save
    left = pages._replace(
        first=pages.first + gone, keys=pages.keys[gone:], blocks=pages.blocks[gone:]
    )
    return save._replace(pages=left)
