"""Answers lookups of chunks (pages of vLLM's host tier), starts jobs and reports their results.

Invariants:
* A chunk that a lookup finds is leased, so that it is still stored when a load reads it. The load
  takes over the lease; without a load the lease is released at the end of the step. Exception: with
  one store that another process owns, vLLM keeps the result of a lookup until the requests that
  asked for the chunk have ended. A later hit by this result has no lease, so the chunk may be
  evicted before the load.
* A chunk that a lookup found and its load did not fill remains a miss for its request: the request
  computes the chunk instead of repeating the lookup.
* A row of the host tier belongs to a job until the job is reported, which happens after the kernel
  has finished with the row.
* After `reset` no chunk is loaded or stored until all requests that began earlier have ended: their
  chunks may belong to earlier weights.
* While the weights differ from the weights at the beginning of the epoch, lookups miss, nothing is
  stored, and a load that ends fails.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Protocol

from ritornello.connector.meter import Meter
from ritornello.vllm.settings import RequestOptions
from ritornello.vllm.tier.cache import TierCache
from ritornello.vllm.tier.cache_lookups import CacheLookups
from ritornello.vllm.tier.decisions import DecisionLog
from ritornello.vllm.tier.host_rows import HostRows
from ritornello.vllm.tier.jobs import FinishedJob, Job, Jobs, TicketPart
from ritornello.vllm.tier.namespace import Namespace
from ritornello.vllm.tier.requests import LookupAnswer, RequestState
from ritornello.vllm.tier.sequence import (
    Context,
    Group,
    KeySequence,
    chunk_number,
    consecutive_runs,
    group_of,
)
from ritornello.vllm.tier.settings import TierSettings
from ritornello.vllm.tier.store import TierStore
from ritornello.vllm.tier.store_lookups import StoreLookups
from ritornello.vllm.weights.guard import WeightGuard

if TYPE_CHECKING:
    from ritornello._core import Scope, Ticket

logger = logging.getLogger("vllm.ritornello")

# Maximum time that a stopping engine waits for its last puts.
CLOSE_SECONDS = 10.0
# Reasons for which the store or this tier refuses a page, without a failure: vLLM does not have to
# back off.
REFUSAL_REASONS = frozenset(
    {"admission", "write_budget", "read_only", "no_store", "before_reset", "weights_changed"}
)


class Transfer(Protocol):
    """The part of a vLLM `TransferJob` that the tier uses."""

    job_id: int
    keys: Any
    chunk_ids: Any
    req_context: Any


class Tier:
    """Moves chunks between `store`, which may be a cache over several tiers, and the host tier.
    `guard`: knows whether the weights changed.
    """

    def __init__(
        self,
        store: TierStore | TierCache,
        namespace: Namespace,
        rows: HostRows,
        settings: TierSettings,
        meter: Meter,
        guard: WeightGuard | None = None,
    ) -> None:
        self._store = store
        self._guard = guard
        self._rows: HostRows | None = rows
        self._read_only = settings.store.read_only
        self._meter = meter
        self._namespace = namespace
        self._scopes: dict[int, tuple[Group, Scope]] = {}
        self._set_namespace(namespace)
        self._requests: dict[str, RequestState] = {}
        self._decisions = decisions = DecisionLog(store)
        self._lookups: StoreLookups | CacheLookups
        if isinstance(store, TierCache):
            self._lookups = CacheLookups(store, self._groups, namespace.row_bytes, meter, decisions)
        else:
            self._lookups = StoreLookups(store, self._requests, meter, decisions)
        # Requests with answers or leases of this step.
        self._active_requests: set[str] = set()
        self._jobs = Jobs()
        # By job number of a load: `WeightGuard.covered`, the counts of weight changes when the
        # epoch began in which the load was started.
        self._covered: dict[int, bytes] = {}
        # Unfinished requests that began before the last reset.
        self._requests_before_reset: set[str] = set()

    # Requests.

    def begin_request(self, context: Context) -> None:
        self._state_of(context)
        self._decisions.begin_request(context)

    def end_request(self, context: Context) -> None:
        """Ends an answered or aborted request; its jobs may still run."""
        state = self._requests.pop(context.req_id, None)
        self._active_requests.discard(context.req_id)
        self._requests_before_reset.discard(context.req_id)
        self._decisions.end_request(context.req_id)
        if state is not None:
            self._lookups.forget(state)
            self._release(state)

    # Lookups.

    @property
    def has_tiers(self) -> bool:
        """Whether the store is a cache over several tiers."""
        return isinstance(self._store, TierCache)

    def lookup(self, key: bytes, context: Context) -> LookupAnswer:
        """Returns whether the chunk can be loaded. `PENDING`: with several tiers, the lookup must
        be repeated in a later step; otherwise `batch_lookup`, on a thread that may block, finds the
        answer.
        """
        state = self._state_of(context)
        answer = state.answers.get(key)
        if answer is None:
            known = self._scopes.get(group_of(key))
            if known is None:
                return LookupAnswer.MISS
            if refusal := self._load_refusal(state, key):
                self._decisions.record_refusal(state, context, *known, key, refusal)
                return LookupAnswer.MISS
            found = self._lookups.find(state, *known, key, context)
            if found is LookupAnswer.PENDING:
                return found
            self._active_requests.add(context.req_id)
            answer = found is LookupAnswer.HIT
        return LookupAnswer.HIT if answer and key not in state.failed else LookupAnswer.MISS

    def confirm_lookup(self, key: bytes, context: Context, found: bool) -> LookupAnswer:
        """Returns the answer for a chunk after `batch_lookup`: a hit if `batch_lookup` has `found`
        the chunk, and the chunk may still be loaded.
        """
        state, refusal = self._state_of(context), ""
        if found and not (refusal := self._load_refusal(state, key)):
            self._active_requests.add(context.req_id)
            return LookupAnswer.HIT
        if (known := self._scopes.get(group_of(key))) is not None:
            if refusal:
                self._decisions.record_refusal(state, context, *known, key, refusal)
            else:
                self._decisions.record_shared_miss(state, context, *known, key)
        return LookupAnswer.MISS

    def batch_lookup(self, keys: Sequence[bytes], context: Context) -> list[bool]:
        """Returns, for each key, whether its chunk is stored and leased for the request; with
        several tiers False, because only `lookup` asks them. Runs on vLLM's lookup thread; waits
        for the owner of the store.
        """
        if isinstance(self._lookups, CacheLookups):
            return [False] * len(keys)
        return self._lookups.batch_lookup(keys, self._by_group(keys), context)

    def _load_refusal(self, state: RequestState, key: bytes) -> str:
        """Returns why the chunk must not be loaded, in one word; "" if it may be loaded."""
        if self._requests_before_reset:
            return "before_reset"
        if not state.options.loads:
            return "opted_out"
        if key in state.failed:
            return "load_failed"
        return "weights_changed" if self._weights_changed() else ""

    def _weights_changed(self) -> bool:
        return self._guard is not None and self._guard.changed()

    # Jobs.

    def load(self, transfer: Transfer) -> None:
        """Starts a job that fills the rows of `transfer` in the host tier from the store."""
        context: Context = transfer.req_context
        keys, state = list(transfer.keys), self._peek_state(context)
        # The load takes over the leases that lookups of its request acquired and that are not
        # released yet.
        leases: list[Any] = []
        while state.leases:
            leases.append(state.leases.popleft())
        decision = None
        if isinstance(self._lookups, CacheLookups):
            decision = self._lookups.take_decision(state, keys)

        def submit(
            host: HostRows,
            group: Group,
            scope: "Scope",
            keys: Sequence[bytes],
            rows: Sequence[int],
        ) -> "Ticket | None":
            return self._store.submit_get(scope, keys, host.pool.pages(rows), staged=host.staged)

        # The weights may have changed after the lookups found the chunks.
        refusal = "weights_changed" if self._weights_changed() else ""
        prompt = self._tokens_of(context, keys)
        parts = self._start_parts(transfer, keys, refusal, submit)
        if self._guard is not None:
            self._covered[transfer.job_id] = self._guard.covered
        number, started = transfer.job_id, monotonic()
        self._jobs.add(
            Job(number, context.req_id, keys, True, parts, leases, started, decision, prompt)
        )

    def _tokens_of(self, context: Context, keys: Sequence[bytes]) -> tuple[int, int]:
        """Returns the number of tokens before the chunks of a load, and of tokens in these chunks.
        All chained groups cover the same tokens, so the numbers are of the first chained group.
        Both are 0 without such a group. The first is 0 if vLLM knows no position of some chunk.
        """
        for group, _, indices in self._by_group(keys):
            if group.chained:
                ends = [context.get_offload_key_position(keys[index]) for index in indices]
                before = min(ends, key=lambda end: end or 0) or group.chunk_tokens
                return max(before - group.chunk_tokens, 0), len(indices) * group.chunk_tokens
        return 0, 0

    def save(self, transfer: Transfer) -> None:
        """Starts to store rows of the host tier. The store skips chunks that are already stored.
        vLLM pins chunks until their job is reported, so that their rows do not change.
        """
        context: Context = transfer.req_context
        keys, state = list(transfer.keys), self._peek_state(context)
        retain = state.options.retain
        until = time() + retain if retain else None

        def submit(
            host: HostRows,
            group: Group,
            scope: "Scope",
            keys: Sequence[bytes],
            rows: Sequence[int],
        ) -> "Ticket | None":
            before: Sequence[bytes] = ()
            if group.chained:
                before = state.sequences[group.number].before(context, keys[0])
            first = (chunk_number(context, keys[0], group) or 0) if group.chained else 0
            return self._store.submit_put(scope, before, first, keys, host.pool.pages(rows), until)

        parts = self._start_parts(transfer, keys, self._store_refusal(state), submit)
        self._jobs.add(Job(transfer.job_id, context.req_id, keys, False, parts))

    def _store_refusal(self, state: RequestState) -> str:
        if self._read_only:
            return "read_only"
        if not state.options.stores:
            return "no_store"
        if self._weights_changed():
            return "weights_changed"
        return "before_reset" if self._requests_before_reset else ""

    def _start_parts(
        self,
        transfer: Transfer,
        keys: Sequence[bytes],
        refusal: str,
        submit: (
            "Callable[[HostRows, Group, Scope, Sequence[bytes], Sequence[int]], Ticket | None]"
        ),
    ) -> list[TicketPart]:
        """Starts one put or get for each slice of `consecutive_runs`; none if `refusal`, the reason
        why the chunks are not moved, is not empty.
        """
        if refusal or self._rows is None:
            return [TicketPart(range(len(keys)), None, refusal or "error")]
        parts: list[TicketPart] = []
        unassigned, reason = set(range(len(keys))), "group"
        try:
            rows = transfer.chunk_ids.tolist()
            for group, scope, indices in self._by_group(keys):
                # vLLM passes the keys in no order. Sorted, consecutive chunks are one put or get.
                indices = sorted(indices, key=lambda index: self._place(transfer, keys[index]))
                group_keys = [keys[index] for index in indices]
                for run in consecutive_runs(transfer.req_context, group, group_keys):
                    moved = [rows[index] for index in indices[run]]
                    ticket = submit(self._rows, group, scope, group_keys[run], moved)
                    parts.append(TicketPart(indices[run], ticket))
                    unassigned.difference_update(indices[run])
        except Exception as error:  # the job must wait for the started tickets
            self._store.record_failure("transfer", error)
            reason = "error"
        if unassigned:
            parts.append(TicketPart(sorted(unassigned), None, reason))
        return parts

    @staticmethod
    def _place(transfer: Transfer, key: bytes) -> int:
        """Returns how many tokens of the request precede the end of the chunk `key`; 0 if this
        number is unknown.
        """
        return transfer.req_context.get_offload_key_position(key) or 0

    def take_finished(self) -> list[FinishedJob]:
        """Returns the jobs that ended since the last call."""
        finished_jobs = self._jobs.take_finished()
        for finished in finished_jobs:
            if finished.job.load and self._weights_changed_during(finished.job.number):
                finished.ok = [False] * len(finished.ok)
                finished.reasons = {"weights_changed": len(finished.ok)}
            for lease in finished.job.leases:
                self._store.release(lease)
            self._record_outcome(finished)
            counter = "failed_chunks" if finished.job.load else "skipped_chunks"
            for reason, chunks in finished.reasons.items():
                self._meter.add(f"{counter}:{reason}", chunks)
            state = self._requests.get(finished.job.request)
            if finished.job.load and state is not None:
                state.failed.update(
                    key for key, ok in zip(finished.job.keys, finished.ok, strict=True) if not ok
                )
        return finished_jobs

    def _record_outcome(self, finished: FinishedJob) -> None:
        """Counts the tokens of a load, and its duration up to this step, as avoided prefill. Counts
        no tokens unless every chunk was loaded, and nothing if the request has ended or no chunk
        belongs to a chained group. If the gate chose the load and every chunk was loaded, tells the
        gate the duration.
        """
        job, is_whole = finished.job, all(finished.ok)
        if not job.load:
            return
        before, tokens = job.prompt
        seconds = monotonic() - job.started
        if tokens and job.request in self._requests:
            self._store.note_prefill_avoided(before, tokens if is_whole else 0, seconds)
        if job.decision is not None and is_whole and isinstance(self._store, TierCache):
            self._store.record_outcome(job.decision, seconds)

    def record_prefill(self, before: int, tokens: int, seconds: float) -> None:
        """Records that the engine computed `tokens` tokens, after `before` tokens of the prompt, in
        `seconds`.
        """
        self._store.record_prefill(before, tokens, seconds)

    def _weights_changed_during(self, load: int) -> bool:
        """Returns whether weights changed since the load began, even if an epoch began after the
        change.
        """
        if self._guard is None:
            return False
        return self._covered.pop(load, None) != self._guard.covered or self._guard.changed()

    def end_step(self, preempted: Collection[str] = (), scheduled: Collection[str] = ()) -> None:
        """Releases the leases that no load of this step has taken over. Called after vLLM has
        submitted all loads of the step, in which it `preempted` requests and for the first time
        `scheduled` others.
        """
        for group, scope in self._scopes.values():
            if group.chained:
                self._decisions.record_scheduled(scheduled, scope)
                break
        for request in preempted:
            if request in self._requests:
                self._lookups.forget(self._requests[request])
        for request in self._active_requests:
            state = self._requests.get(request)
            if state is not None:
                state.answers.clear()
                self._release(state)
        self._active_requests.clear()
        self._lookups.end_step()
        self._store.end_step()

    def touch(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        for _, scope, indices in self._by_group(keys):
            self._store.touch(scope, [keys[index] for index in indices])

    # Resets and shutdown.

    def reset(self) -> None:
        """Waits for all jobs and begins an epoch: no chunk stored before is found. vLLM calls this
        when its caches are reset, perhaps because the weights changed. No chunk is loaded or stored
        until the requests that began earlier have ended, because they may have computed with
        earlier weights.
        """
        self._jobs.wait()
        for state in self._requests.values():
            state.answers.clear()
            self._lookups.forget(state)
            self._release(state)
        self._active_requests.clear()
        self._requests_before_reset = set(self._requests)
        self._set_namespace(self._namespace.with_new_epoch())

    def on_caches_reset(self) -> None:
        """Begins an epoch if the weights changed. Called when the engine's prefix cache and host
        tier are empty: no chunk of earlier weights is left to be stored.
        """
        if self._guard is None:
            return
        reading = self._guard.read()
        if self._guard.differs(reading):
            self._set_namespace(self._namespace.with_new_epoch())
        self._guard.cover(reading)

    def close(self) -> None:
        """Cancels loads, waits at most `CLOSE_SECONDS` for the last puts and cancels the puts that
        remain, and waits until the kernel no longer uses the host tier, which vLLM unmaps next.
        """
        self._jobs.cancel(lambda job: job.load)
        if not self._jobs.wait(CLOSE_SECONDS):
            self._jobs.cancel(lambda job: True)
            self._jobs.wait()
        self.take_finished()
        for state in self._requests.values():
            self._lookups.forget(state)
            self._release(state)
        self._requests.clear()
        self._rows = None
        self._store.close()

    def _set_namespace(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._scopes = {group.number: (group, namespace.scope(group)) for group in namespace.groups}

    def _groups(self) -> Sequence[Group]:
        return self._namespace.groups

    def _state_of(self, context: Context) -> RequestState:
        state = self._peek_state(context)
        self._requests[context.req_id] = state
        return state

    def _peek_state(self, context: Context) -> RequestState:
        """Returns the state of a request; for a finished request, a new state with its options."""
        state = self._requests.get(context.req_id)
        if state is None:
            sequences = {number: KeySequence(group) for number, (group, _) in self._scopes.items()}
            options = RequestOptions.parse(context.kv_transfer_params)
            state = RequestState(options.permitted(self._store, self._meter), sequences)
        return state

    def _release(self, state: RequestState) -> None:
        while state.leases:
            self._store.release(state.leases.popleft())

    def _by_group(self, keys: Sequence[bytes]) -> "Iterable[tuple[Group, Scope, list[int]]]":
        """Yields, for each group that this tier serves, the indices of its keys."""
        indices: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            indices.setdefault(group_of(key), []).append(index)
        for number, found in indices.items():
            if number in self._scopes:
                yield *self._scopes[number], found
