"""A worker process, started with the arguments `hold MASTER` or `use MASTER DIR`. MASTER is the
address of `mooncake_master`, DIR the directory of the worker's host tier.

With `use` the process reads commands, one per line: `put NAME` stores a prompt, `get NAME` finds
and loads a prompt. The answer to a command is two numbers of pages; see `use`.
"""

import sys
import time
from pathlib import Path

import numpy as np
from support import blank, keys_of, pages_of

import ritornello as rt
from ritornello.mooncake import Mooncake

PAGE = 128 << 10
PAGES = 150
WAIT = 120.0


def hold(master: str) -> None:
    """Contributes memory to Mooncake's store, and prints the store's first answer: `False`, to a
    query for a missing name. Ends when standard input ends.
    """
    held = Mooncake(master=master, host="127.0.0.1", segment=str(512 << 20))
    print(held.exists("nothing"), flush=True)
    sys.stdin.read()


def use(master: str, place: Path) -> None:
    """Answers `put` with the number of pages that it stored, and the number of pages that this
    process has written to the remote since its start; answers `get` with the numbers of pages found
    and loaded. The host tier is at `place`.
    """
    remote = f"ritornello.mooncake:Mooncake?master={master}&host=127.0.0.1"
    scope = rt.Scope.opaque("mooncake", PAGE, chained=True)
    tiers = [f"host 256MiB {place}", remote]
    with rt.Cache.open(tiers, prefetch="wait_complete") as cache:
        for line in sys.stdin:
            what, name = line.split()
            keys = keys_of(name, PAGES)
            if what == "put":
                stored = cache.submit_put(scope, keys, pages_of(keys, PAGE)).wait(WAIT)
                cache.flush()
                below = cache.stats()["tiers"][-1]["written_pages"]
                print(stored.pages if stored else 0, below, flush=True)
                continue
            until = time.monotonic() + WAIT
            while (found := cache.lookup(scope, keys)).state != "ready":
                assert time.monotonic() < until
                time.sleep(0.01)
            out = blank(PAGES, PAGE)
            loaded = cache.submit_get(scope, keys, out).wait(WAIT)
            assert loaded is not None
            right = pages_of(keys, PAGE)
            for page, ok in enumerate(loaded.ok):
                assert not ok or np.array_equal(out[page], right[page])
            print(found.local, loaded.pages, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(sys.argv[2])
    else:
        use(sys.argv[2], Path(sys.argv[3]))
