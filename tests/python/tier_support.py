"""Our secondary tier of vLLM's offloading, without vLLM: a host tier in anonymous shared memory,
and stand-ins for the objects that vLLM passes to the tier.
"""

import hashlib
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Bytes, pages_of

import ritornello as rt
from benches import tier_stand_ins
from ritornello.connector.identity import ModelIdentity
from ritornello.connector.meter import Meter
from ritornello.vllm.tier.cache import TierCache
from ritornello.vllm.tier.host_rows import HostRows
from ritornello.vllm.tier.jobs import FinishedJob
from ritornello.vllm.tier.namespace import Namespace
from ritornello.vllm.tier.requests import LookupAnswer
from ritornello.vllm.tier.sequence import Group
from ritornello.vllm.tier.settings import TierSettings
from ritornello.vllm.tier.store import TierStore
from ritornello.vllm.tier.tier import Tier

ROW = 8192
TOKENS = 32
ROWS = 64
FULL = Group(0, TOKENS, chained=True)
WINDOW = Group(1, TOKENS, chained=False, window_chunks=2)


MODEL = ModelIdentity("test", b"w", hash_algorithm="sha256", options=(("ranks", "tp 1"),))


def namespace(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "model": MODEL,
        "dtype": "bfloat16",
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 64,
        "row_bytes": ROW,
        "groups": (FULL, WINDOW),
    }
    return Namespace(**(fields | changes))


def offload_keys(name: str, chunks: int, group: int = 0) -> list[bytes]:
    """Returns the first `chunks` keys of the sequence `name` in vLLM's form: a hash, and the number
    of the cache group.
    """
    keys, last = [], name.encode()
    for _ in range(chunks):
        last = hashlib.sha256(last).digest()
        keys.append(last + group.to_bytes(4, "big"))
    return keys


class Request(tier_stand_ins.Request):
    """A stand-in for vLLM's request, to which `over` adds the keys of sequences."""

    def over(self, *sequences: Sequence[bytes]) -> "Request":
        """Adds the keys of sequences, each of which begins at the first token. Returns the
        request.
        """
        for keys in sequences:
            for place, key in enumerate(keys):
                self._offload_key_positions[key] = (place + 1) * TOKENS
        return self


@dataclass
class Transfer:
    """Stand-in for a vLLM `TransferJob`."""

    job_id: int
    keys: Sequence[bytes]
    chunk_ids: Any
    req_context: Request


class RecordedStore:
    """A store that records in `used` which of its attributes are used by the thread that created
    this object. Attributes in `AT_ONCE` do not wait for the owner of the store.
    """

    AT_ONCE = frozenset(
        {
            "answers_at_once",
            "note_decision",
            "note_prefill_avoided",
            "submit_get",
            "submit_put",
            "time_limit",
        }
    )

    def __init__(self, store: Any) -> None:
        self._store = store
        self._thread = threading.get_ident()
        self.used: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            self.used.add(name)
        return getattr(self._store, name)


