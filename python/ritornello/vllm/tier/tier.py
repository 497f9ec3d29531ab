"""What the tier does: answers lookups, starts jobs, says how they ended.

Invariants:
* A hit is found under a lease, which goes with the load or is released at the end of the step, so
  that a promised chunk is still there when it is read. Where another process owns the store vLLM
  keeps the answer for as long as requests ask, and gives it without a lease: the chunk may be gone.
* A chunk that was promised and did not come is a miss for that request from then on: the request
  computes it, and does not ask for it in a circle.
* A row of the host tier belongs to a job until the job is reported, and it is reported when the
  kernel is done with it.
* Nothing is stored for a request that began before a reset: its chunks may be of other weights.
* Nothing is promised or stored while the weights are others than those that the epoch began with,
  and a load that ends then came to nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, Protocol

from ritornello.vllm.settings import RequestOptions
from ritornello.vllm.tier.counts import Counts
from ritornello.vllm.tier.jobs import FinishedJob, Job, Jobs, TicketPart
from ritornello.vllm.tier.memory import HostRows
from ritornello.vllm.tier.namespace import Namespace
from ritornello.vllm.tier.sequence import Context, Group, KeySequence, consecutive_runs, group_of
from ritornello.vllm.tier.settings import TierSettings
from ritornello.vllm.tier.store import TierStore
from ritornello.vllm.weights.guard import WeightGuard

if TYPE_CHECKING:
    from ritornello._core import Scope, Ticket

logger = logging.getLogger("vllm.ritornello")

# A lease lives from a lookup to the end of its load; what it covers is kept no longer than this.
LEASE_SECONDS = 60.0
# A load that takes longer is slower than computing.
LOAD_SECONDS = 10.0
# A store keeps chunks of the host tier pinned; it gives up when the disk is this far behind.
STORE_SECONDS = 30.0
# How long a stopping engine waits for its last stores.
CLOSE_SECONDS = 10.0
# Reasons for which the store does not want a page: no failure, and nothing to be slowed down for.
DECLINED_REASONS = frozenset(
    {"admission", "write_budget", "read_only", "no_store", "before_reset", "weights_changed"}
)


class Answer(Enum):
    HIT = auto()
    MISS = auto()
    PENDING = auto()


class Transfer(Protocol):
    """What is used of a vLLM `TransferJob`."""

    job_id: int
    keys: Any
    chunk_ids: Any
    req_context: Any


@dataclass(slots=True)
class RequestState:
    """What is known of a request. `answers` holds for one step. `leases` may be added to by the
    lookup thread at any time.
    """

    options: RequestOptions
    sequences: dict[int, KeySequence]
    answers: dict[bytes, bool] = field(default_factory=dict)
    leases: deque[int] = field(default_factory=deque)
    failed: set[bytes] = field(default_factory=set)


class Tier:
    """Between `store` and the rows of the host tier. `guard`: knows whether the weights changed."""

    def __init__(
        self,
        store: TierStore,
        namespace: Namespace,
        rows: HostRows,
        settings: TierSettings,
        counts: Counts,
        guard: WeightGuard | None = None,
    ) -> None:
        self._store = store
        self._guard = guard
        self._rows: HostRows | None = rows
        self._read_only = settings.store.read_only
        self._counts = counts
        self._namespace = namespace
        self._scopes: dict[int, tuple[Group, Scope]] = {}
        self._set_namespace(namespace)
        self._requests: dict[str, RequestState] = {}
        # Requests with answers or leases of this step.
        self._active_requests: set[str] = set()
        self._jobs = Jobs()
        # The changes of weights that the epoch of a load covers, by number of its job.
        self._covered: dict[int, bytes] = {}
        # Requests that began before the last reset and are not over.
        self._requests_before_reset: set[str] = set()

    # Requests.

    def begin_request(self, context: Context) -> None:
        self._state_of(context)

    def end_request(self, context: Context) -> None:
        """The request is over, answered or aborted; its jobs may still run."""
        asked = self._requests.pop(context.req_id, None)
        self._active_requests.discard(context.req_id)
        self._requests_before_reset.discard(context.req_id)
        if asked is not None:
            self._release(asked)

    # Lookups.

    def lookup(self, key: bytes, context: Context) -> Answer:
        """Whether the chunk can be loaded. Where this process owns the store the first question
        of a request answers for all keys that follow; where it does not, `PENDING` says that
        `batch_lookup` has to find out, on a thread that may wait.
        """
        asked = self._state_of(context)
        answer = asked.answers.get(key)
        if answer is None:
            if not self._may_load(asked, key):
                return Answer.MISS
            if not self._store.answers_at_once():
                return Answer.MISS if self._store.broken else Answer.PENDING
            answer = self._check_workers(asked, key, context)
        return Answer.HIT if answer and key not in asked.failed else Answer.MISS

    def confirm_lookup(self, key: bytes, context: Context, found: bool) -> Answer:
        """The answer `batch_lookup` gave for a key, in the light of what has happened since."""
        asked = self._state_of(context)
        if not found or not self._may_load(asked, key):
            return Answer.MISS
        self._active_requests.add(context.req_id)
        return Answer.HIT

    def batch_lookup(self, keys: Sequence[bytes], context: Context) -> list[bool]:
        """One answer a key, from the lookup thread; waits for the process that owns the store."""
        found = [False] * len(keys)
        for group, scope, places in self._by_group(keys):
            here = [keys[place] for place in places]
            for piece in consecutive_runs(context, group, here):
                for place in places[piece][
                    : self._lease_prefix(scope, here[piece], context.req_id)
                ]:
                    found[place] = True
        return found

    def _may_load(self, asked: RequestState, key: bytes) -> bool:
        return (
            not self._requests_before_reset
            and asked.options.loads
            and key not in asked.failed
            and not self._weights_changed()
        )

    def _weights_changed(self) -> bool:
        return self._guard is not None and self._guard.changed()

    def _check_workers(self, asked: RequestState, key: bytes, context: Context) -> bool:
        known = self._scopes.get(group_of(key))
        if known is None:
            return False
        group, scope = known
        keys = asked.sequences[group.number].following(context, key) if group.chained else [key]
        held = self._lease_prefix(scope, keys, context.req_id)
        self._active_requests.add(context.req_id)
        # What lies behind the first miss is asked for anew if vLLM wants it nevertheless.
        asked.answers.update(zip(keys, [True] * held + [False], strict=False))
        return held > 0

    def _lease_prefix(self, scope: "Scope", keys: Sequence[bytes], request: str) -> int:
        """The leading keys that the store has, from now on under a lease of the request."""
        begun = perf_counter()
        match = self._store.pin_prefix(scope, keys, LEASE_SECONDS)
        self._counts.add("questions")
        self._counts.add("question_seconds", amount=perf_counter() - begun)
        if match is None or not match.pages:
            return 0
        asked = self._requests.get(request)
        if asked is None:
            self._store.release(match.lease)
        else:
            asked.leases.append(match.lease)
        return match.pages

    # Jobs.

    def load(self, transfer: Transfer) -> None:
        """Fills rows of the host tier."""
        context: Context = transfer.req_context
        keys, rows = list(transfer.keys), transfer.chunk_ids.tolist()
        asked, host = self._peek_state(context), self._rows
        # The leases of this step are the load's own from here on.
        leases: list[int] = []
        while asked.leases:
            leases.append(asked.leases.popleft())

        def move(
            group: Group, scope: "Scope", keys: Sequence[bytes], rows: Sequence[int]
        ) -> "Ticket | None":
            if host is None:
                return None
            return self._store.submit_get(scope, keys, host, rows, LOAD_SECONDS)

        if self._weights_changed():
            # Since the chunks were promised.
            parts = [TicketPart(range(len(keys)), None, "weights_changed")]
        else:
            parts = self._start_parts(context, keys, rows, move)
        if self._guard is not None:
            self._covered[transfer.job_id] = self._guard.covered
        self._jobs.add(Job(transfer.job_id, context.req_id, keys, True, parts, leases))

    def save(self, transfer: Transfer) -> None:
        """Stores rows of the host tier; what is stored already is skipped by the store."""
        context: Context = transfer.req_context
        keys, rows = list(transfer.keys), transfer.chunk_ids.tolist()
        asked, host = self._peek_state(context), self._rows
        why = self._store_refusal(asked)
        if why:
            parts = [TicketPart(range(len(keys)), None, why)]
        else:
            wish = asked.options.retain
            until = time() + wish if wish else None

            def move(
                group: Group, scope: "Scope", keys: Sequence[bytes], rows: Sequence[int]
            ) -> "Ticket | None":
                if host is None:
                    return None
                order = asked.sequences[group.number]
                parent = order.predecessor(context, keys[0]) if group.chained else None
                return self._store.submit_put(scope, keys, host, rows, parent, until, STORE_SECONDS)

            parts = self._start_parts(context, keys, rows, move)
        self._jobs.add(Job(transfer.job_id, context.req_id, keys, False, parts))

    def _store_refusal(self, asked: RequestState) -> str:
        if self._read_only:
            return "read_only"
        if not asked.options.stores:
            return "no_store"
        if self._weights_changed():
            return "weights_changed"
        return "before_reset" if self._requests_before_reset else ""

    def _start_parts(
        self,
        context: Context,
        keys: Sequence[bytes],
        rows: Sequence[int],
        move: "Callable[[Group, Scope, Sequence[bytes], Sequence[int]], Ticket | None]",
    ) -> list[TicketPart]:
        parts: list[TicketPart] = []
        unknown = set(range(len(keys)))
        for group, scope, places in self._by_group(keys):
            unknown.difference_update(places)
            here = [keys[place] for place in places]
            for piece in consecutive_runs(context, group, here):
                moved = places[piece]
                ticket = move(group, scope, here[piece], [rows[place] for place in moved])
                parts.append(TicketPart(moved, ticket))
        if unknown:
            parts.append(TicketPart(sorted(unknown), None, "group"))
        return parts

    def take_finished(self) -> list[FinishedJob]:
        """The jobs that ended since the last call."""
        landed = self._jobs.take_finished()
        for done in landed:
            if done.job.load and self._weights_changed_during(done.job.number):
                done.ok = [False] * len(done.ok)
                done.reasons = {"weights_changed": len(done.ok)}
            for lease in done.job.leases:
                self._store.release(lease)
            counted = "failed_chunks" if done.job.load else "skipped_chunks"
            for reason, chunks in done.reasons.items():
                self._counts.add(counted, reason, chunks)
            asked = self._requests.get(done.job.request)
            if done.job.load and asked is not None:
                asked.failed.update(
                    key for key, ok in zip(done.job.keys, done.ok, strict=True) if not ok
                )
        return landed

    def _weights_changed_during(self, load: int) -> bool:
        """Whether weights changed since the load began; a reset may have covered that by now."""
        if self._guard is None:
            return False
        return self._covered.pop(load, None) != self._guard.covered or self._guard.changed()

    def end_step(self) -> None:
        """All loads of this step are submitted: what was promised and not taken up is let go."""
        for request in self._active_requests:
            asked = self._requests.get(request)
            if asked is not None:
                asked.answers.clear()
                self._release(asked)
        self._active_requests.clear()
        self._store.end_step()

    def touch(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        for _, scope, places in self._by_group(keys):
            self._store.touch(scope, [keys[place] for place in places])

    # Ends.

    def reset(self) -> None:
        """Waits for all jobs. vLLM asks for this when its caches are reset (the weights may have
        changed): nothing that was stored before is found from now on, and nothing goes in or out
        until the requests of before are over, for what they computed may be of other weights.
        """
        self._jobs.wait()
        for asked in self._requests.values():
            asked.answers.clear()
            self._release(asked)
        self._active_requests.clear()
        self._requests_before_reset = set(self._requests)
        self._set_namespace(self._namespace.with_new_epoch())

    def on_caches_reset(self) -> None:
        """The engine's prefix cache and its host tier are empty: nothing of weights before is left
        to be stored.
        """
        if self._guard is None:
            return
        reading = self._guard.read()
        if self._guard.differs(reading):
            self._set_namespace(self._namespace.with_new_epoch())
        self._guard.cover(reading)

    def close(self) -> None:
        """Gives up loads, lets the last stores land within a bound, and waits for the kernel to
        be done with the host tier, which vLLM unmaps next.
        """
        self._jobs.cancel(lambda job: job.load)
        if not self._jobs.wait(CLOSE_SECONDS):
            self._jobs.cancel(lambda job: True)
            self._jobs.wait()
        self.take_finished()
        for asked in self._requests.values():
            self._release(asked)
        self._requests.clear()
        self._rows = None
        self._store.close()

    def _set_namespace(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._scopes = {group.number: (group, namespace.scope(group)) for group in namespace.groups}

    def _state_of(self, context: Context) -> RequestState:
        asked = self._peek_state(context)
        self._requests[context.req_id] = asked
        return asked

    def _peek_state(self, context: Context) -> RequestState:
        """What is known of a request; of one that is over, its wishes."""
        asked = self._requests.get(context.req_id)
        if asked is None:
            sequences = {number: KeySequence(group) for number, (group, _) in self._scopes.items()}
            asked = RequestState(
                self._permitted(RequestOptions.parse(context.kv_transfer_params)), sequences
            )
        return asked

    def _permitted(self, options: RequestOptions) -> RequestOptions:
        if not options.retain or self._store.permits_retention():
            return options
        self._counts.add("ignored_retentions")
        return options.without_retention()

    def _release(self, asked: RequestState) -> None:
        while asked.leases:
            self._store.release(asked.leases.popleft())

    def _by_group(self, keys: Sequence[bytes]) -> "Iterable[tuple[Group, Scope, list[int]]]":
        """The places of the keys of each group that this tier knows."""
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(group_of(key), []).append(place)
        for number, found in places.items():
            if number in self._scopes:
                yield *self._scopes[number], found
