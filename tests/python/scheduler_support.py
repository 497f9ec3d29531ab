"""The scheduler's side of vLLM's connector with stand-ins for the store, which only remembers keys,
and for vLLM's requests and blocks.
"""

from types import SimpleNamespace
from typing import Any, cast

from vllm_shapes import TOKENS, FakeStore

from ritornello.vllm.identity import Identity
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.scheduler import SchedulerSide
from ritornello.vllm.store import VllmStore


def step_of(scheduled: dict[str, int], **fields: Any) -> Any:
    """Returns a stand-in for vLLM's `SchedulerOutput`. `scheduled`: number of tokens of each
    request.
    """
    ends: dict[str, Any] = {"finished_req_ids": set(), "preempted_req_ids": None}
    return SimpleNamespace(num_scheduled_tokens=scheduled, **(ends | fields))


class Blocks:
    """Stand-in for vLLM's cache manager. Every request has the blocks 100 to 139 of one group, and
    200 to 239 of a group with a window. In the second group the null block, 0, replaces the first
    `behind` blocks, which are before the window.
    """

    def __init__(self) -> None:
        self.evicted: set[int] = set()
        self.free = 49
        self.behind = 0
        self.block_pool: Any = SimpleNamespace(
            num_gpu_blocks=50,
            get_num_free_blocks=self._free,
            null_block=SimpleNamespace(block_id=0),
        )

    def _free(self) -> int:
        return self.free

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (list(range(100, 140)), [0] * self.behind + list(range(200 + self.behind, 240)))

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


def keep(store: FakeStore, asked: Any, pages: int, epoch: bytes = b"") -> None:
    store.keep(asked.block_hashes[:pages], epoch=epoch)


def side_of(store: FakeStore, blocks: Blocks, model: Identity, **options: Any) -> SchedulerSide:
    made = SchedulerSide(cast(VllmStore, store), model, StepMeter(), **options)
    made.bind_cache(blocks)
    return made


BLOCKS = (list(range(100, 140)), list(range(200, 240)))


def run(side: SchedulerSide, asked: Any, local: int = 0, computed: int | None = None) -> Any:
    """Plans one step that admits a request, of which vLLM's own cache has `local` tokens, and
    computes the request up to its end or, if given, up to `computed` tokens. Returns the step's
    metadata.
    """
    external, _ = side.matched_tokens(asked, local)
    assert external is not None
    side.request_admitted(asked, BLOCKS, external)
    asked.num_computed_tokens = local + external
    scheduled = (asked.num_tokens if computed is None else computed) - asked.num_computed_tokens
    metadata = side.plan(step_of({asked.request_id: scheduled}))
    asked.num_computed_tokens += scheduled
    return metadata


def step(side: SchedulerSide, asked: Any, tokens: int) -> Any:
    metadata = side.plan(step_of({asked.request_id: tokens}))
    asked.num_computed_tokens += tokens
    return metadata
