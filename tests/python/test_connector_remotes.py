"""The remote behind every connector: forged objects, sealing keys that differ or cannot be used, a
remote that is slow, and a remote that fails for a time. Each costs hits on the remote only.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine_caches import ENGINE_CACHES, EngineCache
from held_remote import Held
from support import CoreLog, wait_until

from ritornello.vllm.tier import cache_lookups

PAGES = 12
# Leading pages that are served if the last page of each object is damaged: in a chained scope the
# remote stores 12 pages as objects of 8 and 4 pages, in other scopes as objects of one page.
PAGES_BEFORE_DAMAGE = {True: 7, False: 0}

Machine = Callable[..., EngineCache]


@pytest.fixture(autouse=True)
def held() -> Iterator[type[Held]]:
    Held.values.clear()
    Held.released.set()
    Held.down, Held.asked = False, 0
    yield Held
    Held.released.set()


@pytest.fixture(params=ENGINE_CACHES, ids=["vllm", "sglang", "lmcache"])
def kind(request: pytest.FixtureRequest) -> type[EngineCache]:
    cache: type[EngineCache] = request.param
    return cache


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """The directory that is the machines' remote."""
    (tmp_path / "far").mkdir()
    return tmp_path / "far"


@pytest.fixture
def machine(kind: type[EngineCache], far: Path, tmp_path: Path) -> Iterator[Machine]:
    """Makes the caches of machines by name, each over its own disk and a remote: `remote`, by
    default the directory `far`, with the key file `key` if given.
    """
    opened: list[EngineCache] = []

    def make(name: str, key: Path | None = None, remote: str = "", **settings: Any) -> EngineCache:
        remote = remote or f"file://{far}" + (f"?key={key}" if key else "")
        said = {"prefetch": "wait_complete", "gate": "always", **settings}
        disk = tmp_path / name
        opened.append(kind([f"disk {disk} 64MiB", remote], disk, **said))
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()


def secret_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def make_key(path: Path, key_id: str = "a", secret: str = "a", mode: int = 0o600) -> Path:
    path.write_text(f"{key_id} {secret_of(secret)}\n")
    path.chmod(mode)
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "a.key")


def objects_in(far: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in far.rglob("*") if path.is_file()}


def store(cache: EngineCache, keys: list[bytes], contents: list[bytes] | None = None) -> None:
    """Stores the pages of a prompt on all tiers."""
    assert cache.put(keys, contents) == len(keys)
    cache.flush()


# Changes that a writer without the key can make to the remote's objects. Each function but `flip`
# returns how many leading pages of the prompt a reader still gets from the remote, and the name of
# the remote's statistic that counts the change.


def flip(far: Path, at: int) -> None:
    for path, value in objects_in(far).items():
        changed = bytearray(value)
        changed[at] ^= 1
        path.write_bytes(changed)


def damaged_head(far: Path, keys: list[bytes], machine: Machine) -> tuple[int, str]:
    flip(far, 40)
    return 0, "wrong_tag"


def damaged_page(far: Path, keys: list[bytes], machine: Machine) -> tuple[int, str]:
    flip(far, -1)
    return PAGES_BEFORE_DAMAGE[machine("damaged").chained], "wrong_tag"


def unsealed(far: Path, keys: list[bytes], machine: Machine) -> tuple[int, str]:
    """Replaces the objects by valid objects without a seal, which hold the bytes of other pages."""
    writer = machine("writer")
    store(writer, keys, writer.keys_of("forged", PAGES))
    for path in objects_in(far):
        if "/ritornello/3/" in str(path):
            path.rename(str(path).replace("/ritornello/3/", "/ritornello/4/"))
    return 0, "unsealed"


def of_other_prompt(far: Path, keys: list[bytes], machine: Machine) -> tuple[int, str]:
    """Replaces the objects by authentic objects of another prompt with the same numbers of
    pages.
    """
    own = objects_in(far)
    writer = machine("writer", far.parent / "a.key")
    store(writer, writer.keys_of("another", PAGES))
    of_length: dict[str, list[bytes]] = {}
    for path, value in objects_in(far).items():
        if path not in own:
            of_length.setdefault(path.suffix, []).append(value)
            path.unlink()
    for path in own:
        path.write_bytes(of_length[path.suffix].pop())
    return 0, "damaged"


@pytest.mark.parametrize("forge", [damaged_head, damaged_page, unsealed, of_other_prompt])
def test_forged_objects_cost_remote_hits_only(
    machine: Machine, far: Path, key: Path, forge: Callable[..., tuple[int, str]]
) -> None:
    one, two = machine("one", key), machine("two", key)
    keys, own = one.keys_of("prompt", PAGES), one.keys_of("own", PAGES)
    store(one, keys)
    assert all("/ritornello/4/" in str(path) for path in objects_in(far))
    authentic, counter = forge(far, keys, machine)
    assert two.put(own) == PAGES
    assert two.serve(keys) == authentic
    assert two.remote()["remote"][counter] >= 1
    assert two.serve(own) == PAGES
    assert one.serve(keys) == PAGES, "the writer must serve the pages from its disk"


