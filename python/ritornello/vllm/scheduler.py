"""The scheduler's side: which pages a request may load, and which are ready to be saved.

Invariants:
* A page is claimed only under a lease; the lease goes to the worker with the load, or is
  released here when the load does not happen.
* The last token of a request is never claimed: the engine must compute something to answer.
* `Tracked.saved` leading pages of a request are in the store or on their way to it. It only
  grows within an admission, except when the worker reports a save that did not happen.
* One step is in flight at a time (`support` refuses others), so everything known of a step is
  known before the next one is planned.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic, time
from typing import Any, Protocol

from ritornello.vllm.identity import Identity, new_epoch
from ritornello.vllm.metadata import IDLE, Load, Save, StepMetadata, WorkerReport
from ritornello.vllm.meter import Meter
from ritornello.vllm.settings import Wishes
from ritornello.vllm.store import QuietStore

logger = logging.getLogger("vllm.ritornello")

# Covers the rest of the step that claims the pages and the load's own deadline; a waiting request
# whose lease is half used up is matched again.
LEASE_SECONDS = 60.0


class Request(Protocol):
    """What is used of a vLLM request."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_computed_tokens: int
    skip_reading_prefix_cache: bool
    kv_transfer_params: Mapping[str, Any] | None


class BlockPool(Protocol):
    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int: ...


class CacheManager(Protocol):
    """What is used of vLLM's KV cache manager."""

    block_pool: BlockPool

    def get_block_ids(self, request_id: str, /) -> Sequence[Sequence[int]]: ...
    def evict_blocks(self, block_ids: set[int], /) -> None: ...


class Step(Protocol):
    """What is used of a SchedulerOutput."""

    num_scheduled_tokens: Mapping[str, int]


@dataclass(slots=True)
class Held:
    """What the store has of a request: the first `pages` of the `asked` keys, under a lease that
    is good until `until`. The engine itself had the first `local` pages when it asked.
    """

    lease: int
    pages: int
    asked: int
    local: int
    until: float


@dataclass(slots=True)
class Tracked:
    request: Request
    wishes: Wishes
    held: Held | None = None
    saved: int = 0


