"""The scheduler's side with a store of sets: claims, leases, saves, resets."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ritornello.vllm.identity import Identity
from ritornello.vllm.metadata import IDLE, WorkerReport
from ritornello.vllm.meter import Meter
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.store import QuietStore

TOKENS = 64
IDENTITY = Identity("m", "bfloat16", TOKENS, 2, 2, 64, 4096, "layout", b"w", "none", "sha256", ())


@dataclass
class Shelf:
    """Stands for the store: keys by epoch, leases that are out."""

    keys: set[tuple[bytes, bytes]] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)
    asked: int = 0

    def match(self, identity: Identity, keys: tuple[bytes, ...], ttl: float) -> Any:
        self.asked += 1
        pages = 0
        while pages < len(keys) and (identity.epoch, keys[pages]) in self.keys:
            pages += 1
        self.leases.add(self.asked)
        return SimpleNamespace(pages=pages, lease=self.asked)

    def release(self, lease: int) -> None:
        self.leases.remove(lease)

    def close(self) -> None:
        assert not self.leases

    def keep(self, request: Any, pages: int, epoch: bytes = b"") -> None:
        self.keys |= {(epoch, key) for key in request.block_hashes[:pages]}


class Blocks:
    """Stands for vLLM's cache manager: request "r" has blocks 100, 101, ..."""

    def __init__(self) -> None:
        self.evicted: set[int] = set()
        self.free = 49
        self.block_pool: Any = SimpleNamespace(num_gpu_blocks=50, get_num_free_blocks=self._free)

    def _free(self) -> int:
        return self.free

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (list(range(100, 140)),)

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


