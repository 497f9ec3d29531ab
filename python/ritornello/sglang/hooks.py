"""Finds SGLang's classes whose methods `prompts` and `prefills` wrap, for a storage with tiers.
Names as in SGLang 0.5.23. Without them the storage serves with less: every obstacle is logged.
"""

import logging
from typing import Any

from ritornello.sglang.prefills import Record, prefills
from ritornello.sglang.prompts import prompts

logger = logging.getLogger("ritornello.sglang")


def watch_prompts() -> None:
    """Has SGLang pass the keys of whole prompts."""
    try:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        obstacle = prompts.watch(UnifiedRadixCache, HybridCacheController)
    except Exception as error:
        obstacle = str(error)
    if obstacle:
        logger.warning(
            "ritornello: SGLang passes pages without the keys before them (%s); they are not "
            "looked up on the remote",
            obstacle,
        )


def watch_prefills(record: Record) -> None:
    """Passes the times of prefills to `record`."""
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


def hashes_of(operation: Any, page_tokens: int) -> list[str]:
    """Returns the page hashes of an operation that SGLang has not looked up yet."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens, last = operation.token_ids, operation.last_hash
    return [*get_storage_hash_str(tokens, last, page_size=page_tokens)]
