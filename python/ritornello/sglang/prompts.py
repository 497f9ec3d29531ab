"""Tells the storage the keys of all pages before a piece of a prompt, and when prefetches are
queued and ended.

SGLang looks up and stores pieces of prompts: the pages after the pages in its memory. Its field
`prefix_keys` names the pages before a piece. SGLang fills the field only with the option
`hicache_storage_pass_prefix_keys`, and for lookups it then leaves out the keys of the last tree
node that the prompt matches.
The wrapped lookups of `UnifiedRadixCache` pass all keys to a storage that uses them. They also turn
the option on, because SGLang then passes all keys with puts.

Runs on the thread of SGLang's scheduler, which alone may read SGLang's tree.
"""

import functools
import inspect
import logging
from typing import Any

logger = logging.getLogger("ritornello.sglang")

# Methods of `UnifiedRadixCache` that begin a lookup, and of `HybridCacheController` that queue and
# end a prefetch.
LOOKUPS = ("prefetch_from_storage", "query_storage_hit_length")
LOOKUP_PARAMETERS = frozenset({"last_host_node_id", "last_hash", "prefix_keys"})
BEGIN, END = "prefetch", "terminate_prefetch"
# Passed as the only key before a piece if the keys before the piece are unknown.
UNKNOWN = "unknown"


class Prompts:
    """Wraps methods of SGLang once in a process. `watched`: they are wrapped, so SGLang's lookups
    pass the keys of all pages before a piece.
    """

    def __init__(self) -> None:
        self.watched = False
        self._logged = False

    def watch(self, cache: Any, controller: Any) -> str:
        """Wraps the methods once. Returns why that is not possible; "" if they are wrapped."""
        if self.watched:
            return ""
        obstacle = prompt_obstacle(cache, controller)
        if not obstacle:
            for name in LOOKUPS:
                setattr(cache, name, self._wrap_lookup(getattr(cache, name)))
            setattr(controller, BEGIN, _wrap_begin(getattr(controller, BEGIN)))
            setattr(controller, END, _wrap_end(getattr(controller, END)))
            self.watched = True
        return obstacle

    def _wrap_lookup(self, method: Any) -> Any:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def lookup(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named)
            cache = given.args[0]
            if getattr(_storage(cache.cache_controller), "uses_prompts", False):
                cache.hicache_storage_pass_prefix_keys = True
                given.arguments["prefix_keys"] = self._keys_before(
                    cache, given.arguments["last_host_node_id"], given.arguments.get("last_hash")
                )
            return method(*given.args, **given.kwargs)

        return lookup

    def _keys_before(self, cache: Any, node: Any, last_hash: str | None) -> list[str]:
        """Returns the keys of all pages up to and including a node of SGLang's tree; an empty list
        if `last_hash`, the hash of the last of these pages, is None; `[UNKNOWN]` if SGLang does not
        tell the keys.
        """
        if last_hash is None:
            return []
        try:
            tree = cache.tree_core
            keys = [*tree.get_prefix_hash_values(node), *tree.get_hash_values(node)]
            if keys and keys[-1] == last_hash:
                return keys
            problem: object = "the keys in its tree do not end with the key of the last page"
        except Exception as error:
            problem = error
        if not self._logged:
            self._logged = True
            logger.warning(
                "ritornello: SGLang does not tell the keys before a page (%s); such pages are not "
                "looked up on the remote",
                problem,
            )
        return [UNKNOWN]


def prompt_obstacle(cache: Any, controller: Any) -> str:
    """Returns why the methods cannot be wrapped; "" if they can be."""
    for name in LOOKUPS:
        method = getattr(cache, name, None)
        if not inspect.isfunction(method):
            return f"{cache.__name__} has no {name}"
        missing = sorted(LOOKUP_PARAMETERS - set(inspect.signature(method).parameters))
        if missing:
            return f"{name} has no {', '.join(missing)}"
    for name in (BEGIN, END):
        if not inspect.isfunction(getattr(controller, name, None)):
            return f"{controller.__name__} has no {name}"
    return ""


def _wrap_begin(method: Any) -> Any:
    @functools.wraps(method)
    def begin(controller: Any, *args: Any, **named: Any) -> Any:
        operation = method(controller, *args, **named)
        _tell(controller, "on_prefetch_begin", operation)
        return operation

    return begin


def _wrap_end(method: Any) -> Any:
    @functools.wraps(method)
    def end(controller: Any, operation: Any, *args: Any, **named: Any) -> Any:
        returned = method(controller, operation, *args, **named)
        _tell(controller, "on_prefetch_end", operation)
        return returned

    return end


def _tell(controller: Any, name: str, operation: Any) -> None:
    """Calls the method `name` of the storage, if the storage has it. A failure must not reach
    SGLang's scheduler.
    """
    method = getattr(_storage(controller), name, None)
    if method is not None:
        try:
            method(operation)
        except Exception as error:
            logger.debug("ritornello: %s failed (%s)", name, error)


def _storage(controller: Any) -> Any:
    return getattr(controller, "storage_backend", None)


# One object for the whole process, in which SGLang runs one model.
prompts = Prompts()
