"""Methods of SGLang that the storage wraps, by their names in SGLang 0.5.23. `watch_transfers`
wraps a method of one class. With tiers `watch_prompts` wraps methods of further classes, and with
the gate "auto" `watch_prefills` too. If one of these methods cannot be wrapped, the storage works
without the feature that needs it, and logs the reason.
"""

import logging
from typing import Any

from ritornello.sglang.prefills import Record, prefills
from ritornello.sglang.prompts import prompts
from ritornello.sglang.transfers import transfers

logger = logging.getLogger("ritornello.sglang")


def watch_prompts() -> None:
    """Makes SGLang pass the keys of all pages before a piece of a prompt. Logs the reason if this
    is not possible.
    """
    try:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        obstacle = prompts.watch(UnifiedRadixCache, HybridCacheController)
    except Exception as error:
        obstacle = str(error)
    if obstacle:
        logger.warning(
            "ritornello: SGLang passes pages without the keys before them (%s); such pages are "
            "not looked up on the remote",
            obstacle,
        )


def watch_prefills(record: Record) -> None:
    """Passes the times of prefills to `record`. Logs the reason if this is not possible."""
    try:
        from sglang.srt.model_executor.model_runner import ModelRunner

        obstacle = prefills.watch(ModelRunner)
    except Exception as error:
        obstacle = str(error)
    if obstacle:
        logger.warning(
            "ritornello: prefills are not measured (%s); all pages that are found are loaded",
            obstacle,
        )
    else:
        prefills.record = record


def watch_transfers() -> None:
    """Makes SGLang pass the storage all pages of a prefetch before it reads their first batch, so
    that `read_ahead` can read later batches ahead. Logs the reason if this is not possible.
    """
    try:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.version import __version__

        obstacle = transfers.watch(HiCacheController, __version__)
    except Exception as error:
        obstacle = str(error)
    if obstacle:
        logger.info("ritornello: no batch is read ahead, because SGLang differs (%s)", obstacle)


def hashes_of(operation: Any, page_tokens: int) -> list[str]:
    """Computes the page hashes of an operation before SGLang looks up its pages."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens, last = operation.token_ids, operation.last_hash
    return [*get_storage_hash_str(tokens, last, page_size=page_tokens)]


def storage_named_at_start() -> bool:
    """Returns whether SGLang's start options name a storage. If so, SGLang imported this module
    before it could receive an update of the weights. True outside an engine.
    """
    from sglang.srt.runtime_context import get_memory

    try:
        return get_memory().hicache_storage_backend is not None
    except ValueError:
        return True
