"""A connector's hold on its store: whatever goes wrong with it is a miss, never an exception.

A store that cannot be opened, or cannot go on, is opened again by a thread of its own, with
back-off: calls meanwhile return at once. Failures are counted, and logged once per kind.
"""

import logging
from collections.abc import Callable
from logging import Logger
from threading import Event, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, TypeVar
from weakref import finalize, ref

from ritornello.errors import InvalidError, RitornelloError, SettingError
from ritornello.opening import open_store
from ritornello.settings import StoreSettings

if TYPE_CHECKING:
    from ritornello._core import Store

T = TypeVar("T")
D = TypeVar("D")

# Pauses between attempts to open the store: the first, and the longest.
PAUSE = 1.0
PAUSE_MAX = 5.0
# A store that was used for this long before it failed is opened again after the first pause.
STEADY_SECONDS = 60.0
# The reason why a store is not used is logged again after this time.
REPEAT_SECONDS = 60.0
AGAIN = "opening the store again"


def passes(error: BaseException) -> bool:
    """Whether a store that could not be opened may be opened later, with the same settings."""
    retriable = isinstance(error, RitornelloError | OSError | MemoryError)
    return retriable and not isinstance(error, SettingError)


class Handle:
    """One process's, opened when it is first used. `count` is told what failed. `broken` says why
    the store is not used now, "" while it is; `closed`, whether `close` was called. `on_open` is
    called, by a thread that may wait, when the store was opened again. Safe to be called from
    several threads.
    """

    def __init__(
        self, settings: StoreSettings, logger: Logger, count: Callable[[str], object]
    ) -> None:
        self._settings = settings
        self._logger = logger
        self._count = count
        self._lock = Lock()
        self._said: dict[str, float] = {}
        self._announced = False
        self._store: Store | None = None
        self._hash = ""
        self._refusal: tuple[Store, str, str] | None = None
        self._pause = PAUSE
        self._opened_at = self._lost_at = monotonic()
        self._opener: Thread | None = None
        self._stop = Event()
        # A handle that is dropped, or that the interpreter's end finds, opens no store either.
        finalize(self, self._stop.set)
        self.closed = False
        self.broken = ""
        self.on_open: Callable[[], object] = lambda: None

    def open(self) -> bool:
        """Whether there is a store to use."""
        return self._opened() is not None

    def close(self) -> None:
        """Finishes what is under way and lets the directory go. Again: does nothing."""
        with self._lock:
            self.closed = True
            self._stop.set()
            store, self._store = self._store, None
            self.broken = self.broken or "closed"
        if store is not None:
            self.quietly("close", store.close, None)

    def ask(self, doing: str, action: "Callable[[Store], T]", otherwise: D) -> T | D:
        """What `action` returns, or, where it fails or nothing can be asked, `otherwise`."""
        store = self._opened()
        if store is None:
            return otherwise
        try:
            return action(store)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the core is no Exception
            lost = getattr(error, "kind", "") in ("fatal", "closed")
            if lost and self._give_up(store, doing, error):
                self._count(doing)
                self._say(doing, error, repeat=True)
            else:
                self.fail(doing, error)
            return otherwise

    def refused_hash(self, algorithm: str) -> str:
        """Why keys that `algorithm` made are not used; "" where they are, or where there is no
        store to ask.
        """
        known = self._refusal
        if known is not None and known[:2] == (self._store, algorithm):
            return known[2]

        def check(store: "Store") -> str:
            why = _refused(store, algorithm)
            self._refusal = (store, algorithm, why)
            return why

        return self.ask("policy", check, "")

    def expect_hash(self, algorithm: str) -> None:
        """From now on a store that refuses keys that `algorithm` made is not used."""
        self._hash = algorithm

    def require_hash(self, algorithm: str) -> str:
        """`expect_hash`, then `refused_hash`."""
        self.expect_hash(algorithm)
        return self.refused_hash(algorithm)

    def permits_retention(self) -> bool:
        """Whether a request may have its pages retained; a refusal is logged once."""
        permitted = self.ask("policy", lambda store: store.policy.allow_request_retention, None)
        if permitted is False and "retain" not in self._said:
            self._said["retain"] = monotonic()
            self._logger.warning(
                "ritornello: a request asked to have its pages retained, which the store's "
                "policy.toml does not permit (`allow_request_retention = true` would); ignored, "
                "and further ones are only counted"
            )
        return bool(permitted)

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
        """Counts a failure, and logs the first of its kind."""
        if getattr(error, "kind", "") == "closed" and self.broken:
            return
        self._count(doing)
        self._say(doing, error)

    def _opened(self) -> "Store | None":
        if self._store is None:
            if not self.broken:
                # Waits for the first attempt only: after it, `broken` says that others follow.
                with self._lock:
                    if self._store is None and not self.broken:
                        self._store = self.quietly("open", self._first, None)
            elif self._opener is not None and self._waits() and not self._opener.is_alive():
                self._start_again()
        return self._store

    def _first(self) -> "Store | None":
        try:
            store = open_store(self._settings, self._logger)
        except Exception as error:
            self._wait("open", error, None)
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the core
            self.broken = f"open: {error}"
            raise
        self.broken = _refused(store, self._hash) if self._hash else ""
        if not self.broken:
            return store
        self._logger.warning("ritornello: %s; neither hits nor saves", self.broken)
        self.quietly("close", store.close, None)
        return None

    def _give_up(self, store: "Store", doing: str, error: BaseException) -> bool:
        """Has the store opened anew, unless another thread has."""
        with self._lock:
            if self._store is not store:
                return False
            self._store = None
            if monotonic() - self._opened_at > STEADY_SECONDS:
                self._pause = PAUSE
            self._wait(doing, error, store)
            return True

    def _wait(self, doing: str, error: BaseException, failed: "Store | None") -> None:
        """From now on the store is not used, until a thread has opened it. Needs the lock."""
        self._lost_at = monotonic()
        self._note(doing, error, again=failed is not None or passes(error))
        if self._waits():
            self._start(failed)

    def _note(self, doing: str, error: BaseException, *, again: bool) -> None:
        self.broken = f"{doing}: {error}" + f"; {AGAIN}" * again

    def _waits(self) -> bool:
        """Whether the store is to be opened again."""
        return self.broken.endswith(AGAIN) and not self._stop.is_set()

    def _start(self, failed: "Store | None") -> None:
        """Starts the thread that opens the store. Needs the lock."""
        arguments = (ref(self), self._stop, self._pause, failed)
        self._opener = Thread(
            target=Handle._keep_opening, args=arguments, name="ritornello-open", daemon=True
        )
        try:
            self._opener.start()
        except RuntimeError as why:  # the next call starts another one
            self._logger.debug("ritornello: no thread to open the store (%s)", why)

    def _start_again(self) -> None:
        """The thread is not there in the child of a fork, or could not be started."""
        with self._lock:
            gone = self._opener is not None and not self._opener.is_alive()
            if gone and self._waits():
                self._start(None)

    @staticmethod
    def _keep_opening(
        waiting: "ref[Handle]", stop: Event, pause: float, failed: "Store | None"
    ) -> None:
        """The thread. It holds on to the handle for no longer than an attempt takes."""
        if failed is not None:
            try:
                failed.close()
            except BaseException as error:  # the next opening says what is still in the way
                logging.getLogger(__name__).debug("ritornello: close failed (%s)", error)
            del failed
        while not stop.wait(pause):
            handle = waiting()
            if handle is None or not handle._try_again():
                return
            pause = handle._pause
            del handle

    def _try_again(self) -> bool:
        """Opens the store. Whether another attempt is due."""
        self._pause = min(2 * self._pause, PAUSE_MAX)
        try:
            store = open_store(self._settings, self._logger)
        except BaseException as error:  # a panic of the core is no Exception
            self._note("open", error, again=passes(error))
            self._say("open", error, repeat=True)
            return self._waits()
        used = self.quietly("open", lambda: self._use(store), None)
        if used:
            self.quietly("on_open", self.on_open, None)
        return used is None and self._waits()

    def _use(self, store: "Store") -> bool:
        """Whether a store that was opened again is used from now on."""
        refusal = _refused(store, self._hash) if self._hash else ""
        with self._lock:
            used = not self._stop.is_set() and not refusal
            self._opened_at = monotonic()
            if used:
                self._store, self.broken = store, ""
            elif refusal:
                self.broken = refusal
        if refusal:
            self._logger.warning("ritornello: %s; neither hits nor saves", refusal)
        if not used:
            self.quietly("close", store.close, None)
            return False
        if self._announced:
            self._announced = False
            seconds = monotonic() - self._lost_at
            self._logger.warning("ritornello: the store serves again after %.0f seconds", seconds)
        return True

    def _say(self, doing: str, error: BaseException, *, repeat: bool = False) -> None:
        sign, now = f"{doing}:{type(error).__name__}", monotonic()
        said = self._said.get(sign)
        if said is not None and not (repeat and now - said > REPEAT_SECONDS):
            return
        self._said[sign] = now
        outcome = "counted as a miss"
        if self.broken:
            self._announced = True
            waits = self._waits()
            outcome = "serving without the store" + (" until it can be opened again" * waits)
        # As text: a record that is kept holds on to nothing of ours.
        why = f"{type(error).__name__}: {error}"
        self._logger.warning("ritornello: %s failed (%s); %s", doing, why, outcome)


def _refused(store: "Store", algorithm: str) -> str:
    try:
        store.policy.check_hash(algorithm)
    except InvalidError as error:
        return str(error)
    return ""
