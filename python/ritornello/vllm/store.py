"""The store as an engine may use it: whatever goes wrong with it is a miss, never an exception.

A failure is logged once per kind and counted; a store that cannot go on is not asked again.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ritornello.vllm.identity import Identity
from ritornello.vllm.meter import Meter
from ritornello.vllm.settings import Settings

if TYPE_CHECKING:
    from ritornello._core import Match, Outcome, PoolPages, Scope, Store, Ticket

logger = logging.getLogger("vllm.ritornello")

MIB = 1 << 20
T = TypeVar("T")


class QuietStore:
    """One process's handle on the store, opened when it is first used. `broken` says why it is
    not used any more, "" while it is.
    """

    def __init__(self, settings: Settings, meter: Meter) -> None:
        self._settings = settings
        self._meter = meter
        self._store: Store | None = None
        self._scope: tuple[Identity, Scope] | None = None
        self._said: set[str] = set()
        self.broken = ""

    def open(self) -> bool:
        """Whether there is a store to use."""
        return self._opened() is not None

    def match(self, identity: Identity, keys: Sequence[bytes], ttl: float) -> "Match | None":
        return self._try("match", lambda store: store.match(self._scoped(identity), keys, ttl=ttl))

    def release(self, lease: int) -> None:
        self._try("release", lambda store: store.release(lease))

    def submit_get(
        self, identity: Identity, keys: Sequence[bytes], out: "PoolPages", timeout: float
    ) -> "Ticket | None":
        return self._try(
            "get",
            lambda store: store.submit_get(self._scoped(identity), keys, out, timeout=timeout),
        )

    def submit_put(
        self,
        identity: Identity,
        keys: Sequence[bytes],
        pages: "PoolPages",
        parent: bytes | None,
        retain_until: float | None,
    ) -> "Ticket | None":
        """The bytes are copied before this returns: the blocks may be overwritten at once."""
        return self._try(
            "put",
            lambda store: store.submit_put(
                self._scoped(identity),
                keys,
                pages,
                parent=parent,
                copy=True,
                retain_until=retain_until,
            ),
        )

    def finish(self, ticket: "Ticket", timeout: float | None) -> "Outcome | None":
        """The ticket's outcome, or None where it has none (yet). Like `cancel` it asks the ticket
        itself: what is in flight has to land also when the store is broken.
        """
        return self._quietly("wait", lambda: ticket.wait(timeout))

    def cancel(self, ticket: "Ticket") -> "Outcome | None":
        """Gives a get up. Its memory is the kernel's until the ticket is done, and a late read
        into a block that is being recomputed would be a wrong answer: so this waits, without a
        bound of its own, for the core to let go of it.
        """

        def give_up() -> "Outcome | None":
            ticket.cancel()
            return ticket.wait()

        return self._quietly("cancel", give_up)

    def close(self) -> None:
        if self._store is not None and not self.broken:
            self._try("close", lambda store: store.close())
        self._store = None
        self.broken = self.broken or "closed"

    def fail(self, doing: str, error: BaseException) -> None:
        kind = getattr(error, "kind", "")
        closed = type(error).__name__ == "ClosedError"
        if kind == "fatal" or closed or doing == "open":
            self.broken = f"{doing}: {error}"
        self._meter.add("errors", 1)
        sign = f"{doing}:{type(error).__name__}"
        if sign not in self._said:
            self._said.add(sign)
            logger.warning(
                "ritornello: %s failed (%s: %s); %s",
                doing,
                type(error).__name__,
                error,
                "serving without the store" if self.broken else "counted as a miss",
            )

    def _try(self, doing: str, action: "Callable[[Store], T]") -> T | None:
        store = self._opened()
        return None if store is None else self._quietly(doing, lambda: action(store))

    def _quietly(self, doing: str, action: "Callable[[], T]") -> T | None:
        try:
            return action()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the core is no Exception
            self.fail(doing, error)
            return None

    def _opened(self) -> "Store | None":
        if self.broken:
            return None
        if self._store is None:
            self._store = self._quietly("open", lambda: open_store(self._settings))
        return self._store

    def _scoped(self, identity: Identity) -> "Scope":
        if self._scope is None or self._scope[0] != identity:
            self._scope = (identity, identity.scope())
        return self._scope[1]


def open_store(settings: Settings) -> "Store":
    from ritornello._core import InvalidError, Store

    path, options = Path(settings.path), settings.options()
    if settings.capacity is not None:
        return Store.open(settings.path, settings.capacity, **options)
    try:
        return Store.open(settings.path, **options)
    except InvalidError:
        if path.is_dir() and any(path.iterdir()):
            raise
        capacity = default_capacity(path)
        logger.warning(
            'ritornello: creating %s with half of the free space, %d MiB; say "capacity" to choose',
            settings.path,
            capacity // MIB,
        )
        return Store.open(settings.path, capacity, **options)


def default_capacity(path: Path) -> int:
    """Half of the space that is free where `path` is or would be, in whole MiB."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free // 2 // MIB * MIB
