"""Moves whole pages between SGLang's host pools and the store.

A host pool is SGLang's buffer in host memory for one kind of cache data: the main pool `kv`, or a
side pool, such as `mamba`. SGLang passes pages as positions in a host pool, or as copies.
Invariant: all pages under a scope have one byte order, which the scope names
(`identity.PoolLayout.order`), however SGLang passed them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ritornello.sglang.hits import RestorablePrefixes, SidePool
from ritornello.sglang.identity import Engine, PoolLayout, is_replicated, scopes_of, split_factor
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.pages import Meta, PagesError, page_ids, pools
from ritornello.sglang.store import Read, SGLangStore

if TYPE_CHECKING:
    from ritornello._core import PagePool, Scope

# Returns the positions `first` to `past - 1` of tokens in a host pool, as SGLang represents them: a
# tensor.
SlotRange = Callable[[int, int], Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """How a pool's pages are moved. Each of `parts` is the memory of one range of heads, which the
    store reads and writes directly; if `parts` is empty, SGLang copies each page. `page_bytes`:
    bytes of a page in one part, or of the copy.
    """

    page_bytes: int
    parts: "tuple[PagePool, ...]" = ()


def memory_of(host: Any, slots: SlotRange, parts: int) -> Memory:
    """Returns a memory with `parts` parts if the pool can name the memory ranges of its pages and
    does not move pages, otherwise a memory without parts. Raises if pages must be copied and the
    pool cannot copy pages.
    """
    tokens = int(host.page_size)
    pages = int(getattr(host, "page_num", 0) or host.size // tokens)
    # SGLang moves the pages of a pool in a shared domain to compact them, so such pages cannot be
    # used in place.
    if getattr(host, "shared_allocation_domain", None) is None:
        try:
            found = pools(_meta(host, slots, tokens, parts), pages, parts)
            return Memory(found[0].page_bytes, tuple(found))
        except (PagesError, ValueError, NotImplementedError, AttributeError):
            pass
    return copied_memory(host)


def copied_memory(host: Any) -> Memory:
    return Memory(int(host.get_dummy_flat_data_page().nbytes))


def _meta(host: Any, slots: SlotRange, tokens: int, parts: int) -> Meta:
    def meta(page: int) -> Any:
        indices = slots(page * tokens, (page + 1) * tokens)
        if parts > 1:
            return host.get_split_heads_page_buffer_meta(indices, parts)
        return host.get_page_buffer_meta(indices)

    return meta


@dataclass(slots=True)
class PoolRead:
    """Pages of a pool that are being read. `scopes`: the scopes of the pool when the read began.
    `parts`: a read for each scope; none if no page can be read. `ids`: the numbers of the pages in
    the pool; None if SGLang takes the `copies`. `copies`: the memory that is read to, if it is not
    the pool's.
    """

    scopes: "list[Scope]"
    keys: Sequence[bytes]
    ids: Sequence[int] | None
    copies: Sequence[Any]
    parts: list[Read]

    @property
    def is_running(self) -> bool:
        """Whether the reads of all parts could be started."""
        return bool(self.parts) and all(part.ticket is not None for part in self.parts)

    @property
    def began(self) -> float:
        return self.parts[0].began if self.parts else 0.0

    def wait(self, moment: float) -> bool:
        """Waits until the read ends, at most until `moment` of `perf_counter`. Returns whether it
        has ended.
        """
        return all(part.wait(moment) for part in self.parts)

    def cancel(self) -> None:
        """Makes the read begin no further I/O. I/O in flight still writes to memory."""
        for part in self.parts:
            part.cancel()


class Pool:
    """One host pool. `name`: SGLang's name of the pool. `leading` returns how many leading pages
    can be loaded; `prefixes` returns the prefixes that can be loaded into this pool and the side
    pools `sides` together. Puts return how many leading pages are stored, gets how many were filled
    and verified. `before`: the keys of all pages of the prompt before the pages of a call; None if
    they are unknown. `counts_tokens`: loaded pages of this pool count as tokens that the engine
    does not compute.
    """

    def __init__(
        self,
        name: str,
        host: Any,
        slots: SlotRange,
        store: SGLangStore,
        meter: RateMeter,
        *,
        in_place: bool,
        split: int,
        counts_tokens: bool = False,
    ) -> None:
        self.name = name
        self._counts_tokens = counts_tokens
        self._host = host
        self._slots = slots
        self._store = store
        self._meter = meter
        self._in_place = in_place
        self._split = split
        self._tokens = int(host.page_size)
        self._shape = PoolLayout.of(name, host)
        self._memory = Memory(0)
        self._scopes: list[Scope] = []
        self.replicated = False

    def describe(self, engine: Engine) -> None:
        """Sets the engine that computes this pool's pages, and thereby their scopes. Raises if the
        pool cannot be served.
        """
        split = split_factor(engine, self._shape, self._split) if self._in_place else 1
        if not self._memory.page_bytes:
            self._memory = (
                memory_of(self._host, self._slots, split)
                if self._in_place
                else copied_memory(self._host)
            )
        copied = not self._memory.parts
        self.replicated = is_replicated(engine, self._shape)
        self._scopes = scopes_of(
            engine,
            self._shape,
            self._memory.page_bytes,
            copied=copied,
            split=1 if copied else split,
        )

    @property
    def scopes(self) -> "list[Scope]":
        return self._scopes

    @property
    def page_tokens(self) -> int:
        return self._tokens

    @property
    def in_place(self) -> bool:
        return bool(self._memory.parts)

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page."""
        return self._memory.page_bytes * max(len(self._memory.parts), 1)

    def new_page(self) -> Any:
        """Returns memory for one page, as one contiguous tensor."""
        return self._host.get_dummy_flat_data_page()

    def leading(self, keys: Sequence[bytes], before: Sequence[bytes] | None) -> int:
        return self._store.find(self._scopes, keys, before, self._tokens)

    def prefixes(
        self, keys: Sequence[bytes], before: Sequence[bytes] | None, sides: Sequence[SidePool]
    ) -> RestorablePrefixes:
        return self._store.find_prefixes(self._scopes, keys, before, self._tokens, sides)

    def put(self, keys: Sequence[bytes], indices: Any, before: Sequence[bytes] | None) -> int:
        ids = self.page_ids(keys, indices)
        if ids is None:
            return 0
        if self._memory.parts:
            stored = len(keys)
            for scope, part in zip(self._scopes, self._memory.parts, strict=True):
                stored = min(stored, self._store.put(scope, keys, part.pages(ids), before))
            return stored
        pages = [self._host.get_data_page(page * self._tokens, flat=True) for page in ids]
        return self.put_flat(keys, [page.contiguous() for page in pages], before)

    def get(self, keys: Sequence[bytes], indices: Any) -> int:
        ids = self.page_ids(keys, indices)
        return 0 if ids is None else self.finish_get(self.begin_get(keys, ids))

    def begin_get(self, keys: Sequence[bytes], ids: Sequence[int], behind: int = 0) -> PoolRead:
        """Begins to read pages to the pages `ids` of the pool. `behind`: number of pages that are
        being read before these, which lengthens the time limit. Until `finish_get` or `abandon_get`
        returns, the memory of the pages `ids` is written to.
        """
        scopes, parts = self._scopes, self._memory.parts
        copies = [] if parts else [self.new_page() for _ in ids]
        outs: list[Any] = [part.pages(ids) for part in parts] if parts else [copies]
        reads = [
            self._store.begin_get(scope, keys, out, behind)
            for scope, out in zip(scopes, outs, strict=True)
        ]
        return PoolRead(scopes, keys, ids, copies, reads)

    def finish_get(self, read: PoolRead, since: float = 0.0) -> int:
        """Waits for a read, and moves its copies to their slots. Returns the number of leading
        pages filled. Time before `since` is not counted as time of this read.
        """
        filled, began = len(read.keys), max(read.began, since)
        for part in read.parts:
            filled = min(filled, self._store.finish_get(part, since))
            since = perf_counter()
        for page, data in zip((read.ids or ())[:filled], read.copies, strict=False):
            self._host.set_from_flat_data_page(page * self._tokens, data)
        if self._counts_tokens and read.parts:
            self._store.note_prefill_avoided(filled * self._tokens, perf_counter() - began)
        return filled

    def abandon_get(self, read: PoolRead) -> None:
        """Cancels a read. When this returns, nothing writes to its memory."""
        read.cancel()
        for part in read.parts:
            self._store.abandon_get(part)

    def put_flat(
        self, keys: Sequence[bytes], pages: Sequence[Any], before: Sequence[bytes] | None
    ) -> int:
        """Stores SGLang's copies of pages, each in one contiguous tensor."""
        fitting = self._fitting(keys, pages)
        if not fitting:
            return 0
        return self._store.put(self._scopes[0], keys[:fitting], pages[:fitting], before)

    def get_flat(self, keys: Sequence[bytes], pages: Sequence[Any]) -> int:
        """Loads pages into `pages`, which has one contiguous tensor for each page."""
        return self.finish_get(self.begin_get_flat(keys, pages))

    def begin_get_flat(
        self, keys: Sequence[bytes], pages: Sequence[Any], behind: int = 0
    ) -> PoolRead:
        """Begins to read pages into `pages`; `behind` as in `begin_get`."""
        fitting = self._fitting(keys, pages)
        scopes, keys, pages = self._scopes, keys[:fitting], pages[:fitting]
        reads = [self._store.begin_get(scopes[0], keys, pages, behind)] if fitting else []
        return PoolRead(scopes, keys, None, pages, reads)

    def _fitting(self, keys: Sequence[bytes], pages: Sequence[Any]) -> int:
        """Returns how many leading pages have the size of this pool's pages; 0 if the byte order of
        SGLang's copies differs from the order in which this pool stores pages.
        """
        if len(self._scopes) != 1 or (self.in_place and self._shape.order(False) != "plain"):
            self._meter.add("refused_pages:order", len(keys))
            return 0
        size = self._memory.page_bytes
        fitting = 0
        for page in pages[: len(keys)]:
            if page is None or page.nbytes != size or not page.is_contiguous():
                break
            fitting += 1
        self._meter.add("refused_pages:size", len(keys) - fitting)
        return fitting

    def page_ids(self, keys: Sequence[bytes], indices: Any) -> list[int] | None:
        """Returns the page numbers of `indices`. Returns None, and counts the pages as refused, if
        `indices` are not one whole page for each key.
        """
        ids = page_ids(indices, len(keys), self._tokens) if self._scopes else None
        if ids is None:
            self._meter.add("refused_pages:indices", len(keys))
        return ids


