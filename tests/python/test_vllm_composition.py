"""The connector beside other connectors inside vLLM's MultiConnector: saves wait for the outcome of
other connectors' loads, the workers report their memory layouts with a step, and the engine
recomputes after a failed load.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scheduler_support import BLOCKS, Blocks, request, step_of
from vllm_shapes import TOKENS, FakeStore, cache_group, identity

from ritornello.vllm import composition, engine_config
from ritornello.vllm.cache_groups import trailing
from ritornello.vllm.composition import REQUEST_FACTS, FactsCollector
from ritornello.vllm.handshake import ShardFacts
from ritornello.vllm.metadata import IDLE, WorkerReport
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.store import VllmStore

Tables = dict[str, tuple[list[int], ...]]


class Shared(Blocks):
    """Stand-in for vLLM's cache manager with block tables by request. vLLM keeps a table until the
    request's blocks are freed.
    """

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
    blocks: Shared, *groups: Any, store: FakeStore | None = None, meter: StepMeter | None = None
) -> SchedulerSide:
    used = cast(VllmStore, store or FakeStore())
    made = SchedulerSide(used, identity(*groups), meter or StepMeter(), composed=True)
    made.bind_cache(blocks)
    return made


def admit(side: SchedulerSide, asked: Any, foreign: int = 0) -> None:
    """Admits a request. vLLM's cache and the store have none of its pages, and another connector
    fills its first `foreign` tokens.
    """
    assert side.matched_tokens(asked, 0) == (0, False)
    side.request_admitted(asked, BLOCKS, 0)
    asked.num_computed_tokens = foreign


def step(side: SchedulerSide, asked: Any, tokens: int, *, loads: bool = False) -> Any:
    scheduled = {asked.request_id: tokens} if tokens else {}
    metadata = side.plan(step_of(scheduled, has_sync_kv_loads=loads))
    asked.num_computed_tokens += tokens
    return metadata


def end_step(
    side: SchedulerSide, metadata: Any, *invalid: int, failed: frozenset[str] = frozenset()
) -> None:
    """Reports the end of a step to the scheduler's side. `invalid`: the blocks that loads did not
    fill. `failed`: the requests whose load failed, if vLLM cannot name the blocks.
    """
    side.complete_step(WorkerReport(step=metadata.step), {*invalid}, set(), failed)


def saved(metadata: Any) -> list[tuple[int, tuple[int, ...]]]:
    return [(save.pages.first, tuple(save.pages.blocks)) for save in metadata.saves]


def test_saves_are_not_deferred_without_loads(side: SchedulerSide) -> None:
    asked = request(200)
    admit(side, asked)
    metadata = step(side, asked, 200)
    assert saved(metadata) == [(0, (100, 101, 102))]
    assert metadata.step == 0
    assert side.request_finished("r") is False


def test_saves_wait_for_outcome_of_foreign_load(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    assert saved(first) == []
    assert first.step == 1
    end_step(side, first)
    second = step(side, asked, 1)
    assert saved(second) == [(0, (100, 101, 102, 103))]
    assert second.step == 0


def test_failed_foreign_load_is_saved_after_recompute(side: SchedulerSide, blocks: Shared) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    asked.num_computed_tokens = TOKENS  # vLLM recomputes from the first block that failed
    end_step(side, first, 101)
    assert {101, 102, 103} <= blocks.evicted
    second = step(side, asked, 300 - TOKENS)
    assert saved(second) == [(0, (100, 101, 102, 103))]


def test_request_sharing_failed_block_is_not_saved(side: SchedulerSide, blocks: Shared) -> None:
    lent, sharing, other = request(300), request(300, "s"), request(300, "o")
    blocks.tables["r"] = ([100, 101, 102, 103, 104], [])
    blocks.tables["s"] = ([100, 101, 112, 113, 114], [])
    blocks.tables["o"] = ([120, 121, 122, 123, 124], [])
    for asked, foreign in ((lent, 2 * TOKENS), (sharing, 2 * TOKENS), (other, 0)):
        admit(side, asked, foreign)
    everyone = {"r": 300 - 2 * TOKENS, "s": 300 - 2 * TOKENS, "o": 300}
    first = side.plan(step_of(everyone, has_sync_kv_loads=True))
    assert saved(first) == []
    lent.num_computed_tokens = TOKENS
    sharing.num_computed_tokens = 2 * TOKENS  # `lent` recomputes block 101, which `sharing` has
    other.num_computed_tokens = 300
    end_step(side, first, 101)
    again = {"r": 300 - TOKENS, "s": 300 - 2 * TOKENS, "o": 1}
    second = side.plan(step_of(again, has_sync_kv_loads=False))
    assert {save.request: save.pages.first for save in second.saves} == {"r": 0, "o": 0}


def test_saves_of_steps_in_flight_wait_for_earlier_load(side: SchedulerSide) -> None:
    asked = request(400)
    admit(side, asked, TOKENS)
    first = step(side, asked, TOKENS, loads=True)
    second = step(side, asked, TOKENS)
    assert saved(first) == saved(second) == []
    asked.num_computed_tokens = 0
    end_step(side, first, 100)
    end_step(side, second)
    third = step(side, asked, 2 * TOKENS)
    assert saved(third) == [(0, (100, 101))]


def test_steady_foreign_loads_do_not_starve_saves(side: SchedulerSide) -> None:
    asked = request(600)
    admit(side, asked, TOKENS)
    pages = []
    for _ in range(6):
        metadata = step(side, asked, TOKENS, loads=True)
        pages += [page for _, held in saved(metadata) for page in held]
        end_step(side, metadata)
    assert pages == [100, 101, 102, 103, 104, 105]


def test_overlapping_steps_do_not_starve_saves(side: SchedulerSide) -> None:
    asked = request(600)
    admit(side, asked, TOKENS)
    pages, before = [], None
    for _ in range(6):
        metadata = step(side, asked, TOKENS, loads=True)
        pages += [page for _, held in saved(metadata) for page in held]
        if before is not None:
            end_step(side, before)
        before = metadata
    assert pages == [100, 101, 102, 103, 104]


def test_finished_request_keeps_blocks_until_saved(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    assert side.request_finished("r") is True
    end_step(side, first)
    last = step(side, asked, 0)
    assert saved(last) == [(0, (100, 101, 102, 103))]
    assert last.finished_sending == ("r",)
    assert step(side, asked, 0) is IDLE


def test_finished_request_with_failed_load_is_freed(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    assert side.request_finished("r") is True
    end_step(side, first, 101)
    last = step(side, asked, 0)
    assert (saved(last), last.finished_sending) == ([], ("r",))


def test_preempted_request_drops_deferred_saves(side: SchedulerSide, blocks: Shared) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    blocks.tables["r"] = ([], [])
    end_step(side, first)
    assert step(side, asked, 0) is IDLE
    assert side.request_finished("r") is False


def test_readmission_drops_deferred_saves(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    end_step(side, first)
    admit(side, asked)
    second = step(side, asked, TOKENS)
    assert saved(second) == [(0, (100,))]


def test_blocks_out_of_window_are_not_saved(blocks: Shared) -> None:
    side = side_of(blocks, cache_group(), cache_group(reach=trailing(2 * TOKENS)))
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    blocks.tables["r"] = (BLOCKS[0], [0, 0, *BLOCKS[1][2:]])
    end_step(side, first)
    assert saved(step(side, asked, 1)) == [(0, (100, 101, 102, 103)), (2, (202, 203))]


def test_reset_drops_deferred_saves(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    assert side.request_finished("r") is True
    side.reset()
    end_step(side, first)
    last = step(side, asked, 0)
    assert (saved(last), last.finished_sending) == ([], ("r",))


def test_failed_request_drops_deferred_saves(side: SchedulerSide) -> None:
    asked = request(300)
    admit(side, asked, 2 * TOKENS)
    first = step(side, asked, 300 - 2 * TOKENS, loads=True)
    end_step(side, first, failed=frozenset({"r"}))
    assert saved(step(side, asked, 0)) == []


def test_failure_of_later_step_drops_saves_that_are_ready(side: SchedulerSide) -> None:
    asked = request(400)
    admit(side, asked, TOKENS)
    first = step(side, asked, TOKENS, loads=True)
    second = step(side, asked, TOKENS, loads=True)
    end_step(side, first)
    asked.num_computed_tokens = 0
    end_step(side, second, 100)
    assert saved(step(side, asked, TOKENS)) == [(0, (100,))]


def test_looked_up_pages_are_missed_if_another_connector_loads(blocks: Shared) -> None:
    store, meter = FakeStore(), StepMeter()
    side, asked = side_of(blocks, store=store, meter=meter), request(300)
    store.keep(asked.block_hashes[:3])
    assert side.matched_tokens(asked, 0)[0] == 3 * TOKENS
    side.request_admitted(asked, BLOCKS, 0)
    counts = meter.take()
    assert counts is not None
    assert counts["missed_pages:other_connector"] == 4
    assert not store.leases


class Base:
    """Stand-in for the base class of vLLM's connectors."""


