"""The caches of the connectors of vLLM, SGLang and LMCache behind one interface, for tests that
hold for every engine. Each cache is over the tiers of one machine.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from support import Bytes, blank, keys_of, pages_of
from tier_support import ROW, TierHarness, offload_keys

import ritornello as rt
from ritornello.connector.fail_safe import FailSafeStore
from ritornello.lmcache.lmcache_objects import Item, Job, ObjectStore
from ritornello.lmcache.lookup import ObjectLookup
from ritornello.lmcache.naming import Family, Group, ObjectFormat, ObjectName
from ritornello.lmcache.settings import Settings as LMCacheSettings
from ritornello.sglang.cache_store import SGLangCacheStore
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.settings import Settings as SGLangSettings
from ritornello.vllm.tier.requests import LookupAnswer

WAIT_SECONDS = 60.0
PAGE_BYTES = 64 << 10


class EngineLookup(ABC):
    """A lookup as an engine makes it. `waited`: whether the answer was pending at least once.
    `pages`: the number of pages found, valid after `is_done` has returned True.
    """

    waited = False
    pages = 0

    @abstractmethod
    def is_done(self) -> bool:
        """Continues the lookup. Returns whether it has ended."""

    def result(self) -> int:
        """Continues the lookup until it ends. Returns the number of pages found."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.is_done():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self.pages


class EngineCache(ABC):
    """A connector's cache over `tiers`; `path` is the directory of its disk. `settings`: further
    settings, which must be settings of every connector. `chained`: whether the connector's scopes
    are chained.
    """

    chained: ClassVar[bool] = True
    store: FailSafeStore

    @abstractmethod
    def __init__(self, tiers: Sequence[str], path: Path, **settings: Any) -> None: ...

    @staticmethod
    def keys_of(name: str, pages: int) -> list[bytes]:
        """Returns keys of the prompt `name` in the engine's form."""
        return keys_of(name, pages)

    @abstractmethod
    def put(self, keys: Sequence[bytes], contents: Sequence[bytes] | None = None) -> int:
        """Puts pages under `keys`, and returns the number of pages that were stored. The bytes of
        the pages follow from the keys `contents`, by default from `keys`.
        """

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> EngineLookup:
        """Starts a lookup of the prompt with these keys."""

    @abstractmethod
    def load(self, lookup: Any, keys: Sequence[bytes]) -> tuple[int, Bytes]:
        """Loads the pages of `keys`, which `lookup` found. Returns the number of pages loaded, and
        the memory that they were loaded to.
        """

    def serve(self, keys: Sequence[bytes]) -> int:
        """Looks up a prompt, loads all pages found and checks their bytes. Returns their number."""
        lookup = self.lookup(keys)
        found = keys[: lookup.result()]
        if found:
            loaded, out = self.load(lookup, found)
            assert loaded == len(found)
            assert np.array_equal(out, pages_of(found, out.shape[1])), "the load has wrong bytes"
        return len(found)

    def flush(self) -> None:
        """Waits until all pages are written to the lower tiers."""
        self.store.call("flush", lambda store: store.flush(), None)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.store.call("stats", lambda store: dict(store.stats()), {})
        return found

    def remote(self) -> dict[str, Any]:
        """Returns the statistics of the remote tier."""
        tier: dict[str, Any] = self.stats()["tiers"][-1]
        assert tier["tier"] == "remote"
        return tier

    def close(self) -> None:
        self.store.close()


class VllmLookup(EngineLookup):
    def __init__(self, rig: TierHarness, name: str, keys: Sequence[bytes]) -> None:
        self.request = rig.begin(name, keys)
        self._rig, self._keys = rig, keys

    def is_done(self) -> bool:
        answers = self._rig.answers(self.request, self._keys)
        if LookupAnswer.PENDING in answers:
            self.waited = True
            self._rig.tier.end_step()
            return False
        self.pages = answers.count(LookupAnswer.HIT)
        return True


class VllmTierCache(EngineCache):
    """Our secondary tier of vLLM's offloading, without vLLM."""

    def __init__(self, tiers: Sequence[str], path: Path, **settings: Any) -> None:
        self._rig = TierHarness(path, tiers=list(tiers), **settings)
        self.store = self._rig.store
        self._numbers = count()

    @staticmethod
    def keys_of(name: str, pages: int) -> list[bytes]:
        return offload_keys(name, pages)

    def put(self, keys: Sequence[bytes], contents: Sequence[bytes] | None = None) -> int:
        rig, rows = self._rig, range(len(keys))
        request = rig.begin(f"put {next(self._numbers)}", keys)
        rig.host[rows] = pages_of(contents or keys, ROW)
        rig.tier.save(rig._transfer(request, keys, rows))
        stored = rig.ended().ok.count(True)
        rig.tier.end_request(request)
        return stored

    def lookup(self, keys: Sequence[bytes]) -> VllmLookup:
        return VllmLookup(self._rig, f"lookup {next(self._numbers)}", keys)

    def load(self, lookup: VllmLookup, keys: Sequence[bytes]) -> tuple[int, Bytes]:
        ok = self._rig.load(lookup.request, keys).ok
        self._rig.tier.end_request(lookup.request)
        return ok.count(True), self._rig.host[32 : 32 + len(keys)]

    def close(self) -> None:
        self._rig.tier.close()


