"""The L2 adapter: the only module that imports LMCache, with all methods that LMCache calls on a
plugin.

The adapter has no transfer threads: the core's tickets signal LMCache's poll loops through one
eventfd for stores and one for loads, and LMCache takes the results when it polls.
"""

# LMCache is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

import ctypes
import os
from functools import lru_cache, partial
from itertools import count, islice
from threading import Lock, Thread
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryFormat

from ritornello._core import Completions
from ritornello.connector.interface import accept_defaults
from ritornello.connector.meter import Counts
from ritornello.lmcache.executor import LookupExecutor
from ritornello.lmcache.interface import INTERFACE, interface_difference
from ritornello.lmcache.listing import list_objects
from ritornello.lmcache.lmcache_objects import Item, Job, ObjectStore
from ritornello.lmcache.locks import Locks
from ritornello.lmcache.lookup import ObjectLookup
from ritornello.lmcache.metrics import publish
from ritornello.lmcache.naming import (
    Family,
    ObjectFormat,
    ObjectName,
    group_objects,
    page_key,
    split_key,
)
from ritornello.lmcache.settings import Settings
from ritornello.lmcache.views import owning_view
from ritornello.staging_choice import wants_staging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener
    from lmcache.v1.memory_management import MemoryObj

INTERFACE.require(interface_difference(L2AdapterInterface, ObjectKey), lmcache.__version__)

# LMCache unlocks objects when their load or request ends. Locks that LMCache does not release end
# after this time, the default of LMCache's own read locks.
LEASE_SECONDS = 300.0
# Maximum number of stored keys that one call reports to a listener.
SEED_KEYS = 10_000