class Child(Base):
    def __init__(self, vllm_config: Any) -> None:
        self.engine = engine_config.of_outermost(self, Base)


class Multi(Base):
    def __init__(self, vllm_config: Any, made: Callable[[Any], Any]) -> None:
        self.child = made(SimpleNamespace(name="a copy"))


def test_nested_connector_finds_engine_configuration() -> None:
    outer = SimpleNamespace(name="the engine's")
    assert Multi(outer, Child).child.engine is outer
    assert Multi(outer, lambda copy: Multi(copy, Child)).child.child.engine is outer
    assert Child(outer).engine is None


def test_load_failure_policy_is_set_on_engine_configuration() -> None:
    outer = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"))
    assert composition.recompute(outer)
    assert outer.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert not composition.recompute(outer)


def engine(*names: str) -> Any:
    """Returns an engine's configuration with the connectors `names` inside MultiConnector."""
    extra = {"connectors": [{"kv_connector": name} for name in names]}
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))


def test_offloading_is_refused_beside_connectors_that_load_in_a_step() -> None:
    assert not composition.unsafe_to_offload_reason(None)
    safe = engine("NixlConnector", "RitornelloConnector", "MooncakeConnector")
    assert not composition.unsafe_to_offload_reason(safe)
    unsafe = engine("RitornelloConnector", "LMCacheConnectorV1")
    assert "LMCacheConnectorV1" in composition.unsafe_to_offload_reason(unsafe)
    dummy = engine("RitornelloConnector", "DecodeBenchConnector")
    assert "DecodeBenchConnector" in composition.unsafe_to_offload_reason(dummy)