class TierHarness:
    """Our secondary tier, below a host tier of `rows` rows in shared memory, like vLLM's. `spaces`:
    the engine's namespace. `settings`: the tier's settings, by default one store at `path`.
    """

    def __init__(
        self,
        path: Path,
        spaces: Namespace | None = None,
        *,
        row_bytes: int = ROW,
        rows: int = ROWS,
        **settings: Any,
    ) -> None:
        self.row_bytes = row_bytes
        self.memory = mmap.mmap(-1, rows * row_bytes)
        self.host: Bytes = np.frombuffer(self.memory, np.uint8).reshape(rows, row_bytes)
        self.host[:] = 0xA5
        if "tiers" not in settings:
            settings = {"path": str(path), "capacity": "1GiB"} | settings
        parsed = TierSettings.parse(settings)
        self.counts = Meter()
        self.path = path
        kind = TierCache if parsed.store.tiers else TierStore
        self.store: Any = kind(parsed.store, self.counts)
        host_rows = HostRows(self.host.data, row_bytes, [str(path)])
        spaces = spaces or namespace(row_bytes=row_bytes)
        self.tier = Tier(self.store, spaces, host_rows, parsed, self.counts)
        self._job = 0

    def begin(self, name: str, *sequences: Sequence[bytes], **params: Any) -> Request:
        request = Request(name, params or None).over(*sequences)
        self.tier.begin_request(request)
        return request

    def save(self, request: Request, keys: Sequence[bytes], first: int = 0) -> FinishedJob:
        """Writes the expected bytes of `keys` to rows, starting at row `first`, and stores these
        rows. Returns the finished job.
        """
        rows = range(first, first + len(keys))
        self.host[rows] = pages_of(keys, self.row_bytes)
        self.tier.save(self._transfer(request, keys, rows))
        return self.ended()

    def hits(self, request: Request, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys that are hits. Looks up keys until the first miss, as
        vLLM does. While lookups are pending, repeats them, each time in a further step.
        """
        deadline = time.monotonic() + 60
        while LookupAnswer.PENDING in (answers := self.answers(request, keys)):
            assert self.tier.has_tiers
            assert time.monotonic() < deadline
            self.tier.end_step()
            time.sleep(0.001)
        return answers.count(LookupAnswer.HIT)

    def answers(self, request: Request, keys: Sequence[bytes]) -> list[LookupAnswer]:
        """Looks up keys, in one step, until the first miss. Returns the answers before the miss."""
        answers: list[LookupAnswer] = []
        for key in keys:
            if (answer := self.tier.lookup(key, request)) is LookupAnswer.MISS:
                break
            answers.append(answer)
        return answers

    def start_load(self, request: Request, keys: Sequence[bytes], first: int = 32) -> None:
        rows = range(first, first + len(keys))
        self.host[rows] = 0xA5
        self.tier.load(self._transfer(request, keys, rows))

    def load(self, request: Request, keys: Sequence[bytes], first: int = 32) -> FinishedJob:
        self.start_load(request, keys, first)
        self.tier.end_step()
        return self.ended()

    def right(self, keys: Sequence[bytes], first: int = 32) -> list[bool]:
        """Returns for each of `keys` whether its row has the expected bytes. The rows of `keys`
        follow each other, beginning with row `first`.
        """
        expected = pages_of(keys, self.row_bytes)
        return [bool((self.host[first + i] == expected[i]).all()) for i in range(len(keys))]

    def ended(self) -> FinishedJob:
        """Waits for the only running job and returns its result."""
        assert self.tier._jobs.wait(60)
        (done,) = self.tier.take_finished()
        return done

    def leases(self) -> int:
        """Returns the number of leases of the store or, with the setting `tiers`, of the disk
        tier's store. With `tiers`, waits at most a second until background writes have ended their
        leases.
        """
        assert self.store._store is not None
        if not self.tier.has_tiers:
            return int(self.store._store.stats()["leases"])
        self.settle()
        deadline = time.monotonic() + 1
        with rt.Store.open(self.path) as disk:
            while (leases := int(disk.stats()["leases"])) and time.monotonic() < deadline:
                time.sleep(0.01)
            return leases

    def settle(self) -> None:
        """Waits until the background thread has run the calls that were queued."""
        call = self.store._calls.submit(lambda: None)
        assert call is not None
        assert call.wait(60)

    def _transfer(self, request: Request, keys: Sequence[bytes], rows: range) -> Transfer:
        self._job += 1
        return Transfer(self._job, keys, np.array(rows, np.int32), request)


class Noted:
    """Receives the decisions that a tier records, in place of the store."""

    def __init__(self, rig: TierHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self._noted: list[tuple[Any, ...]] = []
        self.estimate: Any = None
        monkeypatch.setattr(rig.store, "note_decision", self._note)

    def _note(self, request: str, scope: Any, keys: Any, outcome: str, **more: Any) -> None:
        named = (more["found"], more["loaded"], more["detail"])
        self._noted.append((request, outcome, len(keys), *named))
        self.estimate = more["estimate"]

    def take(self) -> list[tuple[Any, ...]]:
        noted, self._noted = self._noted, []
        return noted
