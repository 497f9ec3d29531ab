"""The compiled core. All calls release the GIL while they wait or move bytes."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from os import PathLike
from types import TracebackType
from typing import Any, Literal, TypeAlias, final

from ritornello.errors import (
    ClosedError,
    FatalError,
    InvalidError,
    RetryError,
    RitornelloError,
)

# Any object with the buffer protocol (bytes, bytearray, memoryview, NumPy arrays), C-contiguous; or
# a contiguous CPU tensor, recognised by `data_ptr()`, `nbytes`, `device.type` and
# `is_contiguous()`.
Buffer: TypeAlias = Any
# One page: a buffer, or several whose concatenation is the page.
Page: TypeAlias = Buffer | Sequence[Buffer]
# Seconds since 1970, or a datetime. A datetime without a time zone is local time.
Moment: TypeAlias = float | datetime
# Encoding of pages: none ("raw"), lossless ("split", "zstd"), or with rounding ("int8", "int4").
Codec: TypeAlias = Literal["raw", "split", "zstd", "int8", "int4"]
# Which of the found pages are to be loaded. "auto": the number of leading pages with the shortest
# estimated time to load them and to compute the rest of the prompt; none, if this saves at most 5 %
# of the time to compute; all, while no prefill was recorded. "always": all; "never": none.
Gate: TypeAlias = Literal["auto", "always", "never"]
# A decision about the pages of a request: to load pages ("loaded"); to compute found pages, because
# the gate chose so ("declined"); to compute the pages that were not found ("missed"); to load
# nothing, because the engine has all pages ("not_needed"); to look up nothing, because the prompt
# has no complete page before its last token ("too_short"); to wait for a remote or a copy
# ("waiting"); to load nothing, because pages of the request must not be loaded ("not_cacheable"),
# or because the lookup failed ("failed").
DecisionOutcome: TypeAlias = Literal[
    "loaded",
    "declined",
    "missed",
    "not_needed",
    "too_short",
    "waiting",
    "not_cacheable",
    "failed",
]
# A tier of a cache.
TierName: TypeAlias = Literal["host", "disk", "remote"]

__all__ = [
    "Cache",
    "ClosedError",
    "Completions",
    "Device",
    "DeviceMove",
    "DevicePages",
    "DevicePool",
    "DeviceSlots",
    "FatalError",
    "InvalidError",
    "LeasedPrefix",
    "Lookup",
    "Outcome",
    "PagePool",
    "PoolPages",
    "RetryError",
    "RitornelloError",
    "Scope",
    "Store",
    "StorePolicy",
    "Ticket",
    "__version__",
    "destroy",
    "end_log",
    "run_cli",
    "shown_tier",
    "take_log_line",
]

__version__: str

@final
class Scope:
    def __new__(
        cls,
        model: str,
        dtype: str,
        page_tokens: int,
        *,
        layers: tuple[int, int],
        kv_heads: tuple[int, int],
        head_dim: int,
        layout: str = "page_first",
        salt: bytes = b"",
        weights: bytes = b"",
        adapter: str = "",
        kv_scale: str = "none",
        hash_algorithm: str = "",
        epoch: bytes = b"",
        part: int = 0,
        extra: Mapping[str, str] | None = None,
        chained: bool = True,
        page_bytes: int | None = None,
    ) -> Scope: ...
    @staticmethod
    def opaque(name: str, page_bytes: int, *, chained: bool = False) -> Scope: ...
    @property
    def id(self) -> bytes: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def chained(self) -> bool: ...
    def describe(self) -> dict[str, Any]:
        """Returns the keyword arguments that make an equal scope."""
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class PagePool:
    """Registered source or target memory of an engine: page `i` is the concatenation, over
    `buffers` in order, of `page_bytes[k]` bytes of buffer `k`, beginning at `i * page_bytes[k]` or,
    if strides are given, at `i * strides[k]`. The pool keeps the buffers alive.
    """

    def __new__(
        cls,
        buffers: Sequence[Buffer],
        page_bytes: Sequence[int],
        *,
        strides: Sequence[int] | None = None,
    ) -> PagePool: ...
    @property
    def page_bytes(self) -> int: ...
    def __len__(self) -> int: ...
    def pages(self, ids: Iterable[int]) -> PoolPages: ...

@final
class PoolPages:
    """Some pages of a pool, in the order of the ids; accepted wherever a list of pages is
    accepted.
    """

    def __len__(self) -> int: ...

@final
class Device:
    """A CUDA device with pinned host memory and a thread that queues moves: docs/gpu.md. After a
    fork the child must open the device again.

    Streams are handles, such as `torch.cuda.current_stream().cuda_stream`; 0 is the default stream.
    The caller passes handles of streams that exist on this device.
    """

    @staticmethod
    def open(ordinal: int = 0, *, staging: int = ..., emulated: bool = False) -> Device:
        """Opens CUDA device `ordinal` of this process with at least `staging` bytes of pinned host
        memory (default: 1 GiB), which are resident until the device is no longer used. `emulated`:
        opens a device that threads of this process emulate, with host memory as device memory, for
        tests; only a wheel of `make wheel-device` can. With a driver before release 550 all moves
        use the copy engines. InvalidError: no driver for CUDA 12 or later, no such device, or no
        emulated device. RetryError: the memory cannot be allocated or pinned. FatalError: the
        driver failed.
        """
    def pool(
        self,
        spans: Sequence[tuple[int, int, int]],
        blocks: int,
        *,
        owner: object,
        way: str = "auto",
    ) -> DevicePool:
        """Registers an engine's KV memory of `blocks` blocks, numbered from 0. Each of 1 to 4,096
        `spans` is a tensor: the address of block 0 on the device, the contiguous bytes of a block
        (1 byte to 1 GiB), and the distance between blocks in bytes. A page is the concatenation of
        the bytes of one block over `spans` in order. `owner` is an object that owns the memory, or
        a collection of such objects; the pool and its unfinished moves keep it alive.

        `way` decides how bytes are moved: "auto" measures a kernel and the copy engines for about
        30 ms in each direction and uses the faster way (below 128 KiB the copy engines only if they
        take at most 0.8 of the kernel's time), "length" uses the copy engines if the
        pool's pieces have at least 128 KiB on average and a kernel otherwise, "copies" always uses
        the copy engines, and "kernel:N" a kernel on N blocks of 1,024 threads. InvalidError: an
        argument is invalid, two spans share bytes, or memory is not allocated on the device.
        RetryError: not enough memory is free. FatalError: the device is broken.
        """
    def slots(self, page_bytes: int, pages: int, *, timeout: float = 0.0) -> DeviceSlots | None:
        """Takes pinned memory for `pages` pages of `page_bytes` bytes. Waits for free memory for
        `timeout` seconds, at most 30. Returns None if not enough memory became free in this time,
        or the pages exceed the pinned memory.
        """
    def describe(self) -> str:
        """Returns the names of the device and its driver."""
    @property
    def broken(self) -> bool:
        """Whether the driver failed, or did not complete a move in time. Later calls raise
        FatalError; moves in flight end with FatalError, or complete if their work had ended.
        """
    def stats(self) -> dict[str, Any]:
        """Returns `device` (`describe()`), `broken`, and `staging`: the `capacity` of the pinned
        memory, the memory `in_use` and its `peak`, all in bytes, and the kind of its pages
        (`backing`).
        """

@final
class DevicePool:
    """Registered KV memory of an engine. `len()` returns the number of its blocks."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the sum of the bytes of a block over all spans."""
    @property
    def measured(self) -> list[tuple[Literal["scatter", "gather"], int, float, float]]:
        """Measurements of "auto": the direction of a move, its number of pieces, and the seconds
        that it takes with a kernel and with the copy engines. Empty if nothing was measured.
        """
    def __len__(self) -> int: ...
    def pages(self, blocks: Sequence[int]) -> DevicePages:
        """Returns the pages in `blocks`, in this order. Calls that use the pages check the numbers
        of the blocks.
        """

@final
class DevicePages:
    """Some pages of a `DevicePool`; accepted by `Store.submit_get` and `Store.submit_put`. `len()`
    returns the number of these pages.
    """

    def __len__(self) -> int: ...
    def scatter(
        self,
        slots: DeviceSlots,
        *,
        part: tuple[int, int] | None = None,
        after: int | None = None,
    ) -> DeviceMove:
        """Starts to copy the pages in `slots` to the pages of this object, page `n` to page `n`,
        after the work that is now queued on stream `after`. `part`: the first offset in a page that
        is copied, and the offset after the last; both are 0, the size of a page, or between two
        spans. Until the move has ended, no other call or work may write to the slots or access the
        blocks. InvalidError: no pages, fewer slots than pages, more than 8,192 pages, slots of
        another device or page size, a block that does not exist or occurs twice, or an invalid
        `part`. RetryError: too many moves are queued. FatalError: the device is broken.
        """
    def gather(
        self,
        slots: DeviceSlots,
        *,
        part: tuple[int, int] | None = None,
        after: int | None = None,
    ) -> DeviceMove:
        """Starts to copy the pages of this object to the pages in `slots`: see `scatter`, also for
        errors; a block may occur twice. Until the move has ended, no other call or work may access
        the slots or write to the blocks.
        """

@final
class DeviceSlots:
    """Pages in pinned host memory, which is free again when this object is deleted and no move uses
    it.
    """

    @property
    def memory(self) -> tuple[int, int]:
        """The address of page 0, which is a multiple of 4,096, and the distance between pages in
        bytes. Bytes between pages must not be changed.
        """
    @property
    def page_bytes(self) -> int: ...

@final
class DeviceMove:
    """A move of pages between blocks and slots. Keeps the memory of both alive until the move has
    ended.
    """

    def wait(self, timeout: float = 30.0) -> bool:
        """Waits for the end of the move. Returns whether the move has ended within `timeout`
        seconds. FatalError: the device is broken.
        """
    def fence(self, stream: int, timeout: float = 30.0) -> bool:
        """Makes later work of `stream` wait until the move has ended. Returns False, and does not
        delay the stream, if the move was not queued on the device within `timeout` seconds.
        FatalError: the device is broken.
        """

@final
class LeasedPrefix:
    """The pages that a call of `Store.lease_prefix` leased. They stay readable until `release()`,
    until the call's `ttl` (in seconds, at most one hour) has passed, or until the owner ends or
    reopens the store.
    """

    @property
    def pages(self) -> int: ...
    @property
    def lease(self) -> int: ...
    def release(self) -> None: ...
    def __enter__(self) -> LeasedPrefix: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

@final
class Outcome:
    """Result of a ticket. `pages`: number of leading pages that are stored (put), or filled and
    verified (get). `bytes`: bytes that the put wrote, without pages that were already stored, or
    that the get read and verified. `reason`: "" if all pages are stored or filled, else why one is
    not ("not_found", "checksum", "header", "io", "no_space", "staging_full", "cancelled",
    "deadline", ...). `ok[i]`: page i is stored, or filled and verified; in a put no page after the
    leading `pages` counts.
    """

    @property
    def pages(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def reason(self) -> str: ...
    @property
    def ok(self) -> list[bool]: ...

@final
class Ticket:
    """A submitted put or get. It keeps its buffers alive until it is done and its outcome was
    returned, or until it is deleted.
    """

    def fileno(self) -> int:
        """An eventfd, readable once the ticket is done."""
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def wait(self, timeout: float | None = None) -> Outcome | None:
        """Returns the outcome, or None if the ticket is not done within `timeout` seconds."""
    def wait_section(self, number: int, timeout: float | None = None) -> bool:
        """Waits until sections 0 to `number` of all pages are verified, or the ticket is done: the
        ticket's outcome then tells which pages are filled. Returns False if neither happens within
        `timeout` seconds. Verified sections may be read, but the memory must not be changed until
        the ticket is done. Without sections, waits until the ticket is done.
        """
    def order(self, stream: int | None, timeout: float = 30.0) -> bool:
        """Makes later work of `stream` wait until a put of `DevicePages` has read its blocks: such
        work may write to the blocks before the ticket is done. Returns when all reads are queued on
        the device. With None, for engines whose work has no stream, returns when the blocks have
        been read. Returns False if this takes longer than `timeout` seconds: `stream` then may not
        wait for all reads. For any other ticket returns True without an effect. FatalError: the
        device is broken.
        """

@final
class Completions:
    """Collects many tickets under one eventfd. Tags may be any object."""

    def __new__(cls) -> Completions: ...
    def fileno(self) -> int:
        """An eventfd, readable if a ticket was done since the last read of the eventfd."""
    def add(self, ticket: Ticket, tag: Any) -> None:
        """Adds a ticket. Once it is done, `drain` returns `tag` and the ticket's outcome. A ticket
        may be added to one `Completions` only.
        """
    def drain(self) -> list[tuple[Any, Outcome]]:
        """Returns the tags and outcomes of the tickets that are done, each once. Read the eventfd
        before this call: a read after it may take the signal of a ticket that was not returned.
        """
    def __len__(self) -> int:
        """Number of tickets that were not drained yet."""

@final
class StorePolicy:
    """Permissions in `policy.toml` in a store's directory. Without the file nothing is permitted,
    and no call is denied.
    """

    @property
    def allow_weak_hashes(self) -> bool:
        """Whether keys may be made by a hash that does not resist collisions."""
    @property
    def allow_request_retention(self) -> bool:
        """Whether requests may protect their pages from eviction for a time."""
    @property
    def deny_clients(self) -> list[str]:
        """Calls that the owner denies to clients: any of `clear`, `drop_scope`, `change_capacity`
        and `configure`.
        """
    def check_hash(self, algorithm: str) -> None:
        """Raises InvalidError, which names the missing permission, if the policy does not permit
        keys that the hash `algorithm` makes.
        """

@final
class Store:
    @staticmethod
    def open(
        path: str | PathLike[str] | Sequence[str | PathLike[str]],
        capacity: str | int | None = None,
        *,
        paths: Sequence[str | PathLike[str]] = (),
        durability: Literal["cache", "durable"] = "cache",
        io: Literal["auto", "uring", "pool", "buffered"] = "auto",
        eviction: Literal["adaptive", "lru", "arc", "2q", "s3fifo", "density"] = "adaptive",
        codec: Codec = "raw",
        admission: Literal["auto", "write_through", "second_sight"] = "auto",
        write_budget: str | int | None = None,
        index: str | None = None,
        segment_bytes: int | None = None,
    ) -> Store:
        """Opens the directory as its owner, or as a client of the process that owns it.

        `path` may be a list of directories, one per disk. The first has the store's metadata and
        pages; the others have pages, and copies of the manifest and the scope registry. A new store
        is created with all of them. An existing store gets the directories that it lacks, and keeps
        directories that the list omits. `paths`: directories for the pages of a new store; `path`
        then has only its metadata. `capacity`, of the whole store, may be omitted if the directory
        holds a store. `codec` applies to scopes for which no codec is configured. `write_budget`
        limits drive wear: "2TB/day", "500GiB/hour", "20MB/s", or bytes per day; when the budget
        runs short, only pages that are put for the second time are written, and no page once it is
        used up. `index` rarely needs to be given: "run", or "run:8GiB" with a ceiling for its
        memory (otherwise a quarter of the memory that the process may use); "lsm", in builds that
        include it, is for indexes larger than memory; "memory" is lost when the owner ends. An
        owner whose `index` differs from the store's index converts it. `segment_bytes` is fixed
        when a store is created. Settings that cannot take effect are logged. `SettingError`: an
        argument is invalid. Other errors may be temporary.
        """
    def put_batch(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        pages: Iterable[Page] | PoolPages,
        *,
        parent: bytes | None = None,
        retain_until: Moment | None = None,
        timeout: float | None = None,
    ) -> int:
        """Stores pages; returns the number of leading pages that are stored. With `retain_until`,
        the pages and all pages before them are not evicted until that moment (at most a year away).
        A scope retains at most its `retained` bytes (`configure`), and all scopes together at most
        half of the store: beyond these limits, the retention that ends first is released. Retained
        pages can be deleted.
        """
    def configure(
        self,
        scope: Scope,
        *,
        codec: Codec | None = None,
        quota: str | int | None = None,
        retained: str | int | None = None,
    ) -> None:
        """Sets a scope's configuration, durably: the codec of pages that are put later, maximum
        bytes on disk, and maximum retained bytes (by default a quarter of the quota or of the
        store). Omitted settings return to the store's default.
        """
    def probe(self, scope: Scope, keys: Sequence[bytes]) -> int: ...
    def lease_prefix(
        self, scope: Scope | Sequence[Scope], keys: Sequence[bytes], *, ttl: float = 60.0
    ) -> LeasedPrefix:
        """Leases the leading pages that are stored. In a scope whose keys do not chain, leases
        every page that is stored. For several scopes: the leading pages that all scopes have, under
        one lease. The space that a process has leased may not exceed the space that no process has
        leased: the limit is half of the store, if no other process has leases. If a prefix would
        exceed the limit, only its leading pages within the limit are leased, and `pages` is their
        number. RetryError if the run of the first page exceeds the limit, or if this process has
        too many leases: release leases.
        """
    def release(self, lease: int) -> None: ...
    def exists(self, scope: Scope, keys: Sequence[bytes]) -> list[bool]: ...
    def get_batch(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        out: Iterable[Page] | PoolPages,
        *,
        timeout: float | None = None,
    ) -> int:
        """Returns the number of leading pages filled and verified. In a scope whose keys do not
        chain, pages after a missing page are filled too: the outcome of `submit_get` names them.
        """
    def submit_put(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        pages: Iterable[Page] | PoolPages | DevicePages,
        *,
        parent: bytes | None = None,
        copy: bool = False,
        retain_until: Moment | None = None,
        timeout: float | None = None,
        after: int | None = None,
    ) -> Ticket:
        """`copy=True`: the bytes are copied into staging, which is bounded, before the call
        returns, so that the memory may be reused; the first page that does not fit into staging,
        and all pages after it, are skipped (reason "staging_full"). Leading pages that are already
        stored are not copied; if such a page is evicted before the put reaches the owner, the
        outcome counts only the pages before it (reason "not_found"), and in a chained scope no
        later page is stored. `copy=False`: the memory must not change until the ticket is done.

        `DevicePages`, as many as `keys`, are copied into the pinned memory of the device after the
        work that is now queued on stream `after`; `copy` has no effect. A put copies pages only
        while at least half of the pinned memory stays free for loads ("staging_full"), and while
        the device takes further moves ("busy"); the remaining pages are skipped with this reason.
        Leading pages that are already stored are not read. The blocks must not change until the
        ticket is done; `Ticket.order` allows changes sooner.
        """
    def submit_get(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        out: Iterable[Page] | PoolPages | DevicePages,
        *,
        staged: bool = False,
        sections: Sequence[int] | None = None,
        timeout: float | None = None,
        after: int | None = None,
    ) -> Ticket:
        """`staged=True`: reads into staging memory, as soon as it has room, and copies to `out`:
        some disks read faster into huge pages, which staging consists of. See
        `ritornello.staging_choice`. `sections`: the ends of sections as offsets in a page; the last
        is the size of a page. Each section is read for all pages before the next section;
        `Ticket.wait_section` waits for a section.

        `DevicePages`, as many as `keys` and each block once, are filled through the pinned memory
        of the device, after the work that is now queued on stream `after`; `staged` and `sections`
        have no effect. No later call or work may access their blocks until the ticket is done. Only
        leading pages are delivered, also in a scope whose keys do not chain; the blocks of all
        other pages may hold any bytes.
        """
    def touch(self, scope: Scope, keys: Sequence[bytes]) -> int: ...
    def delete(self, scope: Scope, keys: Sequence[bytes]) -> int: ...
    def drop_scope(self, scope: Scope) -> None: ...
    def scopes(self) -> list[tuple[Scope, int, int]]:
        """Returns the scopes in the store, in order of registration, each with its number of pages
        and its bytes on disk.
        """
    def keys(self, scope: Scope, *, after: int = 0, limit: int = 1000) -> tuple[list[bytes], int]:
        """Returns keys of a scope, earlier puts first, and the `after` of the next call, 0 if no
        further key exists. The keys of pages that were stored together are returned together:
        returns at least `limit` keys (16,384 if `limit` is larger), unless fewer remain, and often
        more. Reads from disk.
        """
    def note_decision(
        self,
        request: str,
        scope: Scope,
        keys: Sequence[bytes],
        outcome: DecisionOutcome,
        *,
        found: int = 0,
        loaded: int = 0,
        detail: str = "",
        estimate: tuple[float, float] | None = None,
    ) -> None:
        """Records what the caller decided about the pages `keys` of a prompt, for
        `ritornello explain --request`. `request`: the engine's own id, of which 128 bytes are kept.
        The first 1,024 keys are kept. `found`: number of leading pages that were found, of which
        the caller loads `loaded`. `detail`: the reason in the caller's words. `estimate`: estimated
        seconds until the prompt is computed, with a load and without. Waits for nothing: decisions
        are sent to the owner about every two seconds, and are dropped while 256, or 1 MiB, wait.
        """
    def record_prefill(self, before: int, tokens: int, seconds: float) -> None:
        """Records that the engine computed `tokens` tokens after `before` tokens in `seconds`, for
        the estimates of `note_prefill_avoided`.
        """
    def note_prefill_avoided(self, before: int, tokens: int, load_seconds: float) -> None:
        """Counts `tokens` tokens, after `before` tokens of their prompt, that were loaded in
        `load_seconds` and not computed; 0 tokens for a load that failed. The time to compute them
        is estimated from the recorded prefills. Without any, the tokens are counted and no times.
        Waits for nothing: counts are sent to the owner about every two seconds.
        """
    def time_limit(self, nbytes: int, least: float, *, put: bool = False) -> float:
        """Returns the seconds to allow for a get, or with `put` a put, of `nbytes`: four times as
        long as the slowest directory is expected to need, at most 60 s, but at least `least`.
        """
    def flush(self) -> None:
        """Makes acknowledged puts and deletes durable. Raises RitornelloError, once, if an owner
        that had acknowledged puts or deletes since the last flush died, or reopened the store after
        a failed write or sync: repeat these puts and deletes.
        """
    def resize(self, capacity: str | int) -> None:
        """Changes the capacity of a store in use. A smaller capacity evicts pages in the order of
        the eviction policy, and pages that find no other place or cannot be read now, but no page
        that is leased or retained. Pass the new capacity to every later `open`: an owner resizes
        the store to the capacity it is given.
        """
    def clear(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None:
        """Finishes running tickets, cancels queued tickets, and releases the directory, unless this
        process has other handles on the store. A second call does nothing. RetryError: calls or
        writes have not ended; call `close` again.
        """
    @property
    def closed(self) -> bool: ...
    @property
    def path(self) -> str: ...
    @property
    def policy(self) -> StorePolicy:
        """The store's permissions when it was opened."""
    @property
    def role(self) -> str:
        """Current role: "owner", or "client", which takes over if the owner dies or closes."""
    @property
    def answers_at_once(self) -> bool:
        """Whether this process owns the store and the index is in memory, so that lookups wait for
        nothing. False while the store is being reopened or closed.
        """
    @property
    def problem(self) -> str:
        """Why the store is not fully usable; "" if it is. Either a write or sync of the owner
        failed, and the owner has not reopened the store yet, or the owner does not answer. In a
        client, reading this property sends a request to the owner.
        """
    def __enter__(self) -> Store: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

@final
class Lookup:
    """Location of a prompt's pages. While `state` is "querying" or "loading", repeat the lookup:
    the other fields are preliminary and no page is leased. In a scope that is not chained, all
    fields count pages anywhere in `keys` instead of leading pages; `Cache.exists` returns which
    pages are on this machine.
    """

    @property
    def state(self) -> Literal["ready", "querying", "loading"]: ...
    @property
    def spans(self) -> list[tuple[TierName, int]]:
        """The tiers of the leading pages, in order, each with its number of consecutive pages;
        remote pages only after the prefetch of the prompt has ended.
        """
    @property
    def local(self) -> int:
        """Leading pages on tiers of this machine; fewer if this process has reached its limit of
        leases.
        """
    @property
    def load(self) -> int:
        """Number of leading pages, at most `local`, that the engine should have after the load: the
        engine loads the pages that it lacks. An engine that already has this number of pages has
        nothing to load.
        """
    @property
    def fetched(self) -> int:
        """Pages fetched from the remote for this prompt so far. After the fetch has ended, only the
        first lookup reports them; later lookups report 0.
        """
    @property
    def progress(self) -> tuple[int, int]:
        """While `state` is "loading": pages fetched from the remote for this prompt so far, and
        pages to fetch in all. Otherwise (0, 0).
        """
    @property
    def estimate(self) -> tuple[float, float, float] | None:
        """The gate's estimates in seconds: of the load, of computing the tokens after the loaded
        pages, and of computing all tokens that the engine lacks, without a load. None while the
        lookup is not "ready", if the gate was not used or has no measurements, or if the engine
        already holds all found pages.
        """
    @property
    def alternatives(self) -> tuple[float, float] | None:
        """The gate's estimates of the seconds until all tokens are loaded or computed: with the
        load that it chose, or the best load if it chose none, and without a load. None when
        `estimate` is None.
        """
    @property
    def leases(self) -> list[tuple[TierName, int]]:
        """Leases on the pages to load. Release each with `Cache.release`, in the same process."""

@final
class Cache:
    """A cache over several tiers: lookups, loads and puts. `flush` waits for writes to a remote, at
    most 60 seconds, and `close` for calls to a remote that are in progress, at most 5 seconds; no
    other method waits for a remote.
    """

    @staticmethod
    def open(
        tiers: Sequence[str],
        *,
        prefetch: str = "timeout",
        write_queue: str | int | None = None,
    ) -> Cache:
        """`tiers`, fastest first: "host 8GiB", "disk /nvme/kv 200GiB" (on several disks: "disk
        /nvme0/kv /nvme1/kv 400GiB"), "s3://bucket/prefix", each followed by options: `write=`
        ("write_through", "selective(2)", "write_back", "none") and `rate=` (bytes per second of
        this process, as in "100MiB"). `prefetch`: maximum time that a lookup stays pending while
        pages are fetched from a remote: "best_effort", "wait_complete", "timeout", or "timeout(1,
        0.25)", the seconds at first and the further seconds per 1,024 tokens to fetch, or 1.5 times
        the estimated duration of the load if that is longer; with every policy at most 30 seconds.
        `write_queue`: maximum bytes that wait to be written to each tier (default: 512 MiB).
        """
    def lookup(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        *,
        ttl: float = 60.0,
        gate: Gate = "auto",
        page_tokens: int = 0,
        page_bytes: int = 0,
        computed: int = 0,
        tokens: int = 0,
    ) -> Lookup:
        """`keys` are the keys of a prompt, starting at its first page; in a scope that is not
        chained, of any pages. With `page_tokens` the gate decides how many pages are worth loading,
        for an engine that has `computed` of the prompt's `tokens` tokens; with "always" and "never"
        it only estimates the cost. `page_bytes`: total bytes of a page, if other scopes hold
        further objects of the same page.
        """
    def release(self, lease: tuple[str, int]) -> None: ...
    def exists(self, scope: Scope, keys: Sequence[bytes]) -> list[bool]:
        """Returns for each page whether a tier of this machine has it."""
    def probe(self, scope: Scope, keys: Sequence[bytes]) -> int:
        """Returns the number of leading pages on tiers of this machine, without a lease and without
        a prefetch.
        """
    def delete(self, scope: Scope, keys: Sequence[bytes]) -> int:
        """Removes pages from the tiers of this machine, in chained scopes with all pages after
        them. Returns how many of `keys` were on one of these tiers. Pages on a remote stay there,
        and later lookups fetch them again.
        """
    def drop_scope(self, scope: Scope) -> None:
        """Drops a scope from the tiers of this machine, durably on return. Pages on a remote stay
        there, and later lookups fetch them again.
        """
    def scopes(self) -> list[tuple[Scope, int, int]]:
        """Returns the scopes of the lowest tier of this machine: see `Store.scopes`."""
    def keys(self, scope: Scope, *, after: int = 0, limit: int = 1000) -> tuple[list[bytes], int]:
        """Returns keys on the lowest tier of this machine: see `Store.keys`."""
    def cancel(self, scope: Scope, keys: Sequence[bytes]) -> bool:
        """Cancels the prefetch and promotions that `lookup` started for this prompt. Returns
        whether any were queued or running.
        """
    def submit_get(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        out: Iterable[Page] | PoolPages,
        *,
        parent: bytes | None = None,
        staged: bool = False,
        sections: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Ticket:
        """Reads each page from the fastest tier of this machine that has it. `staged`, `sections`:
        as in `Store.submit_get`.
        """
    def submit_put(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        pages: Iterable[Page] | PoolPages,
        *,
        first: int = 0,
        parent: bytes | None = None,
        copy: bool = True,
        retain_until: Moment | None = None,
        timeout: float | None = None,
    ) -> Ticket:
        """`keys` are the keys of a prompt, starting at its first page; `pages` start at page
        `first`. With `copy`, the pages are copied before this returns; without `copy`, their memory
        must not change until the ticket is done. If only later keys are known, `parent` is the key
        before them, and the pages of a chained scope are not written to a remote. The ticket
        reports the write to the first tier.
        """
    def record_prefill(self, before: int, tokens: int, seconds: float) -> None:
        """Records that the engine computed `tokens` tokens after `before` tokens in `seconds`."""
    def record_load(self, tier: str, bytes: int, seconds: float) -> None:
        """Records an entry of another process's `take_loads`, for the gate of this process."""
    def take_loads(self) -> list[tuple[TierName, int, float]]:
        """Returns the loads of this process since the last call: for each tier that had loads,
        their total bytes and seconds.
        """
    def record_outcome(self, found: Lookup, seconds: float) -> None:
        """Records that the load which the gate decided in the lookup `found` took `seconds`. If
        `seconds` plus the estimated time to compute the tokens after the loaded pages exceed the
        estimated time to compute without a load, `stats` counts the excess as regret.
        """
    def note_decision(
        self,
        request: str,
        scope: Scope,
        keys: Sequence[bytes],
        outcome: DecisionOutcome,
        *,
        found: int = 0,
        loaded: int = 0,
        detail: str = "",
        estimate: tuple[float, float] | None = None,
    ) -> None:
        """Records a decision at the lowest tier of this machine: see `Store.note_decision`."""
    def note_prefill_avoided(self, before: int, tokens: int, load_seconds: float) -> None:
        """Counts at the lowest tier of this machine, and estimates with the prefills of the gate:
        see `Store.note_prefill_avoided`.
        """
    def time_limit(self, nbytes: int, least: float, *, put: bool = False) -> float:
        """Returns the seconds to allow for a get of `nbytes`, or with `put` for a put to the first
        tier: see `Store.time_limit`.
        """
    def touch(self, scope: Scope, keys: Sequence[bytes]) -> int:
        """Marks the leading pages, or in a scope whose keys do not chain every page present, as
        used on each tier of this machine. Returns the largest number of leading pages that one tier
        has.
        """
    def stats(self) -> dict[str, Any]: ...
    def flush(self) -> None:
        """Starts the writes that `write=write_back` has postponed, waits for all queued writes, and
        makes the pages on the tiers of this machine durable. RetryError: the writes have not ended
        after 60 seconds.
        """
    def close(self) -> None:
        """Closes the cache, and discards queued writes to lower tiers: call `flush` before."""
    @property
    def closed(self) -> bool: ...
    @property
    def policy(self) -> StorePolicy:
        """The permissions of the lowest tier of this machine when the cache was opened."""
    @property
    def capacity_bytes(self) -> int:
        """Capacity of the lowest tier of this machine."""
    @property
    def role(self) -> str:
        """Current role: "owner" if this process owns all tiers of this machine, else "client"."""
    @property
    def answers_at_once(self) -> bool:
        """Whether this process owns all tiers of this machine, and their indexes are in memory, so
        that lookups in these tiers wait for nothing.
        """
    @property
    def problem(self) -> str:
        """The problem that limits the use of a tier of this machine; "" if none is limited."""
    @property
    def tiers(self) -> list[str]:
        """The tiers that were passed to `open`; a remote's address without its options."""
    def __enter__(self) -> Cache: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

def destroy(path: str | PathLike[str]) -> None:
    """Removes the files of a store from all its directories that are mounted, and no other file;
    then these directories, if they are empty. No process may have the store open.
    """

def shown_tier(text: str) -> str:
    """Returns the text of one tier of a list without the user, password and options of an address,
    which may be secrets.
    """

def run_cli(argv: Sequence[str], python: str) -> int: ...
def take_log_line() -> tuple[int, str, str, list[tuple[str, str]], float, str, str, int] | None:
    """Waits for the next line of the core's log, and returns its level, target, message, fields,
    seconds since 1970, thread, source file and line in it. Returns `None` if the log ended.
    """

def end_log(*, print: bool = False) -> None:
    """Ends the core's log in Python: later lines go to standard error. With `print`, the lines that
    wait do too.
    """
