"""SGLang's storage backend: moves pages between SGLang's host pools and the store.

A host pool is SGLang's buffer in host memory for one kind of cache data. The main pool, `kv`, holds
K and V; side pools hold further parts of a page, such as the states of Mamba layers.

SGLang calls from three threads of each rank (lookup, read, write) and from its scheduler. An
unsupported configuration raises an exception when the backend is attached; later calls raise none.
"""

# SGLang is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

import logging
from collections.abc import Callable, Sequence
from threading import local
from typing import Any, TypeVar

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.version import __version__

from ritornello.connector.identity import EPOCH_WARNING
from ritornello.connector.interface import accept_defaults
from ritornello.sglang.cache_store import SGLangCacheStore
from ritornello.sglang.early_lookups import EarlyLookups
from ritornello.sglang.engine import dcp_size_of, engine_of, is_first_rank, is_storage_writer
from ritornello.sglang.hits import SidePool
from ritornello.sglang.hooks import (
    hashes_of,
    storage_named_at_start,
    watch_prefills,
    watch_prompts,
    watch_transfers,
)
from ritornello.sglang.identity import KV, keys_of
from ritornello.sglang.interface import INTERFACE, interface_difference, watch_obstacle
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.metrics import metrics_of
from ritornello.sglang.pools import LogicalPool, Pool
from ritornello.sglang.prefills import prefills
from ritornello.sglang.prompts import UNKNOWN, prompts
from ritornello.sglang.read_ahead import Paces, ReadAhead
from ritornello.sglang.settings import Settings
from ritornello.sglang.store import SGLangStore
from ritornello.sglang.transfers import Transfer
from ritornello.sglang.updates import updates

logger = logging.getLogger("ritornello.sglang")

WATCHED = (WeightUpdater, SchedulerWeightUpdaterManager, HiCacheController)

INTERFACE.require(
    interface_difference(HiCacheStorage, HiCacheStorageConfig, PoolTransfer, PoolTransferResult)
    or watch_obstacle(*WATCHED),
    __version__,
)

T = TypeVar("T")