class ObservedStore(SGLangCacheStore):
    """An SGLang cache. `waits`: how often its lookups have waited for the remote; one lookup may
    wait several times.
    """

    waits = 0

    @contextmanager
    def _cancellable(self, keys: Sequence[bytes]) -> Iterator[Any]:
        with super()._cancellable(keys) as ended:

            def wait(timeout: float) -> bool:
                self.waits += 1
                return ended.wait(timeout)

            yield SimpleNamespace(wait=wait)


class SGLangLookup(EngineLookup):
    """A lookup on a separate thread, as SGLang makes it."""

    def __init__(self, store: ObservedStore, scope: rt.Scope, keys: Sequence[bytes]) -> None:
        self._store, self._waits = store, store.waits
        threads = ThreadPoolExecutor(1)
        self._asked: Future[int] = threads.submit(store.find, [scope], keys, [], 16)
        threads.shutdown(wait=False)

    def is_done(self) -> bool:
        if not self._asked.done():
            return False
        self.waited = self._store.waits > self._waits
        self.pages = self._asked.result()
        return True


class SGLangCache(EngineCache):
    """The cache that our storage backend for SGLang uses."""

    SCOPE = rt.Scope.opaque("sglang", PAGE_BYTES, chained=True)

    def __init__(self, tiers: Sequence[str], path: Path, **settings: Any) -> None:
        parsed = SGLangSettings.parse({"tiers": list(tiers), **settings})
        self._sglang = self.store = ObservedStore(parsed, RateMeter())

    def put(self, keys: Sequence[bytes], contents: Sequence[bytes] | None = None) -> int:
        return self._sglang.put(self.SCOPE, keys, pages_of(contents or keys, PAGE_BYTES), [])

    def lookup(self, keys: Sequence[bytes]) -> SGLangLookup:
        return SGLangLookup(self._sglang, self.SCOPE, keys)

    def load(self, lookup: SGLangLookup, keys: Sequence[bytes]) -> tuple[int, Bytes]:
        out = blank(len(keys), PAGE_BYTES)
        return self._sglang.get(self.SCOPE, keys, out), out


class LMCacheLookup(EngineLookup):
    def __init__(self, lookup: ObjectLookup) -> None:
        self.lookup = lookup

    def is_done(self) -> bool:
        if not self.lookup.advance():
            self.waited = True
            return False
        self.pages = self.lookup.found.count(True)
        assert all(self.lookup.found[: self.pages]), "no object may be found after a missing object"
        return True


class LMCacheCache(EngineCache):
    """The `ObjectStore` that our adapter and our native client for LMCache use; each page is one
    object.
    """

    chained = False
    FAMILY = Family("org/model-7b", 0, "")
    FORMAT = ObjectFormat(PAGE_BYTES, "bfloat16[2,4,64,64]@KV_2LTD")

    def __init__(self, tiers: Sequence[str], path: Path, **settings: Any) -> None:
        parsed = LMCacheSettings.parse({"tiers": list(tiers), **settings})
        self._objects = ObjectStore(parsed)
        self.store = self._objects.store

    @staticmethod
    def keys_of(name: str, pages: int) -> list[bytes]:
        return [bytes(8) + key for key in keys_of(name, pages)]

    def put(self, keys: Sequence[bytes], contents: Sequence[bytes] | None = None) -> int:
        return sum(self._move(keys, pages_of(contents or keys, PAGE_BYTES), is_put=True).ok)

    def lookup(self, keys: Sequence[bytes]) -> LMCacheLookup:
        groups = [Group(self.FAMILY, range(len(keys)), list(keys))]
        expected = {0: self.FORMAT}
        return LMCacheLookup(ObjectLookup(self._objects, groups, len(keys), 60.0, expected))

    def load(self, lookup: LMCacheLookup, keys: Sequence[bytes]) -> tuple[int, Bytes]:
        out = blank(len(keys), PAGE_BYTES)
        loaded = sum(self._move(keys, out, is_put=False).ok)
        for leased in lookup.lookup.leases:
            self._objects.store.release(leased.lease)
        return loaded, out

    def _move(self, keys: Sequence[bytes], memory: Bytes, *, is_put: bool) -> Job:
        names = [ObjectName(self.FAMILY, key) for key in keys]
        items = [Item(name, self.FORMAT, page) for name, page in zip(names, memory, strict=True)]
        completions = rt._core.Completions()
        job = self._objects.start(1, items, completions, is_put=is_put)
        deadline = time.monotonic() + WAIT_SECONDS
        while job is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
            job = next(iter(self._objects.complete_tickets(completions.drain())), None)
        return job


ENGINE_CACHES: list[type[EngineCache]] = [VllmTierCache, SGLangCache, LMCacheCache]
