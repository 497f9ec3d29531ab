"""A connector's hold on its store: whatever goes wrong with it is a miss, never an exception.

A failure is logged once per kind and counted; a store that cannot go on is not asked again.
"""

from collections.abc import Callable
from logging import Logger
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from ritornello.opening import open_store
from ritornello.settings import StoreSettings

if TYPE_CHECKING:
    from ritornello._core import Store

T = TypeVar("T")
D = TypeVar("D")


class Handle:
    """One process's, opened when it is first used. `count` is told what failed. `broken` says why
    the store is not used any more, "" while it is. Safe to be called from several threads.
    """

    def __init__(
        self, settings: StoreSettings, logger: Logger, count: Callable[[str], object]
    ) -> None:
        self._settings = settings
        self._logger = logger
        self._count = count
        self._lock = Lock()
        self._said: set[str] = set()
        self._store: Store | None = None
        self.broken = ""

    def open(self) -> bool:
        """Whether there is a store to use."""
        return self._opened() is not None

    def close(self) -> None:
        """Finishes what is under way and lets the directory go. Again: does nothing."""
        with self._lock:
            store, self._store = self._store, None
            self.broken = self.broken or "closed"
        if store is not None:
            self.quietly("close", store.close, None)

    def ask(self, doing: str, action: "Callable[[Store], T]", otherwise: D) -> T | D:
        """What `action` returns, or, where it fails or nothing can be asked, `otherwise`."""
        store = self._opened()
        return otherwise if store is None else self.quietly(doing, lambda: action(store), otherwise)

    def refused_hash(self, algorithm: str) -> str:
        """Why keys that `algorithm` made are not used; "" where they are, or where there is no
        store to ask.
        """
        from ritornello._core import InvalidError

        def check(store: "Store") -> str:
            try:
                store.policy.check_hash(algorithm)
            except InvalidError as error:
                return str(error)
            return ""

        return self.ask("policy", check, "")

    def quietly(self, doing: str, action: Callable[[], T], otherwise: D) -> T | D:
        """What `action` returns, or, where it fails, `otherwise`."""
        try:
            return action()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the core is no Exception
            self.fail(doing, error)
            return otherwise

    def fail(self, doing: str, error: BaseException) -> None:
        """Takes note that something failed."""
        kind = getattr(error, "kind", "")
        if kind == "closed" and self.broken:
            return
        if kind in ("fatal", "closed") or doing == "open":
            self.broken = self.broken or f"{doing}: {error}"
        self._count(doing)
        sign = f"{doing}:{type(error).__name__}"
        if sign not in self._said:
            self._said.add(sign)
            self._logger.warning(
                "ritornello: %s failed (%s: %s); %s",
                doing,
                type(error).__name__,
                error,
                "serving without the store" if self.broken else "counted as a miss",
            )

    def _opened(self) -> "Store | None":
        if self.broken:
            return None
        if self._store is None:
            with self._lock:
                if self._store is None and not self.broken:
                    self._store = self.quietly("open", self._open, None)
        return self._store

    def _open(self) -> "Store":
        return open_store(self._settings, self._logger)
