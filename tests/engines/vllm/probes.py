"""What the tests see and break at the connector's seams: digests of blocks, failing loads."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ritornello.vllm.metadata import StepMetadata
from ritornello.vllm.store import QuietStore
from ritornello.vllm.worker import WorkerSide


def digest(worker: WorkerSide, block: int) -> str:
    """Of the bytes of one block in all layers, read through torch and not through the pool."""
    found = hashlib.sha256()
    for name in sorted(worker._caches):
        cache: Any = worker._caches[name]
        found.update(cache[block].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Digests:
    """Block digests by key: at save (a page that is computed again may differ in its last bits
    and is offered again), and after load.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: dict[bytes, set[str]] = {}
        self.loaded: dict[bytes, str] = {}
        save, load = WorkerSide.save, WorkerSide.load

        def watched_save(worker: WorkerSide, metadata: StepMetadata) -> None:
            if not worker._spoilt:
                for work in metadata.saves:
                    for key, block in zip(work.keys, work.blocks, strict=True):
                        self.saved.setdefault(key, set()).add(digest(worker, block))
            save(worker, metadata)

        def watched_load(worker: WorkerSide, metadata: StepMetadata) -> None:
            load(worker, metadata)
            for work in metadata.loads:
                for key, block in zip(work.keys, work.blocks, strict=True):
                    if block not in worker._failed:
                        self.loaded[key] = digest(worker, block)

        monkeypatch.setattr(WorkerSide, "save", watched_save)
        monkeypatch.setattr(WorkerSide, "load", watched_load)

    def all_came_back(self) -> bool:
        """Whether every loaded block is, byte for byte, one that was saved under its key."""
        return all(found in self.saved.get(key, ()) for key, found in self.loaded.items())


class BadOutcome:
    """An outcome in which some pages did not come."""

    def __init__(self, good: Any, bad: Sequence[int]) -> None:
        self.ok = [ok and place not in bad for place, ok in enumerate(good.ok)]
        self.pages = min(bad)
        self.bytes = good.bytes
        self.seconds = good.seconds
        self.reason = "checksum"


class BadTicket:
    def __init__(self, ticket: Any, bad: Sequence[int]) -> None:
        self._ticket, self._bad = ticket, bad

    def wait(self, timeout: float | None = None) -> BadOutcome:
        return BadOutcome(self._ticket.wait(60), self._bad)


def fail_loads(monkeypatch: pytest.MonkeyPatch, worker_pages: Sequence[int]) -> None:
    """Every load says that these of its pages failed, after filling their blocks with noise."""
    get = QuietStore.submit_get

    def failing(store: QuietStore, identity: Any, keys: Any, out: Any, timeout: float) -> Any:
        return BadTicket(get(store, identity, keys, out, timeout), worker_pages)

    load = WorkerSide.load

    def noisy(worker: WorkerSide, metadata: StepMetadata) -> None:
        load(worker, metadata)
        for block in worker._failed:
            for cache in worker._caches.values():
                tensor: Any = cache
                tensor[block].fill_(7.0)

    monkeypatch.setattr(QuietStore, "submit_get", failing)
    monkeypatch.setattr(WorkerSide, "load", noisy)


def evict_after_match(monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """What a match promised beyond its first `keep` pages is gone before it can be loaded."""
    match = QuietStore.match

    def forgetful(store: QuietStore, identity: Any, keys: Any, ttl: float) -> Any:
        found = match(store, identity, keys, ttl)
        if found is not None and found.pages > keep and store._store is not None:
            pages = found.pages
            store.release(found.lease)
            store._store.delete(identity.scope(), list(keys[keep:pages]))
            return Promise(pages, found.lease)
        return found

    monkeypatch.setattr(QuietStore, "match", forgetful)


class Promise:
    """A match whose lease is gone."""

    def __init__(self, pages: int, lease: int) -> None:
        self.pages, self.lease = pages, lease
