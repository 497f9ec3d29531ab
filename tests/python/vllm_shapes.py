"""Cache groups and identities of small models, and a stand-in for the store, for tests of vLLM's
connector.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ritornello.connector.identity import ModelIdentity
from ritornello.vllm.cache_groups import ALL, CacheGroup, Heads, ObjectId, Reach
from ritornello.vllm.identity import Identity
from ritornello.vllm.metadata import WorkerReport
from ritornello.vllm.store import PromptLength, StoreHit

TOKENS = 64
FIRST = ObjectId(0, 0, 0)


def cache_group(
    reach: Reach = ALL,
    head_ranges: tuple[Heads, ...] = ((0, 2),),
    stages: tuple[tuple[str, ...], ...] = (("l.0", "l.1"),),
    tokens: int = TOKENS,
    kv_heads: int = 2,
    head_bytes: int = 1024,
) -> CacheGroup:
    return CacheGroup(
        reach,
        tokens,
        kv_heads,
        64,
        head_bytes,
        "bfloat16",
        "layout",
        "spec",
        head_ranges,
        True,
        stages,
    )


def identity(*groups: CacheGroup, ranks: int = 1, hash_tokens: int = TOKENS) -> Identity:
    made = groups or (cache_group(),)
    alignment = max(one.page_tokens for one in made)
    model = ModelIdentity("m", b"w", hash_algorithm="sha256")
    return Identity(model, hash_tokens, alignment, made, ranks)


@dataclass
class FakeStore:
    """Stand-in for the connector's store. `pages`: epoch, object and key of each stored page.
    `leases`: the leases that were not released. `broken`: lookups return None, as failed lookups
    do. `permits`: the store's policy permits retention.
    """

    pages: set[tuple[bytes, ObjectId, bytes]] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)
    lookups: int = 0
    broken: bool = False
    failed: list[str] = field(default_factory=list)
    # For a cache over tiers: whether lookups are pending, and the maximum number of pages that the
    # gate considers worth loading.
    pending: bool = False
    worth_loading: int = 1 << 20
    tiers: Sequence[tuple[str, int]] = ()
    decision: Any = None
    wants_timings: bool = False
    permits: bool = True
    prompts: list[PromptLength] = field(default_factory=list)
    cancelled: list[tuple[bytes, ...]] = field(default_factory=list)
    timings: list[tuple[WorkerReport, dict[str, Any]]] = field(default_factory=list)
    # Loaded tokens: tokens before them, their number, seconds of the load.
    avoided: list[tuple[int, int, float]] = field(default_factory=list)
    # The recorded decisions: request, outcome, number of keys, and the named arguments.
    noted: list[tuple[str, str, int, dict[str, Any]]] = field(default_factory=list)
    # Whether `note_decision` raises.
    refuses_decisions: bool = False
    closed: bool = False

    def lookup(
        self,
        identity: Identity,
        object_ids: Sequence[ObjectId],
        keys: Sequence[bytes],
        ttl: float,
        prompt: PromptLength,
    ) -> StoreHit | None:
        if self.broken:
            return None
        self.lookups += 1
        self.prompts.append(prompt)
        if self.pending:
            return StoreHit(0, 0, pending=True)
        here = min(
            [*self.exists(identity, object_id, keys), False].index(False)
            for object_id in object_ids
        )
        self.leases.add(self.lookups)
        worth_loading = min(here, self.worth_loading)
        return StoreHit(worth_loading, here, self.lookups, tiers=self.tiers, decision=self.decision)

    def note_decision(
        self,
        identity: Identity,
        object_id: ObjectId,
        request: str,
        keys: Sequence[bytes],
        outcome: str,
        **named: Any,
    ) -> None:
        if self.refuses_decisions:
            raise RuntimeError("made by the test")
        self.noted.append((request, outcome, len(keys), named))

    def permits_retention(self) -> bool:
        return self.permits

    def exists(self, identity: Identity, object_id: ObjectId, keys: Sequence[bytes]) -> list[bool]:
        return [(identity.model.epoch, object_id, key) in self.pages for key in keys]

    def release(self, lease: int) -> None:
        self.leases.remove(lease)

    def cancel_lookup(
        self, identity: Identity, object_ids: Sequence[ObjectId], keys: Sequence[bytes]
    ) -> None:
        self.cancelled.append((*keys,))

    def record_timings(self, report: WorkerReport, decision: dict[str, Any]) -> None:
        self.timings.append((report, dict(decision)))

    def note_prefill_avoided(self, before: int, tokens: int, seconds: float) -> None:
        self.avoided.append((before, tokens, seconds))

    def record_failure(self, operation: str, error: BaseException) -> None:
        self.failed.append(f"{operation}: {error}")

    def close(self) -> None:
        assert not self.leases, "leases must be released before the store is closed"
        self.closed = True

    def keep(self, keys: Sequence[bytes], object_id: ObjectId = FIRST, epoch: bytes = b"") -> None:
        self.pages |= {(epoch, object_id, key) for key in keys}


class Tensor:
    """An array of bytes with the part of a torch tensor's interface that vLLM's connector uses."""

    def __init__(self, array: Any) -> None:
        self.shape: Sequence[int] = array.shape
        self.device: Any = "cpu"
        self._array = array

    def stride(self) -> tuple[int, ...]:
        return tuple(self._array.strides)

    def element_size(self) -> int:
        return int(self._array.itemsize)

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)
