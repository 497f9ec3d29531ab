"""The client for LMCache's `native_plugin`: one eventfd for all completions, and a result for each
key, except of a put, which succeeds or fails as a whole.

LMCache wraps the client in its own bridge, which keeps locks and usage in the memory of one process
and shows neither dtypes nor shapes: objects of equal size count as equal in format. `namespace`
separates objects that must not be confused.
"""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import Any, TypeAlias

from ritornello.lmcache.executor import LookupExecutor
from ritornello.lmcache.lmcache_objects import Item, Job, ObjectStore
from ritornello.lmcache.lookup import ObjectLookup
from ritornello.lmcache.naming import ObjectFormat, ObjectName, group_names, parse_name
from ritornello.lmcache.settings import Settings
from ritornello.staging_choice import wants_staging

# Number of the submission, success, reason of a failure, and success by key (None for a put).
Completion: TypeAlias = tuple[int, bool, str, list[bool] | None]


class NativeClient:
    """Parameters: see `settings.Settings`. While the store cannot be opened, lookups miss; the
    failure is logged. Thread-safe.
    """

    def __init__(self, **params: Any) -> None:
        from ritornello._core import Completions

        settings = Settings.parse(params)
        self._objects = ObjectStore(settings)
        self._lookups = LookupExecutor(self._objects.store.answers_at_once)
        self._lock = Lock()
        self._completions = Completions()
        self._completed: list[Completion] = []
        self._puts: set[int] = set()
        self._numbers = count(1)
        self._folders = settings.directories
        # The first writable buffer decides whether gets go through staging: all memory of LMCache
        # is assumed to be in pages of the same size.
        self._staging_undecided = True

    def event_fd(self) -> int:
        return self._completions.fileno()

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Starts to store objects. Their memory must not change until the submission is
        completed.
        """
        number = next(self._numbers)
        with self._lock:
            self._puts.add(number)
        return self._start(number, keys, memoryviews, is_put=True)

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Starts to load objects. Their memory must not be used until the submission is completed.
        An object of a different size is a miss.
        """
        return self._start(next(self._numbers), keys, memoryviews, is_put=False)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        number = next(self._numbers)
        lookup = ObjectLookup(self._objects, group_names(map(self._name, keys)), len(keys), 0)

        def query(expired: bool) -> bool:
            store = self._objects.store
            done = None if expired else store.attempt("look", lookup.advance, None)
            if done is None:
                store.attempt("cancel_lookup", lookup.cancel, None)
            if done is not False:
                self._complete((number, True, "", lookup.found))
            return done is False

        self._lookups.submit(query)
        return number

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        number, none = next(self._numbers), [False] * len(keys)
        groups = group_names(map(self._name, keys))

        def delete() -> list[bool]:
            return self._objects.delete(groups, len(keys))

        def query(expired: bool) -> None:
            deleted = none if expired else self._objects.store.attempt("delete", delete, none)
            reason = "the deletion waited too long, or the client was closed" if expired else ""
            self._complete((number, not expired, reason, deleted))

        self._lookups.submit(query)
        return number

    def drain_completions(self) -> list[Completion]:
        """Clears the eventfd and returns the completions since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.event_fd())
        with self._lock:
            for job in self._objects.complete_tickets(self._completions.drain()):
                self._completed.append(self._completion_of(job))
            completed, self._completed = self._completed, []
        return completed

    def close(self) -> None:
        """Gives up queued lookups and deletions, finishes running operations, and releases the
        directory. Idempotent.
        """
        self._lookups.close()
        self._objects.store.close()

    def _name(self, key: str) -> ObjectName | None:
        try:
            return parse_name(key)
        except ValueError as error:
            self._objects.store.record_failure("name", error)
            return None

    def _items(self, keys: Sequence[str], memories: Sequence[Any]) -> list[Item | None]:
        items: list[Item | None] = []
        for key, memory in zip(keys, memories, strict=True):
            name, nbytes = self._name(key), memory.nbytes
            if self._staging_undecided and nbytes and not memoryview(memory).readonly:
                self._staging_undecided = False
                place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                self._objects.staged = wants_staging(self._folders, place, nbytes)
            items.append(Item(name, ObjectFormat(nbytes), memory) if name and nbytes else None)
        return items

    def _start(
        self, number: int, keys: Sequence[str], memories: Sequence[Any], *, is_put: bool
    ) -> int:
        items = self._items(keys, memories)
        job = self._objects.start(number, items, self._completions, is_put=is_put)
        if job is not None:
            with self._lock:
                completion = self._completion_of(job)
            self._complete(completion)
        return number

    def _completion_of(self, job: Job) -> Completion:
        """Returns the completion of a job. A get always succeeds; a put fails if any object was not
        stored.
        """
        if job.number not in self._puts:
            return job.number, True, "", job.ok
        self._puts.discard(job.number)
        stored = all(job.ok)
        return job.number, stored, "" if stored else "at least one object was not stored", None

    def _complete(self, completion: Completion) -> None:
        with self._lock:
            self._completed.append(completion)
        os.eventfd_write(self.event_fd(), 1)