def test_pages_are_served_only_with_their_writers_key(
    machine: Machine, key: Path, tmp_path: Path
) -> None:
    sealing, plain = machine("sealing", key), machine("plain")
    sealed_keys, plain_keys, own = (
        sealing.keys_of(name, PAGES) for name in ("sealed", "plain", "own")
    )
    store(sealing, sealed_keys)
    store(plain, plain_keys)
    # Each of these machines has its own prompt on its disk.
    assert plain.serve(sealed_keys) == sealing.serve(plain_keys) == 0
    assert plain.serve(plain_keys) == sealing.serve(sealed_keys) == PAGES
    other_id = make_key(tmp_path / "id.key", "b", "b")
    other_secret = make_key(tmp_path / "secret.key", "a", "b")
    for name, used, pages, rejected in (
        ("other-id", other_id, 0, {"unknown_key"}),
        ("other-secret", other_secret, 0, {"wrong_tag"}),
        ("same-key", key, PAGES, set()),
    ):
        reader = machine(name, used)
        assert reader.put(own) == PAGES
        assert reader.serve(sealed_keys) == pages, name
        assert reader.serve(own) == PAGES, name
        calls = reader.remote()["remote"]
        counted = {why for why in ("damaged", "unsealed", "unknown_key", "wrong_tag") if calls[why]}
        assert counted == rejected, name


# Faults of a key file. Each function leaves no usable key file at `path`, and returns a function
# that repairs it, and a pattern of the advice in the log.


def absent(path: Path) -> tuple[Callable[[], object], str]:
    return lambda: make_key(path), r"make it, or correct \?key="


def readable_by_others(path: Path) -> tuple[Callable[[], object], str]:
    make_key(path, mode=0o644)
    return lambda: path.chmod(0o600), "chmod 600"


def malformed(path: Path) -> tuple[Callable[[], object], str]:
    path.write_text(f"a {secret_of('a')}0\n")
    path.chmod(0o600)
    return lambda: make_key(path), "a key is a line `ID HEX`"


@pytest.mark.parametrize("fault", [absent, readable_by_others, malformed])
def test_unusable_key_file_costs_remote_hits_only(
    machine: Machine,
    far: Path,
    key: Path,
    tmp_path: Path,
    fault: Callable[[Path], tuple[Callable[[], object], str]],
    core_log: CoreLog,
) -> None:
    one = machine("one", key)
    keys, own = one.keys_of("prompt", PAGES), one.keys_of("own", PAGES)
    store(one, keys)
    remote_before = objects_in(far)
    unusable = tmp_path / "unusable-key"
    repair, advice = fault(unusable)
    core_log.take()
    two = machine("two", unusable)
    store(two, own)
    assert two.serve(keys) == 0
    assert two.serve(own) == PAGES
    assert two.store.broken == ""
    calls = two.remote()["remote"]
    assert calls["open"] and calls["failures"] >= 1
    assert two.remote()["written_pages"] == 0
    assert objects_in(far) == remote_before, "no object may be written without a usable key"
    (line,) = [line for line in core_log.take(str(unusable)) if str(unusable) in line]
    assert re.search(advice, line)
    assert secret_of("a")[:8] not in line
    # The running cache pauses calls of the remote for up to a minute. A restarted cache calls the
    # remote immediately.
    repair()
    two.close()
    again = machine("two", unusable)
    assert again.serve(keys) == PAGES
    assert again.serve(own) == PAGES


# Remotes that are slow, or fail for a time.


def test_prefetch_policy_limits_wait_for_hanging_remote(machine: Machine, held: type[Held]) -> None:
    patient = machine("patient", remote="held_remote:Held", prefetch="wait_complete")
    impatient = machine("impatient", remote="held_remote:Held", prefetch="timeout(0.05, 0)")
    keys = patient.keys_of("prompt", PAGES)
    store(impatient, keys[:4])
    held.released.clear()
    held.asked = 0
    # The patient lookup begins first. If both lookups waited equally long, the patient lookup would
    # end before the impatient lookup.
    waiting = patient.lookup(keys)
    wait_until(lambda: not waiting.is_done() and held.asked)
    assert impatient.serve(keys) == 4
    assert not waiting.is_done()
    held.released.set()
    assert waiting.result() == 4


def test_best_effort_never_waits_for_hanging_remote(
    machine: Machine, held: type[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Raises the time that vLLM's scheduler waits for a lookup before the lookup counts as pending,
    # because a slow disk could exceed it.
    monkeypatch.setattr(cache_lookups, "ANSWER_SECONDS", 60.0)
    cache = machine("one", remote="held_remote:Held", prefetch="best_effort")
    keys = cache.keys_of("prompt", PAGES)
    store(cache, keys[:4])
    held.released.clear()
    held.asked = 0
    lookup = cache.lookup(keys)
    assert lookup.result() == 4
    assert not lookup.waited
    wait_until(lambda: held.asked)
    held.released.set()


def test_remote_that_returns_is_used_again(machine: Machine, held: type[Held]) -> None:
    one = machine("one", remote="held_remote:Held")
    own = one.keys_of("own", PAGES)
    held.down = True
    store(one, own)
    assert one.serve(own) == PAGES
    numbers = count()
    deadline = time.monotonic() + 60
    while not one.remote()["remote"]["open"]:
        assert time.monotonic() < deadline
        assert one.serve(one.keys_of(f"missing {next(numbers)}", PAGES)) == 0
    assert one.serve(own) == PAGES
    assert (held.values, one.remote()["written_pages"]) == ({}, 0)
    calls = one.remote()["remote"]
    assert calls["breaker_openings"] == 1 and calls["breaker_open_seconds"] > 0
    assert (calls["read_bytes"], calls["written_bytes"]) == (0, 0)
    held.down = False
    # The cache pauses calls of the remote for a second or two after the failures.
    deadline = time.monotonic() + 30
    while one.remote()["written_pages"] < PAGES:
        assert time.monotonic() < deadline
        keys = one.keys_of(f"later {next(numbers)}", PAGES)
        store(one, keys)
        time.sleep(0.1)
    assert not one.remote()["remote"]["open"]
    two = machine("two", remote="held_remote:Held")
    assert two.serve(keys) == PAGES
    assert 0 < two.remote()["remote"]["read_bytes"] <= one.remote()["remote"]["written_bytes"]
