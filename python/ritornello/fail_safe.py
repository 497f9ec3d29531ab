"""The store as a connector uses it: every failure is a miss, never an exception.

A store that cannot be opened, or fails fatally, is opened again by a background thread, with
back-off. Calls return at once in the meantime. Failures are counted, and logged once per kind.
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

# Pauses between attempts to open the store: the first, and the maximum.
RETRY_SECONDS = 1.0
RETRY_SECONDS_MAX = 5.0
# A store that served for longer than this before it failed is reopened after the first pause.
STABLE_SECONDS = 60.0
# Minimum time between two log lines about a failure of the same kind.
LOG_AGAIN_SECONDS = 60.0
REOPENING = "opening the store again"


def is_retriable(error: BaseException) -> bool:
    """Returns whether opening a store may succeed later with the same settings."""
    retriable = isinstance(error, RitornelloError | OSError | MemoryError)
    return retriable and not isinstance(error, SettingError)


class FailSafeStore:
    """A store of one process, opened at first use. Thread-safe.

    `count` is called with the name of each failed operation. `broken` is the reason why the store
    is not in use, "" while it is. `closed`: `close` was called. `on_open` is called after every
    reopening, on a thread that may block. Connectors derive the calls they need from this class.
    """

    def __init__(
        self, settings: StoreSettings, logger: Logger, count: Callable[[str], object]
    ) -> None:
        self._settings = settings
        self._logger = logger
        self._count = count
        self._lock = Lock()
        self._logged: dict[str, float] = {}
        self._outage_logged = False
        self._store: Store | None = None
        self._hash = ""
        self._hash_verdict: tuple[Store, str, str] | None = None
        self._retry_pause = RETRY_SECONDS
        self._opened_at = self._lost_at = monotonic()
        self._opener: Thread | None = None
        self._stop = Event()
        # The opener thread also stops when this object is dropped or the interpreter exits.
        finalize(self, self._stop.set)
        self.closed = False
        self.broken = ""
        self.on_open: Callable[[], object] = lambda: None

    def open(self) -> bool:
        """Opens the store on the first call. Returns whether it is in use."""
        return self._ensure_open() is not None

    def close(self) -> None:
        """Finishes running operations and releases the directory. Idempotent."""
        with self._lock:
            self.closed = True
            self._stop.set()
            store, self._store = self._store, None
            self.broken = self.broken or "closed"
        if store is not None:
            self.attempt("close", store.close, None)

    def call(self, operation: str, action: "Callable[[Store], T]", default: D) -> T | D:
        """Returns `action(store)`, or `default` if it fails or no store is in use."""
        store = self._ensure_open()
        if store is None:
            return default
        try:
            return action(store)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # PanicException is no Exception
            lost = getattr(error, "kind", "") in ("fatal", "closed")
            if lost and self._reopen_after(store, operation, error):
                self._count(operation)
                self._log_failure(operation, error, repeat=True)
            else:
                self.record_failure(operation, error)
            return default

    def hash_refusal(self, algorithm: str) -> str:
        """Returns why the store's policy refuses keys that `algorithm` made; "" if it accepts them
        or no store is in use.
        """
        known = self._hash_verdict
        if known is not None and known[:2] == (self._store, algorithm):
            return known[2]

        def check(store: "Store") -> str:
            reason = _hash_refusal(store, algorithm)
            self._hash_verdict = (store, algorithm, reason)
            return reason

        return self.call("policy", check, "")

    def expect_hash(self, algorithm: str) -> None:
        """From now on, a store that refuses keys of `algorithm` is not used."""
        self._hash = algorithm

    def require_hash(self, algorithm: str) -> str:
        """Calls `expect_hash`, then returns `hash_refusal`."""
        self.expect_hash(algorithm)
        return self.hash_refusal(algorithm)

    def permits_retention(self) -> bool:
        """Returns whether requests may retain pages; logs the first refusal."""
        permitted = self.call("policy", lambda store: store.policy.allow_request_retention, None)
        if permitted is False and "retain" not in self._logged:
            self._logged["retain"] = monotonic()
            self._logger.warning(
                "ritornello: a request asked to have its pages retained, which the store's "
                "policy.toml does not permit (`allow_request_retention = true` would); ignored, "
                "and further ones are only counted"
            )
        return bool(permitted)

    def attempt(self, operation: str, action: Callable[[], T], default: D) -> T | D:
        """Returns `action()`, or `default` if it fails. Does not need the store."""
        try:
            return action()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # PanicException is no Exception
            self.record_failure(operation, error)
            return default

    def record_failure(self, operation: str, error: BaseException) -> None:
        """Counts a failure, and logs the first of its kind."""
        if getattr(error, "kind", "") == "closed" and self.broken:
            return
        self._count(operation)
        self._log_failure(operation, error)

    def _ensure_open(self) -> "Store | None":
        if self._store is None:
            if not self.broken:
                # Blocks for the first attempt only: afterwards `broken` is set and the opener
                # retries.
                with self._lock:
                    if self._store is None and not self.broken:
                        self._store = self.attempt("open", self._open_first, None)
            elif self._opener is not None and self._will_reopen() and not self._opener.is_alive():
                self._restart_opener()
        return self._store

    def _open_first(self) -> "Store | None":
        try:
            store = self._open()
        except Exception as error:
            self._schedule_reopen("open", error, None)
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # PanicException
            self.broken = f"open: {error}"
            raise
        self.broken = _hash_refusal(store, self._hash) if self._hash else ""
        if not self.broken:
            return store
        self._logger.warning("ritornello: %s; neither hits nor saves", self.broken)
        self.attempt("close", store.close, None)
        return None

    def _open(self) -> "Store":
        return open_store(self._settings, self._logger)

    def _reopen_after(self, store: "Store", operation: str, error: BaseException) -> bool:
        """Takes a failed store out of use and schedules its reopening. Returns False if another
        thread has done so.
        """
        with self._lock:
            if self._store is not store:
                return False
            self._store = None
            if monotonic() - self._opened_at > STABLE_SECONDS:
                self._retry_pause = RETRY_SECONDS
            self._schedule_reopen(operation, error, store)
            return True

    def _schedule_reopen(
        self, operation: str, error: BaseException, failed: "Store | None"
    ) -> None:
        """Marks the store unusable until the opener thread has opened it. Requires the lock."""
        self._lost_at = monotonic()
        self._set_broken(operation, error, again=failed is not None or is_retriable(error))
        if self._will_reopen():
            self._start_opener(failed)

    def _set_broken(self, operation: str, error: BaseException, *, again: bool) -> None:
        self.broken = f"{operation}: {error}" + f"; {REOPENING}" * again

    def _will_reopen(self) -> bool:
        """Returns whether the store is to be opened again."""
        return self.broken.endswith(REOPENING) and not self._stop.is_set()

    def _start_opener(self, failed: "Store | None") -> None:
        """Starts the opener thread. Requires the lock."""
        arguments = (ref(self), self._stop, self._retry_pause, failed)
        self._opener = Thread(
            target=FailSafeStore._reopen_loop, args=arguments, name="ritornello-open", daemon=True
        )
        try:
            self._opener.start()
        except RuntimeError as reason:  # retried by the next call
            self._logger.debug("ritornello: no thread to open the store (%s)", reason)

    def _restart_opener(self) -> None:
        """Restarts an opener that ended in a fork's child or could not be started."""
        with self._lock:
            opener_ended = self._opener is not None and not self._opener.is_alive()
            if opener_ended and self._will_reopen():
                self._start_opener(None)

    @staticmethod
    def _reopen_loop(
        waiting: "ref[FailSafeStore]", stop: Event, pause: float, failed: "Store | None"
    ) -> None:
        """Body of the opener thread. Holds a reference to the store only during an attempt, so that
        a dropped store is collected.
        """
        if failed is not None:
            try:
                failed.close()
            except BaseException as error:  # the next attempt reports it
                logging.getLogger(__name__).debug("ritornello: close failed (%s)", error)
            del failed
        while not stop.wait(pause):
            store = waiting()
            if store is None or not store._try_reopen():
                return
            pause = store._retry_pause
            del store

    def _try_reopen(self) -> bool:
        """Tries to open the store. Returns whether another attempt is due."""
        self._retry_pause = min(2 * self._retry_pause, RETRY_SECONDS_MAX)
        try:
            store = self._open()
        except BaseException as error:  # PanicException is no Exception
            self._set_broken("open", error, again=is_retriable(error))
            self._log_failure("open", error, repeat=True)
            return self._will_reopen()
        used = self.attempt("open", lambda: self._adopt(store), None)
        if used:
            self.attempt("on_open", self.on_open, None)
        return used is None and self._will_reopen()

    def _adopt(self, store: "Store") -> bool:
        """Puts a reopened store into use; returns False, and closes it, if it is refused or
        unwanted.
        """
        refusal = _hash_refusal(store, self._hash) if self._hash else ""
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
            self.attempt("close", store.close, None)
            return False
        if self._outage_logged:
            self._outage_logged = False
            seconds = monotonic() - self._lost_at
            self._logger.warning("ritornello: the store serves again after %.0f seconds", seconds)
        return True

    def _log_failure(self, operation: str, error: BaseException, *, repeat: bool = False) -> None:
        signature, now = f"{operation}:{type(error).__name__}", monotonic()
        last_logged = self._logged.get(signature)
        if last_logged is not None and not (repeat and now - last_logged > LOG_AGAIN_SECONDS):
            return
        self._logged[signature] = now
        outcome = "counted as a miss"
        if self.broken:
            self._outage_logged = True
            waits = self._will_reopen()
            outcome = "serving without the store" + (" until it can be opened again" * waits)
        # Formatted now: a retained log record must not keep the exception's frames alive.
        reason = f"{type(error).__name__}: {error}"
        self._logger.warning("ritornello: %s failed (%s); %s", operation, reason, outcome)


def _hash_refusal(store: "Store", algorithm: str) -> str:
    try:
        store.policy.check_hash(algorithm)
    except InvalidError as error:
        return str(error)
    return ""
