"""Answers vLLM's lookups of chunks (pages of its host tier) if our tier is one store."""

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from ritornello.connector.meter import Meter
from ritornello.vllm.tier.decisions import DecisionLog
from ritornello.vllm.tier.requests import LookupAnswer, RequestState
from ritornello.vllm.tier.sequence import Context, Group, consecutive_runs
from ritornello.vllm.tier.store import LEASE_SECONDS, TierStore

if TYPE_CHECKING:
    from ritornello._core import Scope


class StoreLookups:
    """Lookups of all requests, `requests`, in one store."""

    def __init__(
        self,
        store: TierStore,
        requests: Mapping[str, RequestState],
        meter: Meter,
        decisions: DecisionLog,
    ) -> None:
        self._store = store
        self._requests = requests
        self._meter = meter
        self._decisions = decisions

    def find(
        self, state: RequestState, group: Group, scope: "Scope", key: bytes, context: Context
    ) -> LookupAnswer:
        """Returns whether the chunk is stored, and leases it. If this process owns the store and
        its index is in memory, one lookup in a chained group also answers for the consecutive
        chunks after the key, up to the first miss. If another process owns the store, or the index
        has files, returns `PENDING`: `batch_lookup`, on a thread that may block, finds the answer.
        Returns `MISS` while the store is out of use.
        """
        if not self._store.answers_at_once():
            return LookupAnswer.MISS if self._store.broken else LookupAnswer.PENDING
        keys = state.sequences[group.number].following(context, key) if group.chained else [key]
        hits = self._lease_prefix(group, scope, keys, context)
        # Keys after the first miss are looked up again if vLLM requests them.
        state.answers.update(zip(keys, [True] * hits + [False], strict=False))
        return LookupAnswer.HIT if hits else LookupAnswer.MISS

    def batch_lookup(
        self,
        keys: Sequence[bytes],
        groups: "Iterable[tuple[Group, Scope, list[int]]]",
        context: Context,
    ) -> list[bool]:
        """Returns, for each key, whether its chunk is stored and leased for the request. `groups`:
        the indices of the keys by group. Runs on vLLM's lookup thread; waits for the owner of the
        store.
        """
        found = [False] * len(keys)
        for group, scope, indices in groups:
            group_keys = [keys[index] for index in indices]
            for run in consecutive_runs(context, group, group_keys):
                hits = self._lease_prefix(group, scope, group_keys[run], context, run.start == 0)
                for index in indices[run][:hits]:
                    found[index] = True
        return found

    def end_step(self) -> None:
        """Does nothing: lookups in one store keep no state of a step."""

    def forget(self, state: RequestState) -> None:
        """Does nothing: a lookup in one store starts no transfer that must be cancelled."""

    def _lease_prefix(
        self,
        group: Group,
        scope: "Scope",
        keys: Sequence[bytes],
        context: Context,
        is_first: bool = True,
    ) -> int:
        """Returns the number of leading keys that are stored, and leases them for the request.
        `is_first`: whether to record the result as a decision, because `keys` begin with the first
        chunk of their group that vLLM asks for.
        """
        started = perf_counter()
        match = self._store.lease_prefix(scope, keys, LEASE_SECONDS)
        self._meter.add("lookups")
        self._meter.add("lookup_seconds", perf_counter() - started)
        hits = 0 if match is None else match.pages
        state = self._requests.get(context.req_id)
        if match is not None and hits:
            if state is None:
                self._store.release(match.lease)
            else:
                state.leases.append(match.lease)
        if state is not None and is_first:
            self._decisions.record_lookup(
                state,
                context,
                group,
                scope,
                keys,
                found=hits,
                offered=hits,
                without_result="failed" if match is None else None,
            )
        return hits
