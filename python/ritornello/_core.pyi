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

__all__ = [
    "ClosedError",
    "FatalError",
    "InvalidError",
    "Match",
    "Outcome",
    "PagePool",
    "PoolPages",
    "RetryError",
    "RitornelloError",
    "Scope",
    "Store",
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
        has converts it. `segment_bytes` is chosen when a store is made.
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
    def match(self, scope: Scope, keys: Sequence[bytes], *, ttl: float = 60.0) -> Match: ...
    def release(self, lease: int) -> None: ...
    def exists(self, scope: Scope, keys: Sequence[bytes]) -> list[bool]: ...
    def get_batch(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        out: Iterable[Page] | PoolPages,
        *,
        timeout: float | None = None,
    ) -> int: ...
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
        (reason "staging_full"). `copy=False`: the memory must not change until the ticket is
        done.
        """
    def submit_get(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        out: Iterable[Page] | PoolPages,
        *,
        timeout: float | None = None,
    ) -> Ticket: ...
    def touch(self, scope: Scope, keys: Sequence[bytes]) -> int: ...
    def delete(self, scope: Scope, keys: Sequence[bytes]) -> int: ...
    def drop_scope(self, scope: Scope) -> None: ...
    def flush(self) -> None: ...
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
    def role(self) -> str:
        """Now: "owner" or "client", which takes over when the owner dies."""
    def __enter__(self) -> Store: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

def destroy(path: str | PathLike[str]) -> None:
    """Removes a store that nobody has open: its files in all its directories, nothing else."""

def run_cli(argv: Sequence[str], python: str) -> int: ...