def test_connector_that_fills_dummy_blocks_is_refused() -> None:
    assert not composition.unsupported_reason(None)
    assert not composition.unsupported_reason(engine("RitornelloConnector", "NixlConnector"))
    assert "DecodeBenchConnector" in composition.unsupported_reason(engine("DecodeBenchConnector"))


def test_requests_wait_for_memory_layouts_of_all_workers() -> None:
    facts_of_workers = FactsCollector(2)
    facts = ShardFacts()
    assert facts_of_workers.pending()
    assert facts_of_workers.step_metadata() is REQUEST_FACTS
    assert facts_of_workers.add({(0, 0): facts}) is None
    assert facts_of_workers.add({(0, 1): facts}) == {(0, 0): facts, (0, 1): facts}
    assert not facts_of_workers.pending()
    assert facts_of_workers.step_metadata() is IDLE
    assert facts_of_workers.add({(0, 0): facts}) is None


def test_wait_for_memory_layouts_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    facts_of_workers = FactsCollector(1)
    assert facts_of_workers.pending()
    monkeypatch.setattr(composition, "FACTS_SECONDS", 0.0)
    assert not facts_of_workers.pending()


def test_aggregated_report_has_memory_layouts_of_all_workers() -> None:
    one = WorkerReport(step=3, facts={(0, 0): ShardFacts()})
    two = WorkerReport(step=3, facts={(0, 1): ShardFacts(unsupported_reason="no")})
    both = one.aggregate(two)
    assert both.step == 3
    assert both.facts == {(0, 0): ShardFacts(), (0, 1): ShardFacts(unsupported_reason="no")}
