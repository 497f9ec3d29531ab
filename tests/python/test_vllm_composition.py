"""Inside MultiConnector: saves wait for the outcome of other connectors' loads; facts, policy."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_vllm_scheduler import BLOCKS, Blocks, request
from vllm_shapes import TOKENS, Shelf, identity, part

from ritornello.vllm import composition
from ritornello.vllm.composition import ASKING, Gathering
from ritornello.vllm.handshake import ShardFacts
from ritornello.vllm.metadata import IDLE, WorkerReport
from ritornello.vllm.meter import Meter
from ritornello.vllm.parts import trailing
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.store import QuietStore

Tables = dict[str, tuple[list[int], ...]]


class Shared(Blocks):
    """Block tables by request, as vLLM keeps them until the blocks are free."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: Tables = {}

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.tables.get(request_id, BLOCKS)


@pytest.fixture
def blocks() -> Shared:
    return Shared()


@pytest.fixture
def side(blocks: Shared) -> SchedulerSide:
    return side_of(blocks)


def side_of(
    blocks: Shared, *parts: Any, shelf: Shelf | None = None, meter: Meter | None = None
) -> SchedulerSide:
    store, meter = cast(QuietStore, shelf or Shelf()), meter or Meter()
    made = SchedulerSide(store, identity(*parts), meter, beside=True)
    made.bind(blocks)
    return made


def admit(side: SchedulerSide, asked: Any, foreign: int = 0) -> None:
    """The engine has nothing; another connector fills the first `foreign` tokens."""
    assert side.matched_tokens(asked, 0) == (0, False)
    side.admitted(asked, BLOCKS, 0)
    asked.num_computed_tokens = foreign


def step(side: SchedulerSide, asked: Any, tokens: int, *, loads: bool = False) -> Any:
    scheduled = {asked.request_id: tokens} if tokens else {}
    metadata = side.plan(SimpleNamespace(num_scheduled_tokens=scheduled, has_sync_kv_loads=loads))
    asked.num_computed_tokens += tokens
    return metadata


def over(
    side: SchedulerSide, metadata: Any, *invalid: int, failed: frozenset[str] = frozenset()
) -> None:
    side.reported(WorkerReport(step=metadata.step), {*invalid}, set(), failed)


def saved(metadata: Any) -> list[tuple[int, tuple[int, ...]]]:
    return [(save.pages.first, tuple(save.pages.blocks)) for save in metadata.saves]


def test_without_foreign_loads_a_step_saves_at_once(side: SchedulerSide) -> None:
    asked = request(200)
    admit(side, asked)
    metadata = step(side, asked, 200)
    assert saved(metadata) == [(0, (100, 101, 102))]
    assert metadata.step == 0
    assert side.finished("r") is False


