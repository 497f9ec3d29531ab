"""Replaces methods of the connector: records digests of blocks, evicts pages before their load, and
makes loads fail or slow.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from ritornello.vllm.metadata import Load, PageBlocks, StepMetadata
from ritornello.vllm.step_results import StepResults
from ritornello.vllm.store import PromptLength, VllmStore
from ritornello.vllm.transfer import LoadResult, PendingLoad
from ritornello.vllm.worker import LOAD_SECONDS, WorkerSide


def worker_of(results: StepResults) -> WorkerSide:
    """Returns the `WorkerSide` of this process that reports its work in `results`."""
    group = get_kv_transfer_group()
    sides = [
        getattr(getattr(one, "data_path", None), "_worker", None)
        for one in getattr(group, "_connectors", [group])
    ]
    return next(side for side in sides if side is not None and side.results is results)


def digests(worker: WorkerSide, pages: PageBlocks) -> Iterator[tuple[bytes, int, str]]:
    """Yields key, cache group and digest of each block. A digest covers the block in all layers of
    the group. The bytes are read through torch, not through the pools that loads and saves use.
    """
    for key, block in zip(pages.keys, pages.blocks, strict=True):
        found = hashlib.sha256()
        for name in worker._shard.memory[pages.group].layers:
            cache: Any = worker._shard.caches[name]
            found.update(cache[block].contiguous().view(torch.uint8).numpy().tobytes())
        yield key, pages.group, found.hexdigest()


class Digests:
    """Digests of blocks by key and cache group, at each save and after each load. A key may have
    several digests at save, because a recomputed page may differ in its last bits and is offered
    to the store again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: dict[tuple[bytes, int], set[str]] = {}
        self.loaded: dict[tuple[bytes, int], str] = {}
        save, record = WorkerSide.save, StepResults.record_load

        def watched_save(worker: WorkerSide, metadata: StepMetadata) -> None:
            if not worker.step_loads.failed:
                for work in metadata.saves:
                    for key, name, found in digests(worker, work.pages):
                        self.saved.setdefault((key, name), set()).add(found)
            save(worker, metadata)

        def watched_record(
            results: StepResults, load: Load, landing: LoadResult, seconds: float
        ) -> bool:
            worker = worker_of(results)
            bad = {(group, block) for group, _, block in landing.unfilled}
            for work in load.pages:
                for (key, name, found), block in zip(
                    digests(worker, work), work.blocks, strict=True
                ):
                    if (work.group, block) not in bad:
                        self.loaded[key, name] = found
            return record(results, load, landing, seconds)

        monkeypatch.setattr(WorkerSide, "save", watched_save)
        monkeypatch.setattr(StepResults, "record_load", watched_record)

    def all_came_back(self) -> bool:
        """Returns whether every loaded block equals a block that was saved under its key."""
        return all(found in self.saved.get(key, ()) for key, found in self.loaded.items())


class BadOutcome:
    """The outcome of a get, derived from the outcome `good`: the pages at the indices `bad` failed
    too.
    """

    def __init__(self, good: Any, bad: Sequence[int]) -> None:
        self.ok = [ok and place not in bad for place, ok in enumerate(good.ok)]
        self.pages = min(bad)
        self.bytes = good.bytes
        self.seconds = good.seconds
        self.reason = "checksum"


class BadTicket:
    def __init__(self, ticket: Any, bad: Sequence[int]) -> None:
        self._ticket, self._bad = ticket, bad

    def done(self) -> bool:
        return bool(self._ticket.done())

    def cancel(self) -> None:
        self._ticket.cancel()

    def wait_section(self, number: int, timeout: float | None = None) -> bool:
        return bool(self._ticket.wait_section(number, timeout))

    def wait(self, timeout: float | None = None) -> BadOutcome:
        return BadOutcome(self._ticket.wait(60), self._bad)


def fail_loads(monkeypatch: pytest.MonkeyPatch, worker_pages: Sequence[int]) -> None:
    """Makes every load report the pages with the indices `worker_pages` as failed, and fills their
    blocks with the number 7.
    """
    get, record = VllmStore.submit_get, StepResults.record_load

    def failing(store: VllmStore, *asked: Any) -> Any:
        return BadTicket(get(store, *asked), worker_pages)

    def noisy(results: StepResults, load: Load, landing: LoadResult, seconds: float) -> bool:
        caches = worker_of(results)._shard.caches
        for _, _, block in landing.unfilled:
            for cache in caches.values():
                tensor: Any = cache
                tensor[block].fill_(7.0)
        return record(results, load, landing, seconds)

    monkeypatch.setattr(VllmStore, "submit_get", failing)
    monkeypatch.setattr(StepResults, "record_load", noisy)


def spoil_drafts(monkeypatch: pytest.MonkeyPatch, layers: Sequence[str]) -> None:
    """Fills the loaded blocks of `layers` with noise after every load, and reports the load
    unchanged.
    """
    record = StepResults.record_load

    def spoiled(results: StepResults, load: Load, landing: LoadResult, seconds: float) -> bool:
        caches = worker_of(results)._shard.caches
        for pages in load.pages:
            for name in layers:
                tensor: Any = caches[name]
                for block in pages.blocks:
                    tensor[block].normal_()
        return record(results, load, landing, seconds)

    monkeypatch.setattr(StepResults, "record_load", spoiled)


def slow_loads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Makes every asynchronous load look unfinished for `seconds`."""
    landed = PendingLoad.poll

    def late(arrival: PendingLoad, now: float) -> LoadResult | None:
        begun = arrival._deadline - LOAD_SECONDS
        return None if now < begun + seconds else landed(arrival, now)

    monkeypatch.setattr(PendingLoad, "poll", late)


def evict_after_match(monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """Releases the lease of every lookup that finds more than `keep` pages, and deletes the found
    pages after the first `keep`, as an eviction between lookup and load would.
    """
    lookup = VllmStore.lookup

    def forgetful(
        store: VllmStore,
        identity: Any,
        object_ids: Any,
        keys: Any,
        ttl: float,
        prompt: PromptLength,
    ) -> Any:
        found = lookup(store, identity, object_ids, keys, ttl, prompt)
        if found is not None and found.pages > keep and store._store is not None:
            store.release(found.lease)
            for object_id in object_ids:
                store._store.delete(identity.scope(object_id), list(keys[keep : found.pages]))
        return found

    monkeypatch.setattr(VllmStore, "lookup", forgetful)