class RitornelloL2Adapter(L2AdapterInterface):
    """`params`: see `settings.Settings`. While the store cannot be opened, lookups miss; the
    failure is logged.
    """

    def __init__(
        self, params: dict[str, Any], l1_memory_desc: "L1MemoryDesc | None" = None
    ) -> None:
        settings = Settings.parse(params)
        self._objects = ObjectStore(settings)
        self._path = settings.path or settings.tiers[0]
        capacity = self._objects.store.capacity()
        super().__init__(max_capacity_bytes=capacity)
        self._lookups = LookupExecutor(self._objects.store.answers_at_once)
        self._locks = Locks(LEASE_SECONDS)
        self._lock = Lock()
        self._l1_memory, self._l1_start = _l1_memory(l1_memory_desc)
        if self._l1_memory is not None:
            nbytes = self._l1_memory.nbytes
            folders = settings.directories
            self._objects.staged = wants_staging(folders, self._l1_start, nbytes)
        self._stores, self._loads = Completions(), Completions()
        self._lookup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._tasks: dict[int, tuple[list[ObjectKey], list[int]]] = {}
        self._finished_stores: list[Job] = []
        # Bitmaps of finished lookups, oldest first, and when their leases end.
        self._lookup_results: dict[int, tuple[Any, float]] = {}
        self._load_results: dict[int, Any] = {}
        self._numbers = count(1)
        self._closed = False
        # The name is not `_listeners`, because LMCache's base class has a list of this name.
        self._own_listeners: list[L2AdapterListener] = []
        self._objects.store.on_open = self._reopened
        publish(self, RitornelloL2Adapter.counts, ", ".join(settings.directories))
        # If the capacity is still unknown, ask again: a store that was reopened before `on_open`
        # was set did not call `_reopened`.
        self._max_capacity_bytes = capacity or self._objects.store.capacity()

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_fd

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    # Stores.

    def submit_store_task(self, keys: list[ObjectKey], objects: "list[MemoryObj]") -> int:
        number, items = self._start_task(keys, objects)
        job = self._objects.start(number, items, self._stores, is_put=True)
        if job is not None:
            with self._lock:
                self._finished_stores.append(job)
            os.eventfd_write(self.get_store_event_fd(), 1)
        return number

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        results, keys_stored, sizes_stored = {}, [], []
        # Without the lock, because the deletion of objects whose memory was freed may wait for a
        # disk. Only LMCache's store controller, one thread, calls this.
        completed = self._objects.complete_tickets(self._stores.drain())
        with self._lock:
            jobs = self._finished_stores + completed
            self._finished_stores = []
            for job in jobs:
                keys, sizes = self._tasks.pop(job.number)
                done = [at for at, ok in enumerate(job.ok) if ok]
                keys_stored += [keys[at] for at in done]
                sizes_stored += [sizes[at] for at in done]
                moved = sum(sizes[at] for at in done)
                results[job.number] = L2StoreResult(len(done) == len(keys), moved)
        if keys_stored:
            self._notify_keys_stored(keys_stored, sizes_stored)
        return results

    # Lookups.

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: "dict[int, MemoryLayoutDesc]"
    ) -> int:
        number = next(self._numbers)
        begin = partial(self._begin_lookup, keys, group_layout_descs)
        lookup = self._objects.store.attempt("look", begin, None)
        self._lookups.submit(partial(self._advance_lookup, number, lookup, len(keys)))
        return number

    def _begin_lookup(
        self, keys: list[ObjectKey], group_layout_descs: "dict[int, MemoryLayoutDesc]"
    ) -> ObjectLookup:
        expected = {
            group: _format_of(tuple(desc.shapes), tuple(desc.dtypes))
            for group, desc in group_layout_descs.items()
        }
        groups = group_objects(keys)
        return ObjectLookup(self._objects, groups, len(keys), LEASE_SECONDS, expected)

    def _advance_lookup(
        self, number: int, lookup: ObjectLookup | None, count: int, expired: bool
    ) -> bool:
        """Continues a lookup, or completes it. Returns whether it is to be continued."""
        store = self._objects.store
        found = [False] * count
        if lookup is not None:
            done = None if expired else store.attempt("look", lookup.advance, None)
            if done is False:
                return True
            if done is None:
                store.attempt("cancel_lookup", lookup.cancel, None)
            found = lookup.found
            for lease, family, pinned in lookup.leases:
                self._locks.lock(family, pinned, lease)
        with self._lock:
            # This lookup may end after `close`, which closes the adapter's eventfd for lookups.
            if not self._closed:
                self._drop_unclaimed()
                self._lookup_results[number] = (_bitmap(found), monotonic() + LEASE_SECONDS)
                os.eventfd_write(self._lookup_fd, 1)
        return False

    def _drop_unclaimed(self) -> None:
        """Examines the two oldest results, and drops a result that LMCache did not take before its
        leases ended: LMCache never takes the results of requests that it aborts.
        """
        now = monotonic()
        for number in list(islice(self._lookup_results, 2)):
            if self._lookup_results[number][1] < now:
                del self._lookup_results[number]

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._lookup_results.pop(task_id, (None, 0.0))[0]

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        unneeded = [
            lease
            for family, _, pinned in group_objects(keys)
            for lease in self._locks.unlock(family, pinned)
        ]

        def query(expired: bool) -> None:
            # Release the leases even if the query has expired: otherwise the leases keep the
            # objects until `LEASE_SECONDS` have passed. A release does not wait for an owner that
            # is known not to answer.
            for lease in unneeded:
                self._objects.store.release(lease)

        if unneeded:
            self._lookups.submit(query)

    # Loads.

    def submit_load_task(self, keys: list[ObjectKey], objects: "list[MemoryObj]") -> int:
        number, items = self._start_task(keys, objects)
        job = self._objects.start(number, items, self._loads, is_put=False)
        if job is not None:
            with self._lock:
                self._finish_load(job)
            os.eventfd_write(self.get_load_event_fd(), 1)
        return number

    def query_load_result(self, task_id: int) -> Any:
        accessed: list[ObjectKey] = []
        with self._lock:
            for job in self._objects.complete_tickets(self._loads.drain()):
                accessed += self._finish_load(job)
            result = self._load_results.pop(task_id, None)
        if accessed:
            self._notify_keys_accessed(accessed)
        return result

    def _finish_load(self, job: Job) -> list[ObjectKey]:
        keys, _ = self._tasks.pop(job.number)
        self._load_results[job.number] = _bitmap(job.ok)
        return [key for key, ok in zip(keys, job.ok, strict=True) if ok]

    # Deletion, listing and usage.

    def delete(self, keys: list[ObjectKey]) -> None:
        """Deletes objects. Reports all `keys` to listeners as deleted, even if the store has
        evicted the objects before, or could not delete them.
        """
        if keys:
            self._objects.delete(group_objects(keys), len(keys))
            self._notify_keys_deleted(keys, [0] * len(keys))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        stored = [
            (family, scope, objects)
            for family, _, scope, objects in self._objects.formats.stored_formats()
            if model_name in (None, family.model)
        ]
        listed, following = list_objects(stored, self._objects.store.keys, page_size, cursor)
        entries = (KeyEntry(_encoded(family, key), nbytes) for family, key, nbytes in listed)
        return KeyListPage(tuple(entries), following)

    def get_usage(self) -> AdapterUsage:
        """Returns the bytes of the stored objects, in all and by salt, including objects that other
        processes stored.
        """
        used = self._objects.usage()
        return AdapterUsage(sum(used.values()), self._max_capacity_bytes, MappingProxyType(used))

    def register_listener(self, listener: "L2AdapterListener") -> None:
        """Registers a listener and reports all stored keys to it, so that LMCache can evict
        them.
        """
        super().register_listener(listener)
        self._own_listeners.append(listener)
        seed = Thread(target=self._seed, args=(listener,), name="ritornello-seed", daemon=True)
        # If no thread can be started, LMCache does not learn of the keys and evicts none of them:
        # only the store evicts them.
        self._objects.store.attempt("seed", seed.start, None)

    def report_status(self) -> dict[str, Any]:
        store = self._objects.store
        problem = store.problem()
        return {
            "is_healthy": not problem,
            "type": type(self).__name__,
            "path": self._path,
            "is_owner": store.is_owner(),
            "problem": problem,
            "locked_objects": len(self._locks),
            "counts": self.counts(),
        }

    def counts(self) -> Counts:
        """Returns all counts since the start, by the names in `COUNTERS` and `REASONS` of
        `metrics`.
        """
        store = self._objects.store
        return store.meter.counts() | store.stats_counts()

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._lookups.close()
            self._objects.store.close()
            self._locks.clear()
            os.close(self._lookup_fd)

    def _start_task(
        self, keys: list[ObjectKey], objects: "list[MemoryObj]"
    ) -> tuple[int, "Sequence[Item | None]"]:
        number, items, sizes = next(self._numbers), [], []
        for key, obj in zip(keys, objects, strict=True):
            item = None
            try:
                item = self._item(key, obj)
            except Exception as error:
                self._objects.store.record_failure("object", error)
            items.append(item)
            sizes.append(item.format.nbytes if item is not None else 0)
        with self._lock:
            self._tasks[number] = (list(keys), sizes)
        return number, items

    def _item(self, key: ObjectKey, obj: "MemoryObj") -> Item:
        family = Family(key.model_name, key.object_group_id, key.cache_salt)
        name = ObjectName(family, page_key(key.kv_rank, key.chunk_hash))
        nbytes, meta = obj.get_size(), obj.meta
        shapes = tuple(meta.shapes) if meta.shapes else (meta.shape,)
        dtypes = tuple(meta.dtypes) if meta.dtypes else (meta.dtype,)
        layout = _layout(shapes, dtypes, meta.fmt)
        if self._l1_memory is not None:
            at = obj.data_ptr - self._l1_start
            if 0 <= at <= len(self._l1_memory) - nbytes:
                view = owning_view(obj, obj.data_ptr)
                return Item(name, ObjectFormat(nbytes, layout), view, obj)
        return Item(name, ObjectFormat(nbytes, layout), owning_view(obj), obj)

    def _reopened(self) -> None:
        """Handles a reopened store: its leases have ended and its contents may differ."""
        self._locks.clear()
        self._max_capacity_bytes = self._objects.store.capacity()
        for listener in [*self._own_listeners]:
            self._seed(listener)

    def _seed(self, listener: "L2AdapterListener") -> None:
        cursor: str | None = None
        try:
            while not self._closed:
                page = self.list_l2_keys(None, SEED_KEYS, cursor)
                if page.entries:
                    listener.on_l2_keys_stored(
                        [entry.key.to_object_key() for entry in page.entries],
                        [entry.size_bytes for entry in page.entries],
                    )
                cursor = page.next_page_token
                if cursor is None:
                    return
        except Exception as error:
            self._objects.store.record_failure("seed", error)