class LogicalPool:
    """The main pool of a model whose KV is in side pools only. This pool holds no bytes, so all its
    pages count as stored.
    """

    name = "kv"
    replicated = True
    in_place = True
    page_bytes = page_tokens = 0
    scopes: "list[Scope]" = []

    def __init__(self, store: SGLangStore) -> None:
        self._store = store

    def describe(self, engine: Engine) -> None:
        """Does nothing: no bytes are stored."""

    def leading(self, keys: Sequence[bytes], before: Sequence[bytes] | None) -> int:
        return len(keys)

    def prefixes(
        self, keys: Sequence[bytes], before: Sequence[bytes] | None, sides: Sequence[SidePool]
    ) -> RestorablePrefixes:
        return self._store.find_prefixes((), keys, before, self.page_tokens, sides)

    def put(self, keys: Sequence[bytes], indices: Any, before: Sequence[bytes] | None) -> int:
        return len(keys)

    def get(self, keys: Sequence[bytes], indices: Any) -> int:
        return len(keys)

    def put_flat(
        self, keys: Sequence[bytes], pages: Sequence[Any], before: Sequence[bytes] | None
    ) -> int:
        return len(keys)

    def get_flat(self, keys: Sequence[bytes], pages: Sequence[Any]) -> int:
        return len(keys)

    def new_page(self) -> Any:
        """Returns None: pages have no bytes."""