class RitornelloStorage(HiCacheStorage):
    """One instance for each rank. The constructor raises ValueError for unsupported settings: the
    storage is then not attached. While the store cannot be opened, every lookup misses.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        settings = Settings.parse(extra)
        dcp_size = dcp_size_of(storage_config)
        if dcp_size > 1:
            raise ValueError(
                f"ritornello does not serve decode context parallel size {dcp_size} yet: start "
                "SGLang with size 1, or without this storage"
            )
        self._config = storage_config
        self._in_place = bool(extra.get("interface_v1"))
        if settings.has_remote and not self._in_place:
            settings = settings.without_write_through()
            logger.warning(
                'ritornello: pages are not written to the remote, because with "interface_v1": 0 '
                "SGLang stores pages without the keys before them; set it to 1"
            )
        self._split = 1
        if storage_config.should_split_heads and storage_config.tp_lcm_size:
            self._split = storage_config.tp_lcm_size // storage_config.tp_size
        self._meter = RateMeter(metrics_of(storage_config))
        self._epoch = updates.flushed
        kind = SGLangCacheStore if settings.tiers else SGLangStore
        self._store = kind(settings, self._meter, lambda: self._epoch != updates.epoch)
        self._store.open()
        # `reads`: the `ReadAhead` of the last transfer of the thread. The attribute is missing or
        # None if no transfer ran, or if its pages are unknown.
        self._on_thread = local()
        self._paces = Paces()
        watch_transfers()
        if settings.tiers:
            watch_prompts()
            if settings.gate == "auto":
                watch_prefills(self._store.record_prefill)
        self._has_remote = settings.has_remote
        self._early = EarlyLookups(
            self._store, lambda: self._pools.get(KV), hashes_of, self._side_pools
        )
        self._engine = engine_of(storage_config).at(self._epoch)
        self._pools: dict[str, Pool | LogicalPool] = {}
        if self._engine.model.epoch:
            logger.warning(f"ritornello: {EPOCH_WARNING}", "saved")

    # Attach and detach.

    @property
    def uses_prompts(self) -> bool:
        """Whether lookups and puts use the keys of all pages before the first page of the call."""
        return self._store.uses_prompts

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", mem_pool_host) is None:
            self._pools[KV] = LogicalPool(self._store)
        else:
            self._add_pool(KV, mem_pool_host, self._in_place)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        # SGLang also passes the main pool, which `register_mem_pool_host` has added.
        if host_pool is not self.mem_pool_host:
            self._add_pool(name, host_pool, True)

    def close(self) -> None:
        """Finishes running operations and drops references to SGLang's memory. Later lookups and
        gets miss, and later puts store nothing.
        """
        if self._store.closed:
            return
        prefills.record = None
        self._early.close()
        counts = ", ".join(f"{name} {value:g}" for name, value in sorted(self.counts().items()))
        logger.info(
            "ritornello: detached; %s", counts or "no pages were looked up, loaded or stored"
        )
        self._store.close()
        self._pools = {}

    def on_flush(self) -> None:
        """Begins an epoch if the weights changed since the last flush. Called when a flush ends:
        SGLang then holds no page that it computed before the change, and none of its storage
        threads is in a call.
        """

        def action() -> None:
            engine = self._engine.at(updates.epoch)
            for pool in self._pools.values():
                pool.describe(engine)
            self._store.forget()
            self._engine, self._epoch = engine, updates.epoch
            logger.warning(
                "ritornello: the weights changed; a new epoch begins, in which pages stored before "
                "are not found"
            )

        if self._epoch != updates.epoch:
            self._store.attempt("new epoch", action, None)

    def on_prefetch_begin(self, operation: Any) -> None:
        """Begins to look up, on the remote, the pages of an operation that SGLang has queued."""
        if self._has_remote and not operation.assume_stored:
            self._early.begin(operation)

    def on_prefetch_end(self, operation: Any) -> None:
        """Ends the lookup of an operation that SGLang's scheduler ended because the request was
        aborted or no longer waits for the lookup.
        """
        keys = operation.all_hash_values
        if keys:
            self._store.cancel_lookup(keys_of(keys[-1:]))
        elif self._has_remote:
            self._early.end(operation)

    def on_transfer_begin(self, transfer: Transfer | None) -> None:
        """Makes later calls of this thread read the batches of `transfer` ahead."""
        reads = None if transfer is None else ReadAhead(transfer, self._store, self._paces)
        self._on_thread.reads = reads

    def on_transfer_end(self) -> None:
        """Ends the reads that this thread began ahead: SGLang may reuse their memory afterwards.
        The closed object stays: the thread reads windows and states of the same operation next.
        """
        reads = getattr(self._on_thread, "reads", None)
        if reads is not None:
            reads.close()

    def clear(self) -> None:
        """Deletes the pages of this rank's pools in the current epoch; other scopes of the store
        stay.
        """
        for pool in self._pools.values():
            for scope in pool.scopes:
                self._store.drop(scope)

    # Without `interface_v1`: SGLang passes copies of pages, each in one contiguous tensor.

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        locations = None if target_location is None else [target_location]
        return self.batch_get([key], locations)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        def action(pool: Pool | LogicalPool) -> list[torch.Tensor | None]:
            pages = target_locations or [pool.new_page() for _ in keys]
            reads = getattr(self._on_thread, "reads", None)
            if reads is None or isinstance(pool, LogicalPool):
                pages = pages[: pool.get_flat(keys_of(keys), pages)]
            else:
                pages = reads.get_flat(pool, keys_of(keys), pages)
            return [*pages, *[None] * (len(keys) - len(pages))]

        return self._on_kv("get", action, [None] * len(keys))

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        def action(pool: Pool | LogicalPool) -> bool:
            pages = [None if page is None else page.contiguous() for page in values or []]
            return self._is_written_by_another_rank(pool) or (
                pool.put_flat(keys_of(keys), pages, None) == len(keys)
            )

        return self._on_kv("put", action, False)

    # Lookups with and without `interface_v1`; with it, gets and puts, for which SGLang passes
    # positions in its host memory.

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        def action(pool: Pool | LogicalPool) -> int:
            return pool.leading(keys_of(keys), self._before_lookup(extra_info))

        found = self._on_kv("probe", action, 0)
        self._meter.probed(len(keys), found)
        return found

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        filled = self._on_kv("get", lambda pool: self._get(pool, host_indices, keys_of(keys)), 0)
        return _leading(filled, keys)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        def action(pool: Pool | LogicalPool) -> int:
            if self._is_written_by_another_rank(pool):
                return len(keys)
            return pool.put(keys_of(keys), host_indices, self._before(extra_info))

        return _leading(self._on_kv("put", action, 0), keys)

    # Calls for pages with parts in several pools.

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        def action(pool: Pool | LogicalPool) -> PoolTransferResult:
            page_keys, before = keys_of(keys), self._before_lookup(extra_info)
            found = pool.prefixes(page_keys, before, self._side_pools(pool_transfers or ()))
            return PoolTransferResult(found.pages, dict(found.pools), found.restorable)

        found = self._on_kv("probe", action, PoolTransferResult(0, {}, []))
        self._meter.probed(len(keys), found.kv_hit_pages)
        return found

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return self._for_each_pool(transfers, "get", self._get)

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        def action(pool: Pool | LogicalPool, indices: Any, keys: list[bytes]) -> int:
            if self._is_written_by_another_rank(pool):
                return len(keys)
            return pool.put(keys, indices, None)

        return self._for_each_pool(transfers, "put", action)

    # Metrics.

    def get_stats(self) -> StorageMetrics | None:
        """Returns pages and GB/s of each transfer since the last call of this method, for SGLang's
        metrics.
        """
        if not self._config.enable_storage_metrics:
            return None
        self._store.report()
        rates = self._meter.take_rates()
        return StorageMetrics(
            prefetch_pgs=rates.prefetch_pages,
            backup_pgs=rates.backup_pages,
            prefetch_bandwidth=rates.prefetch_bandwidth,
            backup_bandwidth=rates.backup_bandwidth,
        )

    def counts(self) -> dict[str, float]:
        """Returns all counts since the start, by the names in `COUNTERS` and `REASONS` of
        `metrics`.
        """
        return self._meter.counts()

    def _get(self, pool: Pool | LogicalPool, indices: Any, keys: list[bytes]) -> int:
        reads = getattr(self._on_thread, "reads", None)
        if reads is None or isinstance(pool, LogicalPool):
            return pool.get(keys, indices)
        return int(reads.get(pool, keys, indices))

    def _add_pool(self, name: str, host: Any, in_place: bool) -> None:
        """Adds a pool. If this fails, lookups in the pool miss, and the reason is logged once."""

        def action() -> None:
            pool = Pool(
                name,
                host,
                lambda first, past: torch.arange(first, past, dtype=torch.int64),
                self._store,
                self._meter,
                in_place=in_place,
                split=self._split,
                counts_tokens=name == KV and is_first_rank(self._config),
            )
            pool.describe(self._engine)
            self._pools[name] = pool
            way = "in place" if pool.in_place else "copied"
            logger.info("ritornello: pool %s, pages of %d bytes, %s", name, pool.page_bytes, way)

        self._store.attempt(f"pool {name}", action, None)

    def _side_pools(self, transfers: Sequence[PoolTransfer]) -> list[SidePool]:
        pools = [self._pools.get(str(transfer.name)) for transfer in transfers]
        return [
            SidePool.of(transfer, () if pool is None else pool.scopes)
            for transfer, pool in zip(transfers, pools, strict=True)
        ]

    def _for_each_pool(
        self,
        transfers: Sequence[PoolTransfer],
        operation: str,
        action: Callable[[Pool | LogicalPool, Any, list[bytes]], int],
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            pool = self._pools.get(str(transfer.name))
            done = 0
            if pool is not None and keys:
                done = self._store.attempt(
                    operation,
                    lambda pool=pool, transfer=transfer, keys=keys: action(  # type: ignore[misc]
                        pool, transfer.host_indices, keys_of(keys)
                    ),
                    0,
                )
            results[transfer.name] = _leading(done, keys)
        return results

    def _before(self, extra_info: HiCacheStorageExtraInfo | None) -> list[bytes] | None:
        """Returns the keys of the pages before a call's first page, None if they are unknown. A
        store without tiers uses the last key only.
        """
        before = extra_info.prefix_keys if extra_info is not None else None
        if before is None or UNKNOWN in before[:1]:
            return None
        return keys_of(before if self.uses_prompts else before[-1:])

    def _before_lookup(self, extra_info: HiCacheStorageExtraInfo | None) -> list[bytes] | None:
        """Returns the keys of the pages before a lookup's first page, None if they are unknown. If
        `prompts` wraps SGLang's lookups, a lookup without `prefix_keys` begins with the prompt's
        first page, so no pages are before it.
        """
        if prompts.watched and (extra_info is None or extra_info.prefix_keys is None):
            return []
        return self._before(extra_info)

    def _is_written_by_another_rank(self, pool: Pool | LogicalPool) -> bool:
        """Returns whether all ranks hold the same bytes in `pool`, and another rank writes them."""
        return pool.replicated and not is_storage_writer(self._config)

    def _on_kv(self, operation: str, action: Callable[[Pool | LogicalPool], T], default: T) -> T:
        pool = self._pools.get(KV)
        if pool is None:
            return default
        return self._store.attempt(operation, lambda: action(pool), default)


def _leading(done: int, keys: Sequence[Any]) -> list[bool]:
    return [place < done for place in range(len(keys))]


accept_defaults(RitornelloStorage, HiCacheStorage)
# If SGLang was started without a storage, its weights may have been updated before this module
# observed updates, so begin an epoch.
if updates.watch(*WATCHED) and not storage_named_at_start():
    updates.begin()
