"""Tells the storage the pages of all batches of a prefetch.

SGLang reads the pages of a prefetch in batches, and a call of the storage names the keys and the
memory of one batch. The calls are made by `HiCacheController._page_transfer`, whose argument, the
operation, names the keys and the memory of all batches. The wrapped method passes them to the
storage before the first call, and tells it when the last call has returned.

`_page_transfer` is private. `READ_IN` names the versions of SGLang whose sources were read. In
these versions:

* `hash_value` and `host_indices` of the operation are complete when the method begins, and their
  values are never changed in place;
* host memory of pages that the method has not reported as completed belongs to the operation until
  the method returns, also if SGLang terminates the operation or aborts its request. SGLang frees
  this memory after the report `completed_req`, which its thread sends when the method has returned.
  A flush and a detach wait for this thread, and fail if it does not end;
* a pool whose transfer has `indices_from_pool` "kv" is read in every batch after the main pool,
  with the keys and the positions of the main pool, and its memory is freed with the main pool's.

With another version nothing is wrapped, and the storage knows only the batch of the call.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ritornello.sglang.identity import KV, keys_of
from ritornello.sglang.pages import page_ids

logger = logging.getLogger("ritornello.sglang")

READ_IN = ("0.5.22", "0.5.23")
METHOD = "_page_transfer"


@dataclass(slots=True)
class Transfer:
    """The pages of an operation, in the order in which SGLang reads them: their `keys`, and their
    numbers `ids` in the pools with the names `pools`. `is_terminated`: whether SGLang wants no
    further batch.
    """

    keys: Sequence[bytes]
    ids: Sequence[int]
    pools: frozenset[str]
    is_terminated: Callable[[], bool]
    # The number of pages of each pool that SGLang has asked for.
    _asked: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, operation: Any, page_tokens: int) -> "Transfer | None":
        """Returns the transfer of SGLang's operation; None if its memory is not whole pages."""
        keys = keys_of(operation.hash_value)
        ids = page_ids(operation.host_indices, len(keys), page_tokens)
        if ids is None:
            return None
        sides = getattr(operation, "pool_transfers", None) or ()
        names = {str(side.name) for side in sides if side.indices_from_pool == KV}
        return cls(keys, ids, frozenset({KV, *names}), operation.is_terminated)

    def next_batch(
        self, pool: str, keys: Sequence[bytes], ids: Sequence[int] | None
    ) -> tuple[Sequence[bytes], Sequence[int]]:
        """Takes note of a batch that SGLang reads now, with `ids` None if SGLang passes copies.
        Returns keys and numbers of the next batch. Returns no pages after the last batch, if SGLang
        terminated the operation, if the pages of the batch do not follow the previous batch of this
        pool, or if the pages of this pool are not known.
        """
        first = self._asked.get(pool, 0)
        past = first + len(keys)
        self._asked[pool] = past
        expected = pool in self.pools and self.keys[first:past] == keys
        if not expected or ids not in (None, self.ids[first:past]) or self.is_terminated():
            return (), ()
        following = slice(past, past + len(keys))
        return self.keys[following], self.ids[following]


class Transfers:
    """Wraps SGLang's method once in a process."""

    def __init__(self) -> None:
        self._watched = False

    def watch(self, controller: Any, version: str) -> str:
        """Wraps the method of `HiCacheController` once. Returns why that is not possible; "" if it
        is wrapped.
        """
        obstacle = transfer_obstacle(controller, version)
        if not self._watched and not obstacle:
            setattr(controller, METHOD, _wrap(getattr(controller, METHOD)))
            self._watched = True
        return obstacle


def transfer_obstacle(controller: Any, version: str) -> str:
    """Returns why the method cannot be wrapped; "" if it can be."""
    if version not in READ_IN:
        return f"version {version} is not among {', '.join(READ_IN)}"
    method = getattr(controller, METHOD, None)
    if not inspect.isfunction(method):
        return f"{controller.__name__} has no {METHOD}"
    parameters = tuple(inspect.signature(method).parameters)
    return "" if parameters == ("self", "operation") else f"{METHOD} takes {parameters}"


def _wrap(method: Any) -> Any:
    @functools.wraps(method)
    def transfer(controller: Any, operation: Any) -> Any:
        with _announced(controller, operation):
            return method(controller, operation)

    return transfer


@contextmanager
def _announced(controller: Any, operation: Any) -> Iterator[None]:
    """Calls `on_transfer_begin` and `on_transfer_end` of the storage, if the storage has them. A
    failure to begin must not reach SGLang.
    """
    storage = getattr(controller, "storage_backend", None)
    end = getattr(storage, "on_transfer_end", None)
    if storage is None or end is None:
        yield
        return
    try:
        # Without a transfer, reads must not ask an earlier operation whether it is terminated.
        storage.on_transfer_begin(None)
        storage.on_transfer_begin(Transfer.of(operation, controller.page_size))
    except Exception as error:
        logger.debug("ritornello: no batch of this prefetch is read ahead (%s)", error)
    try:
        yield
    finally:
        end()


# One object for the whole process, in which SGLang runs one model.
transfers = Transfers()
