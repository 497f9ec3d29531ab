"""Defers saves inside MultiConnector until it is known whether the other connectors' loads
succeeded.

vLLM reports the blocks that a load failed to fill after the step that read them, and only the
scheduler's side sees the reports of all connectors and workers. A load is synchronous if a step
waits for it. Invariants:
* `plan` returns a save only after vLLM has reported every step with synchronous loads up to the
  step that filled the save's pages, and only if no block of the save's request failed to load.
* `plan` returns a save only while its request still holds the blocks. vLLM keeps the blocks of a
  finished request for which `keeps_blocks` returned true until all workers have reported the
  request as sent.
* Saves are not deferred while no step with synchronous loads is pending.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ritornello.vllm.metadata import Save
from ritornello.vllm.request_state import CacheManager, Step

Table = Sequence[Sequence[int]]


@dataclass(slots=True)
class PendingStep:
    """A step whose outcome is unknown. `loads`: the step has synchronous loads. `tables`: block
    tables of its requests.
    """

    number: int
    loads: bool
    saves: list[Save]
    tables: dict[str, Table]


@dataclass(slots=True)
class StepSaves:
    """The work of one step: `saves` to execute; the step's `number`, which the workers report when
    the step has ended (0: they report no number); and finished requests whose blocks vLLM may free
    after the step.
    """

    saves: list[Save] = field(default_factory=list)
    number: int = 0
    finished_sending: tuple[str, ...] = ()


@dataclass(slots=True)
class StepResult:
    """Effects of the outcome of a step. `dropped`: cancelled saves. `stale`: blocks that failed to
    load, and the blocks after them in each request, which were computed on top of them.
    """

    dropped: list[Save] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)


class DeferredSaves:
    """Saves that wait for the outcome of loads."""

    def __init__(self) -> None:
        self._number = 0
        # Steps without an outcome, in order. Invariant: the first of them has synchronous loads.
        self._steps: deque[PendingStep] = deque()
        self._ready: list[Save] = []
        self._leaving: set[str] = set()
        self._null = -1

    def plan(self, step: Step, saves: Sequence[Save], tables: CacheManager) -> StepSaves:
        """Returns the saves that the workers execute with `step`. `saves`: saves of the pages that
        `step` fills.
        """
        ready, self._ready = self._ready, []
        self._null = tables.block_pool.null_block.block_id
        work = StepSaves([kept for save in ready if (kept := _current(save, tables)) is not None])
        # In a vLLM whose steps lack `has_sync_kv_loads`, every step may have synchronous loads.
        loads = bool(getattr(step, "has_sync_kv_loads", True))
        if loads or self._steps:
            self._number += 1
            work.number = self._number
            held = {name: tables.get_block_ids(name) for name in step.num_scheduled_tokens}
            self._steps.append(PendingStep(work.number, loads, list(saves), held))
        else:
            work.saves += saves
        waiting = {save.request for save in self._pending()}
        work.finished_sending = tuple(sorted(self._leaving - waiting))
        self._leaving &= waiting
        return work

    def complete_steps(
        self, number: int, invalid: Collection[int], failed: Collection[str]
    ) -> StepResult:
        """Takes the outcome of all steps up to `number`. Makes the remaining saves of these steps,
        and of later steps up to the next step with synchronous loads, ready for the next `plan`.
        `invalid`: blocks that failed to load. `failed`: requests whose load failed, if vLLM does
        not report the failed blocks.
        """
        result = StepResult()
        if invalid or failed:
            self._drop(result, {*invalid}, {*failed})
        while self._steps and (self._steps[0].number <= number or not self._steps[0].loads):
            self._ready += self._steps.popleft().saves
        return result

    def keeps_blocks(self, request_id: str, tables: CacheManager) -> bool:
        """Returns whether vLLM must keep the blocks of a finished request for its saves. If not,
        drops these saves.
        """
        saves = [save for save in (*self._pending(), *self._ready) if save.request == request_id]
        if all(_current(save, tables) is None for save in saves):
            self.drop_request(request_id)
            return False
        self._leaving.add(request_id)
        return True

    def drop_request(self, request_id: str) -> None:
        """Drops the saves of a request whose blocks changed."""
        self._filter(lambda save: save.request != request_id)

    def clear(self) -> None:
        """Drops all deferred saves."""
        self._filter(lambda _: False)

    def _pending(self) -> Iterator[Save]:
        for step in self._steps:
            yield from step.saves

    def _filter(self, keep: Callable[[Save], bool]) -> None:
        self._ready = [save for save in self._ready if keep(save)]
        for step in self._steps:
            step.saves = [save for save in step.saves if keep(save)]

    def _drop(self, result: StepResult, invalid: set[int], failed: set[str]) -> None:
        """Drops all saves of failed requests, and of requests that hold a block that failed to load
        or was computed on top of such a block. Steps that began after the failed load may save the
        same blocks, so their saves are dropped too. Adds the dropped saves and the blocks to
        `result`.
        """
        bad = set(failed)
        tables = [(name, table) for step in self._steps for name, table in step.tables.items()]
        result.stale = stale_blocks([table for _, table in tables], invalid, self._null)
        stale = result.stale | invalid
        bad |= {name for name, table in tables if not stale.isdisjoint(chain(*table))}
        for save in (*self._ready, *self._pending()):
            if save.request in bad or not stale.isdisjoint(save.pages.blocks):
                bad.add(save.request)
                result.dropped.append(save)
        self._filter(lambda save: save.request not in bad)


def stale_blocks(tables: Sequence[Table], invalid: Collection[int], null: int) -> set[int]:
    """Returns the blocks of `tables` that failed to load (`invalid`), and all blocks of `tables`
    that were computed on top of such blocks, even by requests that no longer hold the failed block
    because it has left their sliding window. `null`: the block that vLLM lists in place of a block
    that has left a window.
    """
    stale: set[int] = set()
    bad, grows = set(invalid), True
    while grows:
        grows = False
        for table in tables:
            for blocks in table:
                index = next((i for i, block in enumerate(blocks) if block in bad), None)
                found = set() if index is None else {*blocks[index:]} - stale - {null}
                stale |= found
                grows |= bool(found)
        bad |= stale
    return stale


def _current(save: Save, tables: CacheManager) -> Save | None:
    """Returns the part of a save whose blocks the request still holds; None if the request was
    preempted, or all blocks have left its sliding window. vLLM lists the null block in place of
    blocks that have left a window.
    """
    pages, null = save.pages, tables.block_pool.null_block.block_id
    table = tables.get_block_ids(save.request)
    now = tuple(table[pages.group][pages.first : pages.first + len(pages.blocks)]) if table else ()
    null_count = 0
    while null_count < len(now) and now[null_count] == null != pages.blocks[null_count]:
        null_count += 1
    if null_count == len(pages.blocks) or now[null_count:] != tuple(pages.blocks[null_count:]):
        return None
    if not null_count:
        return save
    left = pages._replace(
        first=pages.first + null_count,
        keys=pages.keys[null_count:],
        blocks=pages.blocks[null_count:],
    )
    return save._replace(pages=left)
