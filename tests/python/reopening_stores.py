"""Faults of a store's directory, stores that fail, and the stores of all connectors."""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from support import keys_of, pages_of

import ritornello as rt
from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.meter import Meter
from ritornello.errors import FatalError, InvalidError
from ritornello.lmcache.cache_store import LMCacheTiers
from ritornello.lmcache.settings import Settings as LMCacheSettings
from ritornello.lmcache.store import LMCacheStore
from ritornello.sglang.cache_store import SGLangCacheStore
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.settings import Settings as SGLangSettings
from ritornello.sglang.store import SGLangStore
from ritornello.vllm.cache_store import CacheStore
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.settings import Settings as VllmSettings
from ritornello.vllm.store import VllmStore
from ritornello.vllm.tier.cache import TierCache
from ritornello.vllm.tier.store import TierStore

SCOPE = rt.Scope.opaque("reopening", 4096)
KEYS = keys_of("reopening", 3)
PAGES = pages_of(KEYS, 4096)


def can_serve(fail_safe: FailSafeStore) -> bool:
    """Returns whether `fail_safe` stores pages and reads them back."""
    put = fail_safe.call("put", lambda store: store.put_batch(SCOPE, KEYS, PAGES), 0)
    out = [bytearray(4096) for _ in KEYS]
    got = fail_safe.call("get", lambda store: store.get_batch(SCOPE, KEYS, out), 0)
    right = [bytes(page) for page in PAGES]
    assert [bytes(page) for page in out[:got]] == right[:got]
    return (put, got) == (len(KEYS), len(KEYS))


def can_store(fail_safe: FailSafeStore) -> bool:
    """Returns whether a put of `fail_safe` stores its pages. Reads the result from the put's
    ticket, because a further call of the store could reopen it.
    """
    ticket = fail_safe.call("put", lambda store: store.submit_put(SCOPE, KEYS, PAGES), None)
    outcome = ticket and fail_safe.attempt("wait", lambda: ticket.wait(60), None)
    return outcome is not None and outcome.pages == len(KEYS)


# Faults of a store's directory: each function makes its fault at `path`, and returns a function
# that removes the fault.


def occupied_by_file(path: Path) -> Callable[[], object]:
    path.write_text("a file")
    return path.unlink


def owned_by_other_user(path: Path) -> Callable[[], object]:
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of a directory")
    path.mkdir()
    os.chown(path, 12345, 12345)
    return lambda: os.chown(path, 0, 0)


def holding_foreign_files(path: Path) -> Callable[[], object]:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    return (path / "thesis.tex").unlink


def vllm_store(path: Path) -> FailSafeStore:
    return VllmStore(VllmSettings.parse({"path": str(path), "capacity": "1GiB"}), StepMeter())


def vllm_cache_store(path: Path) -> FailSafeStore:
    return CacheStore(VllmSettings.parse({"tiers": [f"host 64MiB {path}"]}), StepMeter())


def vllm_tier_store(path: Path) -> FailSafeStore:
    return TierStore(VllmSettings.parse({"path": str(path), "capacity": "1GiB"}), Meter())


def vllm_tier_cache(path: Path) -> FailSafeStore:
    return TierCache(VllmSettings.parse({"tiers": [f"disk {path} 64MiB"]}), Meter())


def sglang_store(path: Path) -> FailSafeStore:
    return SGLangStore(SGLangSettings.parse({"path": str(path), "capacity": "1GiB"}), RateMeter())


def sglang_cache_store(path: Path) -> FailSafeStore:
    return SGLangCacheStore(SGLangSettings.parse({"tiers": [f"disk {path} 64MiB"]}), RateMeter())


def lmcache_store(path: Path) -> FailSafeStore:
    return LMCacheStore(LMCacheSettings.parse({"path": str(path), "capacity": "1GiB"}))


def lmcache_tiers(path: Path) -> FailSafeStore:
    return LMCacheTiers(LMCacheSettings.parse({"tiers": [f"disk {path} 64MiB"]}))


