"""Calls of the connector to its store. A failed call returns None or another default."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.meter import Meter
from ritornello.errors import RetryError
from ritornello.vllm.cache_groups import ObjectId
from ritornello.vllm.identity import Identity
from ritornello.vllm.kv_memory import KvMemory
from ritornello.vllm.metadata import PageBlocks, WorkerReport
from ritornello.vllm.settings import Settings

if TYPE_CHECKING:
    from ritornello._core import DecisionOutcome, Outcome, Scope, Store, Ticket

logger = logging.getLogger("vllm.ritornello")

# The reason of refused puts, while too many puts or moves on a device wait; and of skipped loads
# and saves, while the KV memory of a device is not registered yet.
BUSY = "busy"

# Protects pages from eviction. Opaque: only the store that issued a lease can interpret it.
Lease = Any


class PromptLength(NamedTuple):
    """`computed`: leading tokens that the engine has, of `tokens`. `loads`: whether pages may be
    loaded for the prompt.
    """

    computed: int
    tokens: int
    loads: bool = True


class StoreHit(NamedTuple):
    """Result of a lookup. `pages`: leading pages to load, protected by `lease`. `present`: leading
    pages that are known to be stored. `pending`: the lookup must be repeated, and `lease` is None.
    `tiers`: each tier with its number of consecutive stored pages, in order; pages that were
    fetched for this prompt count as "remote"; empty without tiers. `decision`: the core's `Lookup`
    with which the gate decided to load or to compute; None without tiers.
    """

    pages: int
    present: int
    lease: Lease = None
    pending: bool = False
    tiers: Sequence[tuple[str, int]] = ()
    decision: Any = None


class VllmStore(FailSafeStore):
    """The store of one connector process. `wants_timings`: whether workers report how long prefills
    took and, for a gate, how long reads took.
    """

    wants_timings = False

    def __init__(self, settings: Settings, meter: Meter) -> None:
        super().__init__(settings, logger, lambda _: meter.add("errors", 1))
        self._settings: Settings = settings
        self._identity: Identity | None = None
        self._scopes: dict[ObjectId, Scope] = {}
        # Why the engine's KV memory can no longer be used; "" if it can.
        self.memory_problem: Callable[[], str] = str

    def lookup(
        self,
        identity: Identity,
        object_ids: Sequence[ObjectId],
        keys: Sequence[bytes],
        ttl: float,
        prompt: PromptLength,
    ) -> StoreHit | None:
        """Finds the leading pages of `keys` of which all `object_ids` are stored, and leases them
        for `ttl` seconds. None if the call failed.
        """

        def action(store: "Store") -> StoreHit:
            scopes = [self._scope_for(identity, object_id) for object_id in object_ids]
            match = store.lease_prefix(scopes, keys, ttl=ttl)
            return StoreHit(match.pages, match.pages, match.lease)

        return self.call("lookup", action, None)

    def exists(
        self, identity: Identity, object_id: ObjectId, keys: Sequence[bytes]
    ) -> list[bool] | None:
        return self.call(
            "exists", lambda store: store.exists(self._scope_for(identity, object_id), keys), None
        )

    def note_decision(
        self,
        identity: Identity,
        object_id: ObjectId,
        request: str,
        keys: Sequence[bytes],
        outcome: "DecisionOutcome",
        *,
        found: int,
        loaded: int,
        detail: str,
        estimate: tuple[float, float] | None,
    ) -> None:
        """Records what was decided about the pages of a request, for `ritornello explain`."""
        self.call(
            "note_decision",
            lambda store: store.note_decision(
                request,
                self._scope_for(identity, object_id),
                keys,
                outcome,
                found=found,
                loaded=loaded,
                detail=detail,
                estimate=estimate,
            ),
            None,
        )

    def cancel_lookup(
        self, identity: Identity, object_ids: Sequence[ObjectId], keys: Sequence[bytes]
    ) -> None:
        """Does nothing here: lookups of one store are never pending. With tiers (`cache_store`),
        ends a pending `lookup`.
        """

    def take_loads(self) -> list[tuple[str, int, float]]:
        """Returns an empty list here, because a single store has no gate. With tiers, returns for
        each tier the total bytes and seconds of this process's reads since the last call.
        """
        return []

    def record_timings(self, report: WorkerReport, decisions: dict[str, Any]) -> None:
        """Takes the times of prefills. With tiers, takes the times of loads for the gate too, and
        removes from `decisions` (the `StoreHit.decision` of each request, by the request's id) the
        requests whose loads `report` names.
        """
        if report.prefill is not None:
            self.record_prefill(*report.prefill)

    def record_prefill(self, before: int, tokens: int, seconds: float) -> None:
        """Records that the engine computed `tokens` tokens after `before` tokens in `seconds`."""
        self.call(
            "record_prefill", lambda store: store.record_prefill(before, tokens, seconds), None
        )

    def note_prefill_avoided(self, before: int, tokens: int, seconds: float) -> None:
        """Counts `tokens` tokens after `before` tokens that were loaded in `seconds` and not
        computed; 0 tokens for a load that failed.
        """
        self.call(
            "note_prefill_avoided",
            lambda store: store.note_prefill_avoided(before, tokens, seconds),
            None,
        )

    def report_stats(self) -> None:
        """Does nothing here: a single store has no cache. With tiers, adds counters of the cache to
        the meter.
        """

    def submit_get(
        self,
        identity: Identity,
        object_id: ObjectId,
        pool: Any,
        pages: PageBlocks,
        timeout: float,
        sections: Sequence[int] = (),
        stream: int | None = None,
    ) -> "Ticket | None":
        """Starts to fill the blocks `pages.blocks` of `pool`, after the work that is now queued on
        `stream`. `sections`: the offsets in the object, in bytes, at which its sections end.
        Sections arrive in order, and `wait_section` waits for a section.
        """
        return self.call(
            "get",
            lambda store: store.submit_get(
                self._scope_for(identity, object_id),
                pages.keys,
                pool.pages(pages.blocks),
                sections=sections or None,
                timeout=timeout,
                **self._get_options(pages),
                **_behind(stream),
            ),
            None,
        )

    def submit_put(
        self,
        identity: Identity,
        object_id: ObjectId,
        pool: Any,
        pages: PageBlocks,
        retain_until: float | None,
        stream: int | None = None,
    ) -> "Ticket | str":
        """Starts to store blocks. Their bytes are copied before the call returns or, on a device,
        after the work that is now queued on `stream`. Returns the ticket or, if no put was started,
        the reason: `BUSY` if the call may be repeated later, "error" if the call failed.
        """
        keys, options = self._put_options(pages)

        def action(store: "Store") -> "Ticket | str":
            try:
                return store.submit_put(
                    self._scope_for(identity, object_id),
                    keys,
                    pool.pages(pages.blocks),
                    retain_until=retain_until,
                    **options,
                    **_behind(stream),
                )
            except RetryError as error:  # too many puts or moves wait
                self.record_failure("put", error)
                return BUSY

        return self.call("put", action, "error")

    def protect(self, memory: KvMemory, ticket: "Ticket") -> None:
        """Makes the engine's later work wait until a put has read its blocks. If the engine's
        work cannot be made to wait, cancels the put, which then stores no page whose bytes it has
        not read yet.
        """
        if not self.attempt("protect", lambda: memory.protect(ticket), False):
            self.request_cancel(ticket)

    def time_limit(self, nbytes: int, least: float) -> float:
        """Returns the timeout in seconds for a load of `nbytes` bytes, at least `least`."""
        return self.call("get", lambda store: store.time_limit(nbytes, least), least)

    def wait(self, ticket: "Ticket", timeout: float | None) -> "Outcome | None":
        """Returns the ticket's outcome, or None if the ticket has no outcome within `timeout`. Like
        `cancel_and_wait`, works even if the store is broken, because transfers must end in this
        case too.
        """
        return self.attempt("wait", lambda: ticket.wait(timeout), None)

    def wait_section(self, ticket: "Ticket", number: int, timeout: float) -> bool:
        """Returns whether sections up to `number` arrived, or the ticket is done."""
        return self.attempt("wait", lambda: ticket.wait_section(number, timeout), False)

    def cancel_and_wait(self, ticket: "Ticket") -> "Outcome | None":
        """Cancels a transfer and waits, without a timeout, until the core has released its memory:
        a late read into a block that is being recomputed would corrupt the block.
        """

        def give_up() -> "Outcome | None":
            ticket.cancel()
            return ticket.wait()

        return self.attempt("cancel", give_up, None)

    def is_done(self, ticket: "Ticket") -> bool:
        """Returns whether the ticket has its outcome. Cancels and waits for a ticket that cannot be
        polled.
        """
        done = self.attempt("poll", ticket.done, None)
        if done is None:
            self.cancel_and_wait(ticket)
            return True
        return done

    def request_cancel(self, ticket: "Ticket") -> None:
        """Cancels a transfer without waiting; the kernel may use its memory until the ticket
        `is_done`.
        """
        self.attempt("cancel", ticket.cancel, None)

    def _is_lost(self, error: BaseException) -> bool:
        """Returns whether the store must be opened again after a call failed with `error`. False
        for a fatal error while the KV memory is unusable: a broken device causes such errors of
        gets and puts, and the store still works.
        """
        is_of_memory = getattr(error, "kind", "") == "fatal" and self.memory_problem()
        return super()._is_lost(error) and not is_of_memory

    def _get_options(self, pages: PageBlocks) -> dict[str, Any]:
        """Returns arguments of a get besides the arguments for every kind of store: none here."""
        return {}

    def _put_options(self, pages: PageBlocks) -> tuple[Sequence[bytes], dict[str, Any]]:
        """Returns the keys that a put passes, and its further arguments. Here: the keys of `pages`,
        the key before them, and the request to copy the bytes before the call returns.
        """
        return pages.keys, {"parent": pages.parent, "copy": True}

    def _scope_for(self, identity: Identity, object_id: ObjectId) -> "Scope":
        if self._identity is not identity:
            self._identity, self._scopes = identity, {}
        if object_id not in self._scopes:
            self._scopes[object_id] = identity.scope(object_id)
        return self._scopes[object_id]


def _behind(stream: int | None) -> dict[str, Any]:
    """Returns the argument with which a transfer begins after the work queued on a stream."""
    return {} if stream is None else {"after": stream}
