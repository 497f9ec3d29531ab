"""KV of drafts in SGLang's hierarchical cache. On CPUs SGLang drafts with compiled kernels, which
this environment lacks, so these tests run the functions of SGLang that build the host pool of a
draft, and that look up, back up and prefetch its pages.
"""

from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Attach
from hosts import PAGE, controller, fill, mha, mla, page_bytes, slots
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer, SidecarPoolSpec
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

# Positions in the host pools: pages are backed up from `FROM`, and prefetched to `TO`.
FROM, TO = [3, 1, 4, 2, 0], [5, 11, 6, 8, 7]
TOKENS = list(range(1, len(FROM) * PAGE + 1))


def draft_pool(host: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[SidecarPoolSpec, Any]:
    """Returns what SGLang builds for a draft model of one layer beside the target's host pool
    `host`: the description of the draft's pool, and the host pool.
    """
    options = SimpleNamespace(hicache_mem_layout=host.layout)
    monkeypatch.setattr(hybrid_pool_assembler, "get_memory", lambda: options)
    monkeypatch.setattr(hybrid_pool_assembler, "get_allocator_type", lambda: "default")
    group = SimpleNamespace(logical_size=host.size)
    target = SimpleNamespace(mem_pool_host=group, page_size=PAGE, transfer_layer_id_max=4)
    drafting = MHATokenToKVPool(
        size=host.size,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=64,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    (spec,), (entry,) = hybrid_pool_assembler.build_hicache_draft_sidecars(
        draft_device_pools=(drafting,), tree_cache=SimpleNamespace(cache_controller=target)
    )
    assert (spec.pool_name, spec.indices_from_pool) == (PoolName.DRAFT, PoolName.KV)
    assert entry.name == PoolName.DRAFT
    return spec, entry.host_pool


class Cache:
    """SGLang's cache controller of an engine with the side pools `specs`. `writes`: this rank
    writes the pages that all ranks hold.
    """

    def __init__(
        self, host: Any, storage: Any, *specs: SidecarPoolSpec, writes: bool = True
    ) -> None:
        made = self._control = controller(host, storage)
        made.__class__ = HybridCacheController
        made.mem_pool_host = SimpleNamespace(layout_lease=nullcontext)
        made.page_get_func, made.page_set_func = made._page_get_zero_copy, made._page_set_zero_copy
        made.storage_config = SimpleNamespace(is_storage_writer=writes)
        made.storage_backend_type = "dynamic"
        made.prefetch_sync_queue = Queue()
        self._host, self._specs = host, specs

    def backup(self, keys: list[str]) -> int:
        """Returns how many leading tokens of the main pool were stored."""
        pages = slots(self._host, FROM[: len(keys)])
        operation = StorageOperation(pages, [], hash_value=keys, pool_transfers=self._sides())
        self._control._page_backup(operation)
        return int(operation.completed_tokens)

    def look_up(self) -> tuple[list[str], int]:
        """Returns the keys of the pages that can be loaded, and their number of tokens."""
        keys, tokens = self._control._storage_hit_query(self._prefetch())
        return keys, tokens

    def prefetch(self, keys: list[str]) -> int:
        """Returns how many leading tokens were loaded into all pools."""
        operation = self._prefetch()
        operation.hash_value, operation.host_indices = keys, slots(self._host, TO[: len(keys)])
        self._control._page_transfer(operation)
        return int(self._control.prefetch_sync_queue.get_nowait().completed_tokens)

    def _prefetch(self) -> PrefetchOperation:
        return PrefetchOperation(SimpleNamespace(rid="test"), TOKENS, pool_transfers=self._sides())

    def _sides(self) -> list[PoolTransfer]:
        return [
            PoolTransfer(
                name=spec.pool_name,
                hit_policy=spec.hit_policy,
                indices_from_pool=spec.indices_from_pool,
            )
            for spec in self._specs
        ]


def keys_of_tokens(host: Any, storage: Any) -> list[str]:
    """Returns SGLang's keys of the pages of `TOKENS`."""
    asked = PrefetchOperation(SimpleNamespace(rid="test"), TOKENS)
    Cache(host, storage)._control._storage_hit_query(asked)
    return list(asked.all_hash_values)


def contents(host: Any, pages: list[int]) -> list[bytes]:
    return [page_bytes(host, page) for page in pages]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(mha, "layer_first"), (mha, "page_first"), (mha, "page_first_direct"), (mla, "page_first")],
)
def test_draft_pool_is_stored_and_loaded_with_main_pool(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, kind: Any, layout: str
) -> None:
    host = kind(layout)
    spec, draft = draft_pool(host, monkeypatch)
    pools = (host, draft)
    for seed, pool in enumerate(pools):
        fill(pool, seed)
    storage = attach(host, (spec.pool_name, draft), is_mla_model=kind is mla)
    cache = Cache(host, storage, spec)
    keys = keys_of_tokens(host, storage)
    assert cache.look_up() == ([], 0)
    assert cache.backup(keys) == len(TOKENS)
    expected = [contents(pool, FROM) for pool in pools]
    others = [page for page in range(host.page_num) if page not in TO]
    for pool in pools:
        fill(pool, 9)
    kept = [contents(pool, others) for pool in pools]
    assert cache.look_up() == (keys, len(TOKENS))
    assert cache.prefetch(keys) == len(TOKENS)
    assert [contents(pool, TO) for pool in pools] == expected
    assert [contents(pool, others) for pool in pools] == kept


def test_pages_without_kv_of_draft_are_misses(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages after the third were stored by an engine without a draft."""
    host = mha("page_first")
    spec, draft = draft_pool(host, monkeypatch)
    storage = attach(host, (spec.pool_name, draft))
    drafting, plain = Cache(host, storage, spec), Cache(host, storage)
    keys = keys_of_tokens(host, storage)
    assert drafting.backup(keys[:3]) == 3 * PAGE
    assert plain.backup(keys) == len(TOKENS)
    assert plain.look_up() == (keys, len(TOKENS))
    assert drafting.look_up() == (keys[:3], 3 * PAGE)
    assert drafting.prefetch(keys) == 3 * PAGE


def test_draft_kv_of_ranks_that_write_nothing_is_missing(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With latent attention, SGLang writes pages on one rank, also if the KV of the draft differs
    by rank.
    """
    host = mla("page_first")
    spec, draft = draft_pool(host, monkeypatch)
    ranks = []
    for rank in range(2):
        storage = attach(host, (spec.pool_name, draft), is_mla_model=True, tp_size=2, tp_rank=rank)
        ranks.append(Cache(host, storage, spec, writes=rank == 0))
    keys = keys_of_tokens(host, storage)
    assert [rank.backup(keys) for rank in ranks] == [len(TOKENS), 0]
    assert [rank.look_up() for rank in ranks] == [(keys, len(TOKENS)), ([], 0)]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_draft_layers_in_main_pool_are_stored_with_pages(attach: Attach, layout: str) -> None:
    """SGLang packs MTP layers into the pages of the target's host pool."""
    host, plain = mha(layout, drafts=1), mha(layout)
    fill(host, 1)
    storage = attach(host)
    cache = Cache(host, storage)
    keys = keys_of_tokens(host, storage)
    expected = contents(host, FROM)
    assert len(expected[0]) * plain.layer_num == len(page_bytes(plain, 0)) * host.layer_num
    assert cache.backup(keys) == len(TOKENS)
    fill(host, 2)
    assert cache.look_up() == (keys, len(TOKENS))
    assert cache.prefetch(keys) == len(TOKENS)
    assert contents(host, TO) == expected
    assert Cache(plain, attach(plain)).look_up() == ([], 0)
