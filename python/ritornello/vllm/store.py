"""What the connector asks of the store; None where it failed."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ritornello.fail_safe import FailSafeStore
from ritornello.vllm.identity import Identity
from ritornello.vllm.matching import Hit, Lease, Prompt
from ritornello.vllm.metadata import Pages, WorkerReport
from ritornello.vllm.meter import Meter
from ritornello.vllm.parts import Slice
from ritornello.vllm.settings import Settings

if TYPE_CHECKING:
    from ritornello._core import Outcome, PagePool, Scope, Store, Ticket

logger = logging.getLogger("vllm.ritornello")


class VllmStore(FailSafeStore):
    """One process's hold on the store. `wants_timings`: it wants to hear how long things take."""

    wants_timings = False

    def __init__(self, settings: Settings, meter: Meter) -> None:
        super().__init__(settings, logger, lambda _: meter.add("errors", 1))
        self._settings: Settings = settings
        self._identity: Identity | None = None
        self._scopes: dict[Slice, Scope] = {}
        self._bundles: dict[Sequence[Slice], list[Scope]] = {}

    def lookup(
        self,
        identity: Identity,
        of: Sequence[Slice],
        keys: Sequence[bytes],
        ttl: float,
        prompt: Prompt,
    ) -> Hit | None:
        """The leading pages of which all objects `of` (a tuple) are there."""

        def action(store: "Store") -> Hit:
            match = store.pin_prefix(self._scopes_for(identity, of), keys, ttl=ttl)
            return Hit(match.pages, match.pages, match.lease)

        return self.call("match", action, None)

    def exists(self, identity: Identity, of: Slice, keys: Sequence[bytes]) -> list[bool] | None:
        return self.call(
            "exists", lambda store: store.exists(self._scope_for(identity, of), keys), None
        )

    def release(self, lease: Lease) -> None:
        self.call("release", lambda store: store.release(lease), None)

    def cancel_lookup(self, identity: Identity, of: Sequence[Slice], keys: Sequence[bytes]) -> None:
        """Nobody wants any more what `match` had begun to bring."""

    def take_loads(self) -> list[tuple[str, int, float]]:
        """Tier, bytes and seconds of what was read since the last call."""
        return []

    def record_timings(self, report: WorkerReport, grounds: dict[str, Any]) -> None:
        """How long loads and steps took; `grounds` of what was decided, by request."""

    def report_stats(self) -> None:
        """Has what the store counts itself on the meter, now and then."""

    def submit_get(
        self,
        identity: Identity,
        of: Slice,
        pool: "PagePool",
        pages: Pages,
        timeout: float,
        sections: Sequence[int] = (),
    ) -> "Ticket | None":
        """`sections` of the pages, by where they end, come one after the other: `wait_section`."""
        return self.call(
            "get",
            lambda store: store.submit_get(
                self._scope_for(identity, of),
                pages.keys,
                pool.pages(pages.blocks),
                sections=sections or None,
                timeout=timeout,
                **self._get_options(pages),
            ),
            None,
        )

    def submit_put(
        self,
        identity: Identity,
        of: Slice,
        pool: "PagePool",
        pages: Pages,
        retain_until: float | None,
    ) -> "Ticket | None":
        """The bytes are copied before this returns: the blocks may be overwritten at once."""
        keys, said = self._put_options(pages)
        return self.call(
            "put",
            lambda store: store.submit_put(
                self._scope_for(identity, of),
                keys,
                pool.pages(pages.blocks),
                retain_until=retain_until,
                **said,
            ),
            None,
        )

    def wait(self, ticket: "Ticket", timeout: float | None) -> "Outcome | None":
        """The ticket's outcome, or None where it has none (yet). Like `cancel_and_wait` it asks the ticket
        itself: what is in flight has to land also when the store is broken.
        """
        return self.attempt("wait", lambda: ticket.wait(timeout), None)

    def wait_section(self, ticket: "Ticket", number: int, timeout: float) -> bool:
        """Whether sections up to this one have come, or the ticket is done."""
        return self.attempt("wait", lambda: ticket.wait_section(number, timeout), False)

    def cancel_and_wait(self, ticket: "Ticket") -> "Outcome | None":
        """Gives a get up. Its memory is the kernel's until the ticket is done, and a late read
        into a block that is being recomputed would be a wrong answer: so this waits, without a
        bound of its own, for the core to let go of it.
        """

        def give_up() -> "Outcome | None":
            ticket.cancel()
            return ticket.wait()

        return self.attempt("cancel", give_up, None)

    def is_done(self, ticket: "Ticket") -> bool:
        """Whether the ticket has its outcome. One that cannot be asked is waited for."""
        done = self.attempt("poll", ticket.done, None)
        if done is None:
            self.cancel_and_wait(ticket)
            return True
        return done

    def request_cancel(self, ticket: "Ticket") -> None:
        """Gives a get up without waiting; its memory is the kernel's until it has `is_done`."""
        self.attempt("cancel", ticket.cancel, None)

    def _get_options(self, pages: Pages) -> dict[str, Any]:
        """What else this kind of store is told."""
        return {}

    def _put_options(self, pages: Pages) -> tuple[Sequence[bytes], dict[str, Any]]:
        """The keys, those before the pages included where they help, and what else it is told."""
        return pages.keys, {"parent": pages.parent, "copy": True}

    def _scope_for(self, identity: Identity, of: Slice) -> "Scope":
        if self._identity is not identity:
            self._identity, self._scopes, self._bundles = identity, {}, {}
        if of not in self._scopes:
            self._scopes[of] = identity.scope(of)
        return self._scopes[of]

    def _scopes_for(self, identity: Identity, of: Sequence[Slice]) -> "list[Scope]":
        if self._identity is not identity or of not in self._bundles:
            self._bundles[of] = [self._scope_for(identity, piece) for piece in of]
        return self._bundles[of]