PREAMBLE = """
import os, sys, threading, time
import ritornello.connector.fail_safe
from logging import getLogger
from pathlib import Path
from ritornello.connector.settings import StoreSettings

ritornello.connector.fail_safe.RETRY_SECONDS = 0.05
ritornello.connector.fail_safe.RETRY_SECONDS_MAX = 0.1
path = Path(sys.argv[1])
settings = StoreSettings(str(path), capacity="1GiB")
store = ritornello.connector.fail_safe.FailSafeStore(settings, getLogger(), lambda _: None)
"""

# Ends while a background thread tries for the second time to open the store. Prints "failed" before
# this attempt, which begins after a line on standard input.
EXIT_WHILE_OPENING = f"""{PREAMBLE}
open_store, attempts, begun = ritornello.connector.fail_safe.open_store, [], threading.Event()

def opened(*settings):
    attempts.append(1)
    if len(attempts) == 2:
        print("failed", flush=True)
        sys.stdin.readline()
        begun.set()
    return open_store(*settings)

ritornello.connector.fail_safe.open_store = opened
assert not store.open()
begun.wait()
# Gives the second attempt to open the store time to begin its wait for the owner.
time.sleep(0.3)
"""

# The store cannot be opened at first, and the process forks. The child removes the fault and opens
# the store; the parent ends with the child's exit status.
FORK_WHILE_OPENING = f"""{PREAMBLE}
assert not store.open()
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status))
path.unlink()
end = time.monotonic() + 30
while not store.open() and time.monotonic() < end:
    time.sleep(0.01)
os._exit(0 if store.open() else 1)
"""


# Exit status of a script that may not use userfaultfd(2), or does not know its system call number.
NOT_SUPPORTED = 77

# No thread resolves the page faults in the memory of a put, so the put never ends and its store
# cannot be closed, as with a hung disk. Then the store's directory is replaced by another store's.
EXIT_WHILE_CLOSING = f"""{PREAMBLE}
import ctypes, fcntl, mmap, platform, struct
import ritornello as rt

memory = mmap.mmap(-1, mmap.PAGESIZE)
try:
    number = {{"x86_64": 323, "aarch64": 282}}[platform.machine()]
    faults = ctypes.CDLL(None, use_errno=True).syscall(number, os.O_CLOEXEC)
    fcntl.ioctl(faults, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))  # UFFDIO_API
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    missing = struct.pack("QQQQ", address, mmap.PAGESIZE, 1, 0)
    fcntl.ioctl(faults, 0xC020AA00, bytearray(missing))  # UFFDIO_REGISTER
except (KeyError, OSError, ValueError):
    os._exit({NOT_SUPPORTED})
scope, key = rt.Scope.opaque("stuck", mmap.PAGESIZE), bytes(32)
other = path.with_name("other")
with rt.Store.open(other, "1GiB") as core:
    assert core.put_batch(scope, [key], [bytes(mmap.PAGESIZE)]) == 1
assert store.open()
stuck = store.call("put", lambda core: core.submit_put(scope, [bytes(31) + b"k"], [memory]), None)
assert stuck.wait(0.5) is None
path.rename(path.with_name("away"))
other.rename(path)
end = time.monotonic() + 30
while not store.call("exists", lambda core: core.exists(scope, [key]) == [True], False):
    assert time.monotonic() < end, store.broken
    time.sleep(0.05)
print("serves", flush=True)
"""


class FailingStore:
    """Stand-in for `ritornello.Store`. `probe` raises `FatalError`, `check_hash` accepts only
    `sha256`, and `close` waits until `closable` is set.
    """

    def __init__(self, role: str = "client") -> None:
        self.role = role
        self.answers_at_once = role == "owner"
        self.policy = self
        self.closed, self.closable = Event(), Event()
        self.closable.set()

    def probe(self) -> int:
        raise FatalError("the device is gone")

    def check_hash(self, algorithm: str) -> None:
        if algorithm != "sha256":
            raise InvalidError("keys of this hash may collide")

    def close(self) -> None:
        assert self.closable.wait(60)
        self.closed.set()


def replace_open(open_core: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ritornello.connector.fail_safe.open_store", lambda *_: open_core())


def assert_fails(fail_safe: FailSafeStore) -> None:
    assert fail_safe.call("probe", lambda store: cast(Any, store).probe(), 7) == 7


def interrupt() -> object:
    raise KeyboardInterrupt