def request(tokens: int, name: str = "r", **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "request_id": name,
        "block_hashes": [f"{name}{place}".encode() * 8 for place in range(tokens // TOKENS)],
        "num_tokens": tokens,
        "num_computed_tokens": 0,
        "skip_reading_prefix_cache": False,
        "kv_transfer_params": None,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def side(shelf: Shelf, blocks: Blocks) -> SchedulerSide:
    made = SchedulerSide(cast(QuietStore, shelf), IDENTITY, read_only=False, meter=Meter())
    made.bind(blocks)
    return made


def run(side: SchedulerSide, asked: Any, local: int = 0, computed: int | None = None) -> Any:
    """One step that admits the request and computes it to its end, or `computed` tokens."""
    external = side.matched_tokens(asked, local)
    side.admitted(asked, range(100, 140), external)
    asked.num_computed_tokens = local + external
    scheduled = (asked.num_tokens if computed is None else computed) - asked.num_computed_tokens
    metadata = side.plan(SimpleNamespace(num_scheduled_tokens={asked.request_id: scheduled}))
    asked.num_computed_tokens += scheduled
    return metadata


def step(side: SchedulerSide, asked: Any, tokens: int) -> Any:
    metadata = side.plan(SimpleNamespace(num_scheduled_tokens={asked.request_id: tokens}))
    asked.num_computed_tokens += tokens
    return metadata


def test_the_last_token_is_never_claimed(side: SchedulerSide, shelf: Shelf) -> None:
    for tokens, claimed in ((4 * TOKENS, 3), (4 * TOKENS + 1, 4), (TOKENS, 0), (1, 0)):
        asked = request(tokens, name=f"n{tokens}")
        shelf.keep(asked, 4)
        assert side.matched_tokens(asked, 0) == claimed * TOKENS
        side.finished(asked.request_id)
    assert not shelf.leases


def test_a_cold_prompt_is_saved_once(side: SchedulerSide, shelf: Shelf) -> None:
    asked = request(200)
    metadata = run(side, asked)
    (save,) = metadata.saves
    assert (save.first, save.blocks, save.parent) == (0, (100, 101, 102), None)
    assert save.keys == tuple(asked.block_hashes)
    assert metadata.loads == []
    assert step(side, asked, 1) is IDLE
    assert not shelf.leases


def test_a_warm_prompt_is_loaded_under_a_lease(side: SchedulerSide, shelf: Shelf) -> None:
    asked = request(300)
    shelf.keep(asked, 3)
    metadata = run(side, asked, local=TOKENS)
    (load,) = metadata.loads
    assert (load.first, load.blocks) == (1, (101, 102))
    assert load.keys == tuple(asked.block_hashes[1:3])
    assert shelf.leases == {load.lease}
    (save,) = metadata.saves
    assert (save.first, save.parent) == (3, asked.block_hashes[2])


def test_what_the_store_lacks_of_the_engine_s_prefix_is_saved(
    side: SchedulerSide, shelf: Shelf
) -> None:
    asked = request(300)
    shelf.keep(asked, 1)
    metadata = run(side, asked, local=3 * TOKENS)
    assert metadata.loads == []
    assert metadata.saves[0].first == 1
    assert not shelf.leases


def test_pages_that_fill_while_decoding(side: SchedulerSide) -> None:
    asked = request(127)
    assert len(run(side, asked).saves[0].keys) == 1
    asked.block_hashes.append(b"second page" * 3)
    asked.num_tokens = 128
    (save,) = step(side, asked, 1).saves
    assert (save.first, save.parent) == (1, asked.block_hashes[0])


def test_a_page_whose_tokens_are_not_known_yet_waits(side: SchedulerSide) -> None:
    asked = request(100)
    run(side, asked)
    assert step(side, asked, 60) is IDLE


def test_a_waiting_request_asks_the_store_once(side: SchedulerSide, shelf: Shelf) -> None:
    asked = request(300)
    shelf.keep(asked, 2)
    assert [side.matched_tokens(asked, 0) for _ in range(5)] == [2 * TOKENS] * 5
    assert shelf.asked == 1
    side.finished("r")
    assert not shelf.leases


def test_an_old_lease_is_renewed(
    side: SchedulerSide, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(300)
    shelf.keep(asked, 2)
    side.matched_tokens(asked, 0)
    monkeypatch.setattr("ritornello.vllm.scheduler.monotonic", lambda: 1e12)
    side.matched_tokens(asked, 0)
    assert shelf.asked == 2
    assert shelf.leases == {2}


def test_wishes(side: SchedulerSide, shelf: Shelf) -> None:
    silent = request(300, kv_transfer_params={"ritornello.no_store": True})
    assert run(side, silent) is IDLE
    proud = request(300, name="p", kv_transfer_params={"ritornello.no_load": True})
    shelf.keep(proud, 2)
    metadata = run(side, proud)
    assert metadata.loads == []
    assert metadata.saves[0].first == 2
    logprobs = request(300, name="l", skip_reading_prefix_cache=True)
    shelf.keep(logprobs, 2)
    assert side.matched_tokens(logprobs, 0) == 0


def test_a_retained_request_says_until_when(
    side: SchedulerSide, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ritornello.vllm.scheduler.time", lambda: 1000.0)
    asked = request(300, kv_transfer_params={"ritornello.retain": 60})
    assert run(side, asked).saves[0].retain_until == 1060.0
    assert run(side, request(300, name="q")).saves[0].retain_until is None


def test_retaining_what_is_stored_already_puts_its_last_page_again(
    side: SchedulerSide, shelf: Shelf
) -> None:
    asked = request(4 * TOKENS + 1, kv_transfer_params={"ritornello.retain": 60})
    shelf.keep(asked, 4)
    (save,) = run(side, asked).saves
    assert (save.first, save.keys) == (3, tuple(asked.block_hashes[3:4]))
    assert save.parent == asked.block_hashes[2]


def test_read_only_saves_nothing(shelf: Shelf, blocks: Blocks) -> None:
    side = SchedulerSide(cast(QuietStore, shelf), IDENTITY, read_only=True, meter=Meter())
    side.bind(blocks)
    assert run(side, request(300)) is IDLE


def test_a_preempted_request_starts_over(side: SchedulerSide, shelf: Shelf) -> None:
    asked = request(300)
    run(side, asked)
    shelf.keep(asked, 2)
    asked.num_computed_tokens = 0
    metadata = run(side, asked)
    assert metadata.loads[0].keys == tuple(asked.block_hashes[:2])
    assert metadata.saves[0].first == 2


def test_unsaved_pages_are_offered_again(side: SchedulerSide) -> None:
    asked = request(300)
    run(side, asked)
    side.reported(WorkerReport(unsaved=[("r", 1), ("gone", 0)]), set())
    assert step(side, asked, 1).saves[0].first == 1


def test_blocks_that_failed_leave_the_engine_s_cache(side: SchedulerSide, blocks: Blocks) -> None:
    run(side, request(300))
    side.reported(None, {103})
    assert blocks.evicted == set(range(103, 140))


def test_a_reset_changes_the_epoch(side: SchedulerSide, shelf: Shelf) -> None:
    asked = request(300)
    shelf.keep(asked, 3)
    assert side.matched_tokens(asked, 0)
    assert side.reset()
    assert not shelf.leases
    assert side.matched_tokens(asked, 0) == 0
    metadata = run(side, asked)
    assert len(metadata.identity.epoch) == 16
    assert metadata.identity.model == IDENTITY.model


def test_a_reset_while_blocks_are_in_use_stops_everything(
    side: SchedulerSide, shelf: Shelf, blocks: Blocks
) -> None:
    asked = request(300)
    shelf.keep(asked, 3)
    blocks.free = 40
    assert not side.reset()
    assert run(side, asked) is IDLE
    blocks.free = 49
    assert side.reset()
    assert run(side, asked).saves


def test_a_worker_that_cannot_serve_ends_it(side: SchedulerSide, shelf: Shelf) -> None:
    side.reported(WorkerReport(refusal="its KV cache is in cuda memory"), set())
    asked = request(300)
    shelf.keep(asked, 3)
    assert run(side, asked) is IDLE


def test_a_clean_reset_does_not_undo_a_worker_s_refusal(
    side: SchedulerSide, shelf: Shelf, blocks: Blocks
) -> None:
    side.reported(WorkerReport(refusal="its KV cache is in cuda memory"), set())
    asked = request(300)
    for free in (49, 40, 49):
        blocks.free = free
        assert side.reset() == (free == 49)
        shelf.keep(asked, 3, side._identity.epoch)
        assert run(side, asked) is IDLE
    assert shelf.asked == 0


def test_closing_returns_every_lease(side: SchedulerSide, shelf: Shelf) -> None:
    asked = request(300)
    shelf.keep(asked, 3)
    side.matched_tokens(asked, 0)
    side.close()
