"""The store as a connector uses it: a failed call returns a default value, and raises no exception.

If a store cannot be opened for a reason that may pass (`is_retriable`), fails fatally, was closed
by the core, or refuses the engine's keys, a background thread opens it again, with back-off. The
thread ends when the store is open, or when an attempt fails for a reason that cannot pass. Another
thread closes the failed store, because the close may wait for a hung disk. After the first attempt
to open the store, calls return immediately while no store is open. Failures are counted, except
failed attempts to open the store again, failed closes of failed stores, and calls that fail only
because the store is already out of use. The first failure of each kind (operation and type of
exception) is logged; failures that take the store out of use, and failed attempts to open the store
again, are logged again after `LOG_AGAIN_SECONDS`. Only `KeyboardInterrupt` and `SystemExit` reach
the caller.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from logging import Logger
from threading import Event, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize, ref

from ritornello.connector.opening import open_store
from ritornello.connector.settings import StoreSettings
from ritornello.errors import InvalidError, RetryError, RitornelloError, SettingError

if TYPE_CHECKING:
    from ritornello._core import LeasedPrefix, Scope, Store

T = TypeVar("T")
D = TypeVar("D")

# Pauses between attempts to open the store: the first, and the maximum.
RETRY_SECONDS = 1.0
RETRY_SECONDS_MAX = 5.0
# If a store fails more than `STABLE_SECONDS` after its opening, the pauses between attempts begin
# at `RETRY_SECONDS` again.
STABLE_SECONDS = 60.0
# A store whose policy refuses the engine's keys is closed, and opened again after a pause:
# `REFUSED_PARTS` times as long as its opening and closing took, at most `REFUSED_SECONDS_MAX`, and
# not shorter than the pause would be after any other failure.
REFUSED_PARTS = 20
REFUSED_SECONDS_MAX = 60.0
# While this number of failed stores of one `FailSafeStore` are being closed, it opens no store.
CLOSING_MAX = 4
# Maximum time that `close` waits. The core waits 90 seconds for writes in progress.
CLOSE_SECONDS = 100.0
# Minimum time between two log lines about a failure of the same kind.
LOG_AGAIN_SECONDS = 60.0
REOPENING = "opening the store again"


def is_retriable(error: BaseException) -> bool:
    """Returns whether opening a store may succeed later with the same settings."""
    retriable = isinstance(error, RitornelloError | OSError | MemoryError)
    return retriable and not isinstance(error, SettingError)


class FailSafeStore:
    """A store of one process, opened at first use. Thread-safe.

    `count` is called with the name of each failed operation, except attempts to open the store
    again, closes of failed stores, and calls while the store is out of use. `broken` is the reason
    why the store is out of use, "" if it is not. `closed`: `close` was called. `on_open` is called
    after every reopening, on a thread that may block. Connectors add the calls they need in derived
    classes.
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
        # Failed stores for which the opener has not started a closing thread yet, and the closing
        # threads.
        self._failed: list[Store] = []
        self._closers: list[Thread] = []
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
        """Finishes running operations and releases the directory, within `CLOSE_SECONDS`: a store
        that a hung disk keeps open is left to the thread that closes it. Idempotent.
        """
        with self._lock:
            self.closed = True
            self._stop.set()
            store, self._store = self._store, None
            self.broken = self.broken or "closed"
        if store is not None:
            thread = _run_aside(lambda: self.attempt("close", store.close, None))
            if thread.is_alive():
                thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                self._logger.warning(
                    "ritornello: the store is still being closed after %.0f seconds, because its "
                    "disk does not answer: check the disk",
                    CLOSE_SECONDS,
                )

    def call(self, operation: str, action: "Callable[[Store], T]", default: D) -> T | D:
        """Returns `action(store)`, or `default` if it fails or no store is in use."""
        store = self._ensure_open()
        if store is None:
            return default
        try:
            return action(store)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a panic of the core
            if self._is_lost(error) and self._reopen_after(store, operation, error):
                self._count(operation)
                self._log_failure(operation, error, repeat=True)
            else:
                self.record_failure(operation, error)
            return default

    def _is_lost(self, error: BaseException) -> bool:
        """Returns whether the store must be opened again after a call failed with `error`."""
        return getattr(error, "kind", "") in ("fatal", "closed")

    def lease_prefix(
        self, scope: "Scope", keys: Sequence[bytes], ttl: float
    ) -> "LeasedPrefix | None":
        """Returns None if the call failed. May wait for the process that owns the store."""
        return self.call(
            "lease_prefix", lambda store: store.lease_prefix(scope, keys, ttl=ttl), None
        )

    def release(self, lease: Any) -> None:
        self.call("release", lambda store: store.release(lease), None)

    def hash_refusal(self, algorithm: str) -> str:
        """Returns why the store's policy refuses keys that `algorithm` made; "" if it accepts them
        or no store is in use.
        """
        known = self._hash_verdict
        if known is not None and known[:2] == (self._store, algorithm):
            return known[2]

        def check(store: "Store") -> str:
            reason = ""
            try:
                store.policy.check_hash(algorithm)
            except InvalidError as error:
                reason = str(error)
            self._hash_verdict = (store, algorithm, reason)
            return reason

        return self.call("policy", check, "")

    def expect_hash(self, algorithm: str) -> None:
        """Makes later openings check that the policy of the store accepts keys of `algorithm`. A
        store that refuses them is closed, and opened again later, because the policy, or the store
        at the path, may change.
        """
        self._hash = algorithm

    def permits_retention(self) -> bool:
        """Returns whether the store's policy permits requests to retain pages; logs the first
        refusal.
        """
        permitted = self.call("policy", lambda store: store.policy.allow_request_retention, None)
        if permitted is False and "retain" not in self._logged:
            self._logged["retain"] = monotonic()
            self._logger.warning(
                "ritornello: a request asked to retain its pages, which the store's policy.toml "
                "does not permit: the pages are not retained, and later requests of this kind are "
                "counted, not logged; to permit them, set `allow_request_retention = true`"
            )
        return bool(permitted)

    def attempt(self, operation: str, action: Callable[[], T], default: D) -> T | D:
        """Returns `action()`, or `default` if it fails. Runs it even if no store is in use."""
        try:
            return action()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a panic of the core
            self.record_failure(operation, error)
            return default

    def record_failure(self, operation: str, error: BaseException) -> None:
        """Counts a failure, and logs the first of its kind. Ignores a `ClosedError` while the store
        is out of use: the failure that took the store out of use was counted.
        """
        if getattr(error, "kind", "") == "closed" and self.broken:
            return
        self._count(operation)
        self._log_failure(operation, error)

    def _ensure_open(self) -> "Store | None":
        if self._store is None:
            if not self.broken:
                # Calls wait for the first attempt only: if it fails, `broken` is set and the opener
                # thread retries.
                with self._lock:
                    if self._store is None and not self.broken:
                        self._store = self.attempt("open", self._open_first, None)
            elif self._opener is not None and self._will_reopen() and not self._opener.is_alive():
                self._restart_opener()
        return self._store

    def _open_first(self) -> "Store":
        try:
            return self._open_accepted()
        except Exception as error:
            self._schedule_reopen("open", error, again=is_retriable(error))
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the core
            self.broken = f"open: {error}"
            raise

    def _open(self) -> "Store":
        return open_store(self._settings, self._logger)

    def _open_accepted(self) -> "Store":
        """Opens the store, and closes it if its policy refuses the keys of `expect_hash`."""
        began = monotonic()
        store = self._open()
        try:
            if self._hash:
                store.policy.check_hash(self._hash)
        except BaseException:
            self.attempt("close", store.close, None)
            pause = min(REFUSED_PARTS * (monotonic() - began), REFUSED_SECONDS_MAX)
            self._retry_pause = max(self._retry_pause, pause)
            raise
        return store

    def _reopen_after(self, store: "Store", operation: str, error: BaseException) -> bool:
        """Takes a failed store out of use and schedules its reopening. Returns False if another
        thread has done so.
        """
        with self._lock:
            if self._store is not store:
                return False
            self._store = self._hash_verdict = None
            if monotonic() - self._opened_at > STABLE_SECONDS:
                self._retry_pause = RETRY_SECONDS
            self._failed.append(store)
            self._schedule_reopen(operation, error, again=True)
            return True

    def _schedule_reopen(self, operation: str, error: BaseException, *, again: bool) -> None:
        """Marks the store unusable and, if it is to be opened `again`, starts the opener thread.
        Requires the lock.
        """
        self._lost_at = monotonic()
        self._set_broken(operation, error, again=again)
        if self._will_reopen():
            self._start_opener()

    def _set_broken(self, operation: str, error: BaseException, *, again: bool) -> None:
        self.broken = f"{operation}: {error}" + f"; {REOPENING}" * again

    def _will_reopen(self) -> bool:
        """Returns whether the store is to be opened again."""
        return self.broken.endswith(REOPENING) and not self._stop.is_set()

    def _start_opener(self) -> None:
        """Starts the opener thread. Requires the lock."""
        arguments = (ref(self), self._stop, self._retry_pause, self._failed, self._closers)
        self._opener = Thread(
            target=FailSafeStore._reopen_loop, args=arguments, name="ritornello-open", daemon=True
        )
        try:
            self._opener.start()
        except RuntimeError as reason:  # the next call tries again
            self._logger.debug("ritornello: cannot start a thread to open the store (%s)", reason)

    def _restart_opener(self) -> None:
        """Starts the opener thread again if a fork's child lacks it, or if it could not be
        started.
        """
        with self._lock:
            opener_ended = self._opener is not None and not self._opener.is_alive()
            if opener_ended and self._will_reopen():
                self._start_opener()

    @staticmethod
    def _reopen_loop(
        waiting: "ref[FailSafeStore]",
        stop: Event,
        pause: float,
        failed: "list[Store]",
        closers: list[Thread],
    ) -> None:
        """Body of the opener thread. Refers to the `FailSafeStore` strongly only during an attempt,
        so that the thread does not keep a dropped `FailSafeStore` alive.
        """
        while failed:
            closers.append(_run_aside(partial(_close_failed, failed.pop())))
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
            self._check_closers()
            store = self._open_accepted()
        except BaseException as error:  # also a panic of the core
            self._set_broken("open", error, again=is_retriable(error))
            self._log_failure("open", error, repeat=True)
            return self._will_reopen()
        if self._adopt(store):
            self.attempt("on_open", self.on_open, None)
        return False

    def _check_closers(self) -> None:
        """Raises RetryError if `CLOSING_MAX` failed stores are being closed, because each keeps its
        memory and open files until it is closed.
        """
        self._closers[:] = [thread for thread in self._closers if thread.is_alive()]
        if len(self._closers) >= CLOSING_MAX:
            raise RetryError(
                f"{CLOSING_MAX} failed stores are still being closed, because "
                "their disks do not answer: check the disks"
            )

    def _adopt(self, store: "Store") -> bool:
        """Puts a reopened store into use; returns False, and closes it, if `close` was called."""
        with self._lock:
            used = not self._stop.is_set()
            self._opened_at = monotonic()
            if used:
                self._store, self.broken = store, ""
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
        outcome = "counted as an error"
        if self.broken:
            self._outage_logged = True
            waits = self._will_reopen()
            outcome = "serving without the store" + (" until it can be opened again" * waits)
        # Formatted now: a retained log record must not keep the exception's frames alive.
        reason = f"{type(error).__name__}: {error}"
        self._logger.warning("ritornello: %s failed (%s); %s", operation, reason, outcome)


def _close_failed(store: "Store") -> None:
    try:
        store.close()
    except BaseException as error:  # the next attempt to open the store reports the cause
        logging.getLogger(__name__).debug("ritornello: closing a failed store failed (%s)", error)


def _run_aside(action: Callable[[], object]) -> Thread:
    """Starts `action` on a thread that the interpreter's exit does not wait for. If no thread can
    be started, runs it here and returns a thread that is not alive.
    """
    thread = Thread(target=action, name="ritornello-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        action()
    return thread