accept_defaults(RitornelloL2Adapter, L2AdapterInterface)


def _l1_memory(desc: "L1MemoryDesc | None") -> tuple[memoryview | None, int]:
    """Returns a view of the memory in which LMCache allocates objects, and the memory's address.
    Returns (None, 0) if `desc` names no memory.
    """
    if desc is None or not desc.size or not desc.ptr:
        return None, 0
    return memoryview((ctypes.c_ubyte * desc.size).from_address(desc.ptr)), desc.ptr


def _bitmap(bits: "Sequence[bool]") -> Any:
    if all(bits):
        return Bitmap(len(bits), len(bits))
    bitmap = Bitmap(len(bits))
    bitmap.batched_set([at for at, bit in enumerate(bits) if bit])
    return bitmap


@lru_cache(maxsize=256)
def _layout(shapes: tuple[Any, ...], dtypes: tuple[Any, ...], fmt: Any = None) -> str:
    """Returns dtypes and shapes as text, followed by LMCache's memory format `fmt`, if given.
    Cached: an engine has few layouts, and every transfer needs one.
    """
    each = zip(shapes, dtypes, strict=True)
    layout = "+".join(
        f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]" for shape, dtype in each
    )
    return layout if fmt is None else f"{layout}@{fmt.name}"


@lru_cache(maxsize=256)
def _format_of(shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> ObjectFormat:
    """Returns the format of objects that LMCache allocates in its memory for a layout."""
    each = zip(shapes, dtypes, strict=True)
    nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in each)
    return ObjectFormat(nbytes, _layout(shapes, dtypes, MemoryFormat.KV_2LTD))


def _encoded(family: Family, key: bytes) -> EncodedObjectKey:
    kv_rank, chunk_hash = split_key(key)
    return EncodedObjectKey(chunk_hash.hex(), family.model, kv_rank, family.group, family.salt)
