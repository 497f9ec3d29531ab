"""Ritornello keeps the key/value pages of LLM prefixes on disk, so that a prefix need not be
prefilled again after its eviction from memory, or after a restart.

    import numpy as np
    import ritornello as rt

    scope = rt.Scope(
        model="meta-llama/Llama-3-8B", dtype="bfloat16", page_tokens=64,
        layers=(0, 32), kv_heads=(0, 8), head_dim=128,
    )
    pages = np.zeros((len(keys), scope.page_bytes), np.uint8)

    with rt.Store.open("/nvme/kv", capacity="200GiB") as store:
        store.put_batch(scope, keys, pages)
        hit = store.probe(scope, keys)                    # leading pages that are stored
        got = store.get_batch(scope, keys[:hit], pages)   # leading pages filled and verified
        store.flush()

**Keys** are the engine's block hashes: `bytes` objects with a length of 8 to 64, in the order of
the sequence. In a chained scope a key commits to all keys before it, and a page whose predecessor
is missing is not found.

**A page** is one buffer (`bytes`, `memoryview`, NumPy array, contiguous CPU tensor), or a list of
buffers that together, in order, make the page; always `scope.page_bytes` bytes in all. Buffers at
addresses that are multiples of 4 KiB can be read and written without a copy. `PagePool` registers
an engine's memory once and names its pages by number.

**Several processes** may open one directory: the first process owns the store, all other processes
are clients of the owner, and all see the same store. After `fork`, the child must open the
directory again.

**Threads**: all calls may be made from any thread, and let other threads run while they wait or
move bytes. `submit_put` and `submit_get` return a `Ticket` and do not wait for the disk; its
`fileno()` suits `select` and asyncio, and `Completions` joins the events of many tickets in one
descriptor.

**Several tiers** (memory, disk, a store that machines share) are one `Cache`: docs/tiers.md.

**Errors** are in `ritornello.errors`. A call that returns how many pages it moved raises no error
for missing or corrupted pages. Warnings go to the loggers below `ritornello.core` of `logging`,
with `RITORNELLO_LOG=info` other events too. With `RITORNELLO_LOG=info,json` these events go to
standard error instead, as one JSON object per line.
"""

from ritornello import errors
from ritornello._core import (
    Cache,
    Completions,
    Device,
    DeviceMove,
    DevicePages,
    DevicePool,
    DeviceSlots,
    LeasedPrefix,
    Lookup,
    Outcome,
    PagePool,
    Scope,
    Store,
    StorePolicy,
    Ticket,
    __version__,
    destroy,
)
from ritornello.backend import Backend, FullBackend

__all__ = [
    "Backend",
    "Cache",
    "Completions",
    "Device",
    "DeviceMove",
    "DevicePages",
    "DevicePool",
    "DeviceSlots",
    "FullBackend",
    "LeasedPrefix",
    "Lookup",
    "Outcome",
    "PagePool",
    "Scope",
    "Store",
    "StorePolicy",
    "Ticket",
    "__version__",
    "destroy",
    "errors",
]