def test_a_step_with_a_foreign_load_saves_when_it_is_over(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    assert saved(first) == []
    assert first.step == 1
    over(side, first)
    second = step(side, asked, 1)
    assert saved(second) == [(0, (100, 101, 102, 103))]
    assert second.step == 0


def test_pages_behind_a_failed_foreign_load_are_saved_when_recomputed(
    side: SchedulerSide, blocks: Shared
) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    asked.num_computed_tokens = TOKENS  # vLLM goes back to the first block that failed
    over(side, first, 101)
    assert {101, 102, 103} <= blocks.evicted
    second = step(side, asked, 300 - TOKENS)
    assert saved(second) == [(0, (100, 101, 102, 103))]


def test_a_request_that_shares_a_failed_block_is_not_saved(
    side: SchedulerSide, blocks: Shared
) -> None:
    lent, sharing, other = request(300), request(300, "s"), request(300, "o")
    blocks.tables["s"] = ([100, 101, 112, 113, 114], [])
    blocks.tables["o"] = ([120, 121, 122, 123, 124], [])
    for asked, foreign in ((lent, 2 * TOKENS), (sharing, 2 * TOKENS), (other, 0)):
        admit(side, asked, foreign)
    everyone = {"r": 300 - 2 * TOKENS, "s": 300 - 2 * TOKENS, "o": 300}
    first = side.plan(SimpleNamespace(num_scheduled_tokens=everyone, has_sync_kv_loads=True))
    assert saved(first) == []
    lent.num_computed_tokens = TOKENS
    sharing.num_computed_tokens = 2 * TOKENS  # the other one computes it for both
    other.num_computed_tokens = 300
    over(side, first, 101)
    again = {"r": 300 - TOKENS, "s": 300 - 2 * TOKENS, "o": 1}
    second = side.plan(SimpleNamespace(num_scheduled_tokens=again, has_sync_kv_loads=False))
    assert {save.request: save.pages.first for save in second.saves} == {"r": 0, "o": 0}


def test_steps_in_flight_wait_for_the_load_before_them(side: SchedulerSide) -> None:
    asked = request(400)
    admit(side, asked, TOKENS)
    first = step(side, asked, TOKENS, loads=True)
    second = step(side, asked, TOKENS)
    assert saved(first) == saved(second) == []
    asked.num_computed_tokens = 0
    over(side, first, 100)
    over(side, second)
    third = step(side, asked, 2 * TOKENS)
    assert saved(third) == [(0, (100, 101))]


def test_steady_foreign_loads_do_not_keep_saves_back(side: SchedulerSide) -> None:
    asked = request(600)
    admit(side, asked, TOKENS)
    pages = []
    for _ in range(6):
        metadata = step(side, asked, TOKENS, loads=True)
        pages += [page for _, held in saved(metadata) for page in held]
        over(side, metadata)
    assert pages == [100, 101, 102, 103, 104, 105]


def test_overlapping_steps_with_steady_foreign_loads_save_too(side: SchedulerSide) -> None:
    asked = request(600)
    admit(side, asked, TOKENS)
    pages, before = [], None
    for _ in range(6):
        metadata = step(side, asked, TOKENS, loads=True)
        pages += [page for _, held in saved(metadata) for page in held]
        if before is not None:
            over(side, before)
        before = metadata
    assert pages == [100, 101, 102, 103, 104]


def test_a_request_that_finishes_in_that_step_keeps_its_blocks(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    assert side.finished("r") is True
    over(side, first)
    last = step(side, asked, 0)
    assert saved(last) == [(0, (100, 101, 102, 103))]
    assert last.sent == ("r",)
    assert step(side, asked, 0) is IDLE


def test_a_finished_request_whose_load_failed_is_let_go_unsaved(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    assert side.finished("r") is True
    over(side, first, 101)
    last = step(side, asked, 0)
    assert (saved(last), last.sent) == ([], ("r",))


def test_a_preempted_request_saves_nothing_of_its_old_blocks(
    side: SchedulerSide, blocks: Shared
) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    blocks.tables["r"] = ([], [])
    over(side, first)
    assert step(side, asked, 0) is IDLE
    assert side.finished("r") is False


def test_a_request_admitted_anew_forgets_its_old_saves(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    over(side, first)
    admit(side, asked)
    second = step(side, asked, TOKENS)
    assert saved(second) == [(0, (100,))]


def test_a_window_that_moved_on_leaves_its_first_blocks_out(blocks: Shared) -> None:
    side = side_of(blocks, part(), part(rule=trailing(2 * TOKENS)))
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    blocks.tables["r"] = (BLOCKS[0], [0, 0, *BLOCKS[1][2:]])
    over(side, first)
    assert saved(step(side, asked, 1)) == [(0, (100, 101, 102, 103)), (2, (202, 203))]


def test_a_reset_drops_what_waits(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    assert side.finished("r") is True
    side.reset()
    over(side, first)
    last = step(side, asked, 0)
    assert (saved(last), last.sent) == ([], ("r",))


def test_a_failed_request_is_named_where_blocks_are_not(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    over(side, first, failed=frozenset({"r"}))
    assert saved(step(side, asked, 0)) == []


def test_what_was_about_to_leave_is_dropped_with_a_late_report(side: SchedulerSide) -> None:
    asked = request(400)
    admit(side, asked, TOKENS)
    first = step(side, asked, TOKENS, loads=True)
    second = step(side, asked, TOKENS, loads=True)
    over(side, first)
    asked.num_computed_tokens = 0
    over(side, second, 100)
    assert saved(step(side, asked, TOKENS)) == [(0, (100,))]


def test_pages_that_another_connector_loads_are_not_called_absent(blocks: Shared) -> None:
    shelf, meter = Shelf(), Meter()
    side, asked = side_of(blocks, shelf=shelf, meter=meter), request(300)
    shelf.keep(asked.block_hashes[:3])
    assert side.matched_tokens(asked, 0)[0] == 3 * TOKENS
    side.admitted(asked, BLOCKS, 0)
    counts = meter.take()
    assert counts is not None
    assert counts["missed_pages:other_connector"] == 4
    assert not shelf.leases


class Base:
    """Stands for vLLM's class of connectors."""


class Child(Base):
    def __init__(self, vllm_config: Any) -> None:
        self.engine = composition.engine_config(self, Base)


class Multi(Base):
    def __init__(self, vllm_config: Any, made: Callable[[Any], Any]) -> None:
        self.child = made(SimpleNamespace(name="a copy"))


def test_a_child_finds_the_engine_s_configuration() -> None:
    outer = SimpleNamespace(name="the engine's")
    assert Multi(outer, Child).child.engine is outer
    assert Multi(outer, lambda copy: Multi(copy, Child)).child.child.engine is outer
    assert Child(outer).engine is None


def test_the_policy_is_set_where_the_engine_reads_it() -> None:
    outer = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"))
    assert composition.recompute(outer)
    assert outer.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert not composition.recompute(outer)


def test_made_up_blocks_are_refused() -> None:
    def engine(*names: str) -> Any:
        extra = {"connectors": [{"kv_connector": name} for name in names]}
        return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))

    assert not composition.refusal(None)
    assert not composition.refusal(engine("RitornelloConnector", "NixlConnector"))
    assert "DecodeBenchConnector" in composition.refusal(engine("DecodeBenchConnector"))


def test_requests_wait_for_the_facts_of_all_workers() -> None:
    gathering = Gathering(2)
    facts = ShardFacts()
    assert gathering.waits()
    assert gathering.metadata() is ASKING
    assert gathering.add({(0, 0): facts}) is None
    assert gathering.add({(0, 1): facts}) == {(0, 0): facts, (0, 1): facts}
    assert not gathering.waits()
    assert gathering.metadata() is IDLE
    assert gathering.add({(0, 0): facts}) is None


def test_requests_wait_for_facts_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(1)
    assert gathering.waits()
    monkeypatch.setattr(composition, "FACTS_SECONDS", 0.0)
    assert not gathering.waits()


def test_a_worker_s_facts_and_step_travel_in_its_report() -> None:
    one = WorkerReport(step=3, facts={(0, 0): ShardFacts()})
    two = WorkerReport(step=3, facts={(0, 1): ShardFacts(refusal="no")})
    both = one.aggregate(two)
    assert both.step == 3
    assert both.facts == {(0, 0): ShardFacts(), (0, 1): ShardFacts(refusal="no")}
