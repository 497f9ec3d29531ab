"""Pages of stores on loop devices: large pages, and runs of small pages with long index records."""

import time
from collections.abc import Sequence

from support import blank, keys_of, pages_of

import ritornello as rt
from ritornello.errors import RetryError

PAGE_BYTES = 256 << 10
# The scope is unchained, so a lost page hides no other page.
SCOPE = rt.Scope.opaque("device", PAGE_BYTES)
SMALL_PAGE = 4096
SMALL_SCOPE = rt.Scope.opaque("index", SMALL_PAGE)


def read(store: rt.Store, keys: Sequence[bytes]) -> list[bytes]:
    """Returns the keys whose pages are hits, and checks the bytes of these pages."""
    found: list[bytes] = []
    for first in range(0, len(keys), 16):
        some = keys[first : first + 16]
        out = blank(len(some), PAGE_BYTES)
        outcome = store.submit_get(SCOPE, some, list(out)).wait()
        assert outcome is not None
        right = pages_of(some, PAGE_BYTES)
        for at, ok in enumerate(outcome.ok):
            if ok:
                assert (out[at] == right[at]).all(), "a get returned wrong bytes"
                found.append(some[at])
    return found


def put(store: rt.Store, keys: Sequence[bytes], seconds: float = 20) -> None:
    """Puts pages, and retries for `seconds` while the store has no space for them."""
    pages = pages_of(keys, PAGE_BYTES)
    deadline = time.monotonic() + seconds
    while True:
        try:
            if store.put_batch(SCOPE, keys, list(pages)) == len(keys):
                return
        except RetryError:
            pass
        assert time.monotonic() < deadline, (
            f"no put of {len(keys)} pages succeeded within {seconds} s"
        )
        time.sleep(0.05)


def put_small(store: rt.Store, name: str, runs: int) -> list[bytes]:
    """Puts runs of 200 small pages. The index record of a run is longer than 3 KiB, so that the
    records of several runs fill whole blocks of the journal file. A block that was written whole is
    not written again when later records are appended.
    """
    keys = []
    for n in range(runs):
        some = keys_of(f"{name} {n}", 200)
        assert store.put_batch(SMALL_SCOPE, some, list(pages_of(some, SMALL_PAGE))) == 200
        keys += some
    return keys