class SchedulerSide:
    def __init__(
        self, store: QuietStore, identity: Identity, read_only: bool, meter: Meter
    ) -> None:
        self._store = store
        self._identity = identity
        self._tokens = identity.page_tokens
        self._read_only = read_only
        self._meter = meter
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._cache: CacheManager | None = None
        # Either ends hits and saves: the worker's for good (it says so once), the other until a
        # clean reset.
        self._worker_refused = False
        self._reset_unclean = False

    def bind(self, cache: CacheManager) -> None:
        self._cache = cache

    def matched_tokens(self, request: Request, computed: int) -> int:
        """Tokens that can be loaded beyond the first `computed`, in whole pages. May be called
        many times for a request that waits; the store is asked again only when the answer may
        have changed.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            tracked = Tracked(request, Wishes.of(request.kv_transfer_params))
            self._tracked[request.request_id] = tracked
        if self._silent() or computed % self._tokens:
            return 0
        claimable = min((request.num_tokens - 1) // self._tokens, len(request.block_hashes))
        held = self._hold(tracked, claimable)
        if held is None:
            return 0
        held.local = computed // self._tokens
        if not tracked.wishes.loads or request.skip_reading_prefix_cache:
            return 0
        return max(held.pages - held.local, 0) * self._tokens

    def admitted(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """The request runs in the coming step, `external` of its tokens to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        held, tracked.held = tracked.held, None
        # What the store lacks of the engine's own prefix is saved again with the rest.
        tracked.saved = held.pages if held else 0
        if tracked.wishes.retain and tracked.saved:
            # A put of the last page that is there retains all before it.
            tracked.saved -= 1
        if held is None:
            return
        pages = external // self._tokens
        end = held.local + pages
        self._meter.add("probed_pages", max(held.asked - held.local, 0))
        self._meter.add("hit_pages", pages)
        self._count_misses(tracked, held, pages)
        if not pages:
            self._store.release(held.lease)
            return
        self._loads.append(
            Load(
                request.request_id,
                held.local,
                tuple(request.block_hashes[held.local : end]),
                tuple(blocks[held.local : end]),
                held.lease,
            )
        )

    def plan(self, step: Step) -> StepMetadata:
        """The loads and saves of the step that is about to run."""
        loads, self._loads = self._loads, []
        saves = () if self._read_only or self._silent() else self._saves(step)
        if not loads and not saves:
            return IDLE
        return StepMetadata(self._identity, loads, saves)

    def finished(self, request_id: str) -> None:
        """Answered or aborted."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._release(tracked)

    def reported(self, report: WorkerReport | None, invalid_blocks: set[int]) -> None:
        """What the step came to, before the next one is planned."""
        if report is not None:
            if report.refusal:
                self._refuse(report.refusal)
            for request_id, first in report.unsaved:
                tracked = self._tracked.get(request_id)
                if tracked is not None:
                    tracked.saved = min(tracked.saved, first)
        if invalid_blocks:
            self._forget(invalid_blocks)

    def reset(self) -> bool:
        """From now on nothing stored before is found: a new random epoch. Where the engine's own
        cache was not emptied first (blocks are in use), its blocks belong to the old epoch and
        could be saved under the new one by mistake: then nothing is served until a reset that
        finds them all free.
        """
        self._identity = replace(self._identity, epoch=new_epoch())
        for tracked in self._tracked.values():
            self._release(tracked)
        pool = self._cache.block_pool if self._cache is not None else None
        # One block is vLLM's null block, never free.
        clean = pool is None or pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1
        self._reset_unclean = not clean
        if not clean:
            logger.warning(
                "ritornello: the cache was reset while blocks were in use; "
                "neither hits nor saves until a reset finds the engine idle"
            )
        return clean

    def close(self) -> None:
        for tracked in self._tracked.values():
            self._release(tracked)
        self._store.close()

    def _hold(self, tracked: Tracked, claimable: int) -> Held | None:
        """Matches from the very first page, also what the engine has itself: one question tells
        what to load, what is missing before it, and keeps the prefix recent in the store.
        """
        held = tracked.held
        if held is not None and held.asked == claimable and monotonic() < held.until:
            return held
        self._release(tracked)
        if not claimable:
            return None
        until = monotonic() + LEASE_SECONDS / 2
        keys = tuple(tracked.request.block_hashes[:claimable])
        match = self._store.match(self._identity, keys, LEASE_SECONDS)
        if match is None:
            return None
        tracked.held = Held(match.lease, match.pages, claimable, 0, until)
        return tracked.held

    def _release(self, tracked: Tracked) -> None:
        held, tracked.held = tracked.held, None
        if held is not None:
            self._store.release(held.lease)

    def _saves(self, step: Step) -> Sequence[Save]:
        saves: list[Save] = []
        for request_id, scheduled in step.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.wishes.stores:
                continue
            request = tracked.request
            # A page is full when its tokens are computed, and known (a hash covers them).
            full = (request.num_computed_tokens + scheduled) // self._tokens
            full = min(full, len(request.block_hashes))
            first = tracked.saved
            if full <= first or self._cache is None:
                continue
            tracked.saved = full
            saves.append(
                Save(
                    request_id,
                    first,
                    tuple(request.block_hashes[first:full]),
                    tuple(self._cache.get_block_ids(request_id)[0][first:full]),
                    request.block_hashes[first - 1] if first else None,
                    time() + tracked.wishes.retain if tracked.wishes.retain else None,
                )
            )
        return saves

    def _forget(self, invalid_blocks: set[int]) -> None:
        """Takes blocks that failed to load, and all that were computed after them, out of the
        engine's prefix cache. vLLM recomputes them in place, but a request that is preempted or
        aborted before that would leave them to be found by the next one.
        """
        if self._cache is None:
            return
        for request_id in self._tracked:
            blocks = next(iter(self._cache.get_block_ids(request_id)), ())
            for place, block in enumerate(blocks):
                if block in invalid_blocks:
                    self._cache.evict_blocks(set(blocks[place:]))
                    break

    def _count_misses(self, tracked: Tracked, held: Held, pages: int) -> None:
        missed = held.asked - held.local - pages
        if missed > 0:
            declined = not tracked.wishes.loads or tracked.request.skip_reading_prefix_cache
            self._meter.missed("declined" if declined else "absent", missed)

    def _refuse(self, why: str) -> None:
        if not self._worker_refused:
            logger.warning("ritornello: %s; neither hits nor saves", why)
        self._worker_refused = True

    def _silent(self) -> bool:
        return self._worker_refused or self._reset_unclean
