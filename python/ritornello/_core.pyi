"""The compiled core. Everything here releases the GIL while it waits or moves bytes."""

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

# Anything with the buffer protocol (bytes, bytearray, memoryview, NumPy arrays), C-contiguous; or
# a contiguous CPU tensor, known by `data_ptr()`, `nbytes`, `device.type` and `is_contiguous()`.
Buffer: TypeAlias = Any
# One page: a buffer, or several that together, in order, make the page.
Page: TypeAlias = Buffer | Sequence[Buffer]
# Seconds since 1970, or a datetime; one without a time zone is local time.
Moment: TypeAlias = float | datetime
# How pages are encoded: as they come, without loss, or with a loss that is measured.
Codec: TypeAlias = Literal["raw", "split", "zstd", "int8", "int4"]
# Whether the faster of loading and computing is chosen.
Gate: TypeAlias = Literal["auto", "always", "never"]
# A tier of a cache.
TierName: TypeAlias = Literal["host", "disk", "remote"]

__all__ = [
    "Cache",
    "ClosedError",
    "Completions",
    "FatalError",
    "Found",
    "InvalidError",
    "Match",
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
    "run_cli",
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
        """The keyword arguments that make an equal scope."""
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class PagePool:
    """Registered source or target memory of an engine: page `i` is the concatenation, over
    `buffers` in order, of bytes `[i * page_bytes[k], (i + 1) * page_bytes[k])` of buffer `k`
    (its base plus `i * strides[k]` where strides are given). The pool keeps the buffers alive.
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
    """Some pages of a pool, in the order of the ids; accepted wherever a list of pages is."""

    def __len__(self) -> int: ...

@final
class Match:
    """The longest reusable prefix, kept readable until `release()`, or until `ttl` runs out."""

    @property
    def pages(self) -> int: ...
    @property
    def lease(self) -> int: ...
    def release(self) -> None: ...
    def __enter__(self) -> Match: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

@final
class Outcome:
    """What a ticket came to. `pages`: leading pages stored (put) or filled and verified (get).
    `bytes`: payload moved. `reason`: "" when all pages came; else why the first one did not
    ("absent", "checksum", "header", "io", "no_space", "staging_full", "cancelled",
    "deadline", ...). `ok[i]`: page i.
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
    """A submitted put or get. It owns its buffers until it is done."""

    def fileno(self) -> int:
        """An eventfd, readable once the ticket is done."""
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def wait(self, timeout: float | None = None) -> Outcome | None:
        """The outcome, or None if it is not there within `timeout` seconds."""
    def wait_section(self, number: int, timeout: float | None = None) -> bool:
        """Whether, within `timeout` seconds, sections up to `number` of all pages came, verified,
        or the ticket is done, which then says what came. What has come may be read; it stays the
        ticket's until that is done. A ticket without sections is waited for.
        """

@final
class Completions:
    """Many tickets, one eventfd. The tags may be anything."""

    def __new__(cls) -> Completions: ...
    def fileno(self) -> int:
        """An eventfd, readable when a ticket was done since it was last read."""
    def add(self, ticket: Ticket, tag: Any) -> None:
        """Waits for a ticket, which `drain` then returns with `tag`. It belongs to one at most."""
    def drain(self) -> list[tuple[Any, Outcome]]:
        """The tickets that were done since, each once. Read the eventfd before, not after."""
    def __len__(self) -> int:
        """Tickets that were not drained yet."""

@final
class StorePolicy:
    """What `policy.toml` in a store's directory permits. Without it nothing is permitted, and no
    call is denied.
    """

    @property
    def allow_weak_hashes(self) -> bool:
        """Whether keys may be made by a hash for which collisions can be made."""
    @property
    def allow_request_retention(self) -> bool:
        """Whether requests may say how long their pages are kept from eviction."""
    @property
    def deny_clients(self) -> list[str]:
        """Calls (`clear`, `drop_scope`, `reshape`) that the owner refuses to other processes."""
    def check_hash(self, algorithm: str) -> None:
        """InvalidError, which names the permission, where keys that `algorithm` made may not be
        used.
        """

@final
class Store:
    @staticmethod
    def open(
        path: str | PathLike[str],
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
        """Owner of the directory, or client of the process that owns it. `capacity` may be
        omitted for a directory that holds a store. `codec` is for scopes that have none of their
        own. `write_budget` spares the drive: "2TB/day", "500GiB/hour", "20MB/s", or bytes a day;
        while it runs short, pages are written when they are put for the second time. `index`
        rarely needs to be named: "run", or "run:8GiB" with a ceiling for its memory (otherwise a
        quarter of what the process may have); "lsm", in a build that has it, is for catalogues
        larger than memory; "memory" keeps nothing. An owner that names another one than the store
        has converts it. `segment_bytes` is chosen when a store is made. What differs from what the
        store has and cannot be had is logged. A `SettingError` says that an argument cannot be
        read; any other error may pass.
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
        """Pages that are retained, and all before them, are not evicted until then (a year at
        most): within a scope's share, where what ends first gives way. They can be deleted.
        """
    def configure(
        self,
        scope: Scope,
        *,
        codec: Codec | None = None,
        quota: str | int | None = None,
        retained: str | int | None = None,
    ) -> None:
        """Sets what is to hold for a scope, durably: how its pages are encoded from now on, bytes
        on disk that it may hold, and bytes of it that may be retained (a quarter of the quota or
        of the store by default). What is not named goes back to the store's default.
        """
    def probe(self, scope: Scope, keys: Sequence[bytes]) -> int: ...
    def pin_prefix(
        self, scope: Scope | Sequence[Scope], keys: Sequence[bytes], *, ttl: float = 60.0
    ) -> Match:
        """In a scope whose keys do not chain, every page that is there is kept. Of several scopes:
        the leading pages that all of them have, under one lease. A process leases at most as much
        of the store as is left for the others (half, if it is alone): of a longer prefix the pages
        that fit, which `pages` counts. If the first does not fit: RetryError; release leases.
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
        """Leading pages filled and verified. In a scope whose keys do not chain, what is there is
        filled behind the first that is missing, too: `submit_get` says which.
        """
    def submit_put(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        pages: Iterable[Page] | PoolPages,
        *,
        parent: bytes | None = None,
        copy: bool = False,
        retain_until: Moment | None = None,
        timeout: float | None = None,
    ) -> Ticket:
        """`copy=True`: the bytes are taken into bounded staging before this returns, so the
        memory may be reused at once; if staging is full the pages that do not fit are skipped
        (reason "staging_full"). Pages that are stored already are not copied; one that is gone
        when the put reaches the owner ends it (reason "absent"). `copy=False`: the memory must
        not change until the ticket is done.
        """
    def submit_get(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        out: Iterable[Page] | PoolPages,
        *,
        staged: bool = False,
        sections: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Ticket:
        """`staged=True`: the bytes come through staging, as soon as there is room, because the
        disk reaches its huge pages faster than small ones: see `ritornello.memory`. `sections`:
        where sections of a page end, in bytes, the last at its end; they come one after the
        other, each of all pages, and `Ticket.wait_section` waits for one.
        """
    def touch(self, scope: Scope, keys: Sequence[bytes]) -> int: ...
    def delete(self, scope: Scope, keys: Sequence[bytes]) -> int: ...
    def drop_scope(self, scope: Scope) -> None: ...
    def scopes(self) -> list[tuple[Scope, int, int]]:
        """The scopes that the store knows, in the order in which they were registered: each with
        its pages and the bytes that they take on disk.
        """
    def keys(self, scope: Scope, *, after: int = 0, limit: int = 1000) -> tuple[list[bytes], int]:
        """Some keys of a scope, those put first before others, at least `limit` if there are as
        many; and `after` for the next call, 0 behind the last key. It reads from disk.
        """
    def flush(self) -> None:
        """Makes puts and deletes durable that were acknowledged. RitornelloError, once, if the
        owner that acknowledged them has died: repeat them.
        """
    def resize(self, capacity: str | int) -> None:
        """The store stays in use. A smaller one keeps what was used last. Give `open` the new
        capacity from then on: an owner resizes the store to what it is given.
        """
    def clear(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None:
        """Finishes the tickets that run and lets the directory go. Again: does nothing."""
    @property
    def closed(self) -> bool: ...
    @property
    def path(self) -> str: ...
    @property
    def policy(self) -> StorePolicy:
        """What the store permitted when it was opened."""
    @property
    def role(self) -> str:
        """Now: "owner" or "client", which takes over when the owner dies."""
    @property
    def problem(self) -> str:
        """What keeps the store from being used in full, "" if nothing does: a write or sync of its
        owner failed, until the owner has reopened the store; or the owner does not answer. A client
        asks its owner.
        """
    def __enter__(self) -> Store: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

@final
class Found:
    """Where a prompt is. `state` is "ready", or "asking" or "loading": ask again then, the rest is
    what is known so far, and nothing is leased.
    """

    @property
    def state(self) -> Literal["ready", "asking", "loading"]: ...
    @property
    def spans(self) -> list[tuple[TierName, int]]:
        """Where the leading pages lie, in order; on the remote as far as that is known."""
    @property
    def local(self) -> int:
        """Leading pages that are on this machine."""
    @property
    def load(self) -> int:
        """Leading pages, at most `local`, that the engine is to have after loading those of them
        that it lacks; nothing is worth loading if that is no more than it has.
        """
    @property
    def brought(self) -> int:
        """Pages of those that came from the remote for this prompt just now."""
    @property
    def progress(self) -> tuple[int, int]:
        """Pages that have come of those that are on their way, and how many those are."""
    @property
    def estimate(self) -> tuple[float, float, float] | None:
        """Seconds that loading takes, computing the rest, and computing everything, as the gate
        has them; None where it was not asked or knows nothing.
        """
    @property
    def leases(self) -> list[tuple[TierName, int]]:
        """What keeps the pages to be loaded: give each to `Cache.release`, in any process."""

@final
class Cache:
    """Tiers of one list as one: found, loaded and put. No call waits for a remote."""

    @staticmethod
    def open(
        tiers: Sequence[str],
        *,
        prefetch: str = "timeout",
        write_queue: str | int | None = None,
    ) -> Cache:
        """`tiers`, fastest first: "host 8GiB", "disk /nvme/kv 200GiB", "s3://bucket/prefix", each
        with options behind it, `write=` ("write_through", "selective(2)", "write_back", "none") and
        `rate=` ("100MiB", a second, of this process). `prefetch`: how long `find` asks to be asked
        again while pages come from a remote, "best_effort", "wait_complete", "timeout", or
        "timeout(1, 0.25)", seconds at least and for every 1,024 tokens. `write_queue`: bytes that
        may wait to be written to each tier (512 MiB).
        """
    def find(
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
    ) -> Found:
        """`keys` are those of a prompt from its first page on. With `page_tokens` the gate decides
        how many pages are worth loading, for an engine that has `computed` tokens of a prompt of
        `tokens`, or says, for "always" and "never", what that takes; `page_bytes` where a page lies
        in other objects besides this scope's.
        """
    def release(self, lease: tuple[str, int]) -> None: ...
    def exists(self, scope: Scope, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are on this machine, each by itself."""
    def cancel(self, scope: Scope, keys: Sequence[bytes]) -> bool:
        """Stops what `find` began for this prompt. Whether there was anything to stop."""
    def submit_get(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        out: Iterable[Page] | PoolPages,
        *,
        parent: bytes | None = None,
        sections: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Ticket:
        """Reads each page from the fastest tier of this machine that has it. `sections`: as for
        `Store.submit_get`.
        """
    def submit_put(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        pages: Iterable[Page] | PoolPages,
        *,
        first: int = 0,
        parent: bytes | None = None,
        retain_until: Moment | None = None,
        timeout: float | None = None,
    ) -> Ticket:
        """`keys` are those of a prompt from its first page on, `pages` those from page `first` on,
        copied before this returns. Where only later keys are known, `parent` is the one before
        them: no remote hears of such pages. The ticket is the first tier's.
        """
    def learn_prefill(self, before: int, tokens: int, seconds: float) -> None:
        """`tokens` tokens behind `before` others took the engine so long to compute."""
    def learn_load(self, tier: str, bytes: int, seconds: float) -> None:
        """What another process's `take_loads` said."""
    def take_loads(self) -> list[tuple[TierName, int, float]]:
        """What this process loaded since the last call: tier, bytes and seconds."""
    def judge(self, found: Found, seconds: float) -> None:
        """How long the load took that `found` decided for: for the regret in `stats`."""
    def stats(self) -> dict[str, Any]: ...
    def flush(self) -> None:
        """Waits until all tiers have what they are to have, and makes it durable here."""
    def close(self) -> None:
        """What waits to be written to lower tiers is not waited for: `flush` before."""
    @property
    def closed(self) -> bool: ...
    @property
    def policy(self) -> StorePolicy:
        """That of the lowest tier of this machine when it was opened."""
    @property
    def tiers(self) -> list[str]:
        """As they were given; of a remote's address without its options."""
    def __enter__(self) -> Cache: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

def destroy(path: str | PathLike[str]) -> None:
    """Removes a store that nobody has open: its files in all its directories, nothing else."""

def run_cli(argv: Sequence[str], python: str) -> int: ...
