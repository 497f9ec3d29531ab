"""Puts and gets between blocks on the device and stores in memory or on a disk."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benches.gpu_cells.rig import Memory, Rig, Times, timed
from ritornello import DevicePages, DevicePool, Outcome, Scope, Store, Ticket, destroy

PLACES = ("memory", "disk")
# Byte that all blocks hold before a get, so that blocks written by mistake are found.
BLANK = 0x77


@contextmanager
def opened(rig: Rig, place: str, capacity: int) -> Iterator[Store]:
    """Opens a new store of `capacity` bytes, and removes it when the context ends."""
    in_memory = Path(f"/dev/shm/ritornello-gpu-{os.getpid()}")
    folder = in_memory if place == "memory" else rig.folder / "store"
    store = Store.open(folder, capacity)
    try:
        with store:
            yield store
    finally:
        destroy(folder)


@dataclass
class StoredPages:
    """All blocks of `memory` in a random order, as pages of one sequence. `content`: copies of the
    blocks, to which gets are compared.
    """

    rig: Rig
    memory: Memory
    pool: DevicePool
    scope: Scope
    keys: Sequence[bytes]
    blocks: Sequence[int]
    content: Sequence[torch.Tensor]

    @classmethod
    def of(cls, rig: Rig, memory: Memory, name: str) -> "StoredPages":
        pool = rig.pool(memory)
        return cls(
            rig=rig,
            memory=memory,
            pool=pool,
            scope=Scope.opaque(name, pool.page_bytes, chained=True),
            keys=[b"%032d" % page for page in range(memory.blocks)],
            blocks=torch.randperm(memory.blocks).tolist(),
            content=[view.clone() for view in memory.views],
        )

    @property
    def nbytes(self) -> int:
        return len(self.keys) * self.pool.page_bytes

    def put(self, store: Store) -> Times:
        """Puts all pages. Returns the wall-clock and processor seconds until all are stored."""
        pages, stored = self._pages(len(self.keys)), 0
        with timed() as times:
            # A put stores at most as many new pages as half of the pinned memory has room for.
            while stored < len(self.keys):
                ticket = store.submit_put(self.scope, self.keys, pages, after=self.rig.stream())
                if not ticket.order(self.rig.stream()):
                    raise AssertionError("a put did not read its blocks within the timeout")
                outcome = _finished(ticket)
                if outcome.pages <= stored:
                    raise AssertionError(f"a put ended after {stored} pages: {outcome.reason}")
                stored = outcome.pages
        return times

    def get(self, store: Store, count: int) -> Times:
        """Gets the leading `count` pages, and compares all bytes of all blocks. Returns the
        wall-clock and processor seconds of the get.
        """
        for view in self.memory.views:
            view.fill_(BLANK)
        self.rig.finish()
        with timed() as times:
            pages = self._pages(count)
            ticket = store.submit_get(self.scope, self.keys[:count], pages, after=self.rig.stream())
            outcome = _finished(ticket)
        if outcome.pages != count:
            raise AssertionError(f"a get ended after {outcome.pages} pages: {outcome.reason}")
        own, others = (
            torch.tensor(blocks, dtype=torch.int64, device=self.rig.torch_device)
            for blocks in (self.blocks[:count], self.blocks[count:])
        )
        for view, was in zip(self.memory.views, self.content, strict=True):
            if not torch.equal(view[own], was[own]) or not bool((view[others] == BLANK).all()):
                raise AssertionError(f"wrong bytes after a get of {count} pages")
        return times

    def _pages(self, count: int) -> DevicePages:
        return self.pool.pages(self.blocks[:count])


def _finished(ticket: Ticket) -> Outcome:
    outcome = ticket.wait()
    assert outcome is not None
    return outcome
