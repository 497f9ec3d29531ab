"""The state of a request on the scheduler's side, and the used parts of vLLM's scheduler."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ritornello.vllm.matching import PrefixMatch
from ritornello.vllm.settings import DEFAULT_OPTIONS, RequestOptions


class Request(Protocol):
    """The used part of a vLLM request."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_computed_tokens: int
    skip_reading_prefix_cache: bool
    kv_transfer_params: Mapping[str, Any] | None


class BlockPool(Protocol):
    num_gpu_blocks: int
    null_block: Any

    def get_num_free_blocks(self) -> int: ...


class CacheManager(Protocol):
    """The used part of vLLM's KV cache manager."""

    block_pool: BlockPool

    def get_block_ids(self, request_id: str, /) -> Sequence[Sequence[int]]: ...
    def evict_blocks(self, block_ids: set[int], /) -> None: ...


class Step(Protocol):
    """The used part of a SchedulerOutput."""

    num_scheduled_tokens: Mapping[str, int]
    finished_req_ids: Collection[str]
    preempted_req_ids: Collection[str] | None


@dataclass(slots=True)
class LeasedMatch:
    """The result of a lookup of the first `looked_up` tokens of a request, whose leased pages may
    be loaded until `valid_until`, a time of `monotonic`. `local_tokens`: leading tokens that were
    in the engine's cache. `asynchronous`: whether vLLM was told that the load is asynchronous.
    """

    found: PrefixMatch
    looked_up: int
    valid_until: float
    local_tokens: int = 0
    asynchronous: bool = False


@dataclass(slots=True)
class RequestState:
    """State of one request.

    `match`: stored pages that may be loaded for the request. `saved`: for each group, the number of
    leading pages that are stored, are being saved, or will not be saved because their blocks have
    left the group's window or their save failed and is not repeated. `loading`: an asynchronous
    load fills the request's blocks. `failed`: a load of the request left a page unfilled.
    `wake_step`: the step of `SavePlan` in which the request is next examined for full pages.
    `waiting_since`: the time of `monotonic` since which the request waits for the answer of a
    remote, or for pages that are being copied to a tier from which they can be loaded. `sources`:
    the number of tokens that its last load reads from each tier. `shares_failed_block`: the request
    has a block that failed to load, or that was computed after such a block, and that another
    request may recompute instead; the request saves nothing until it is preempted and admitted
    again. `recorded`: the last decision that was recorded about the request (`DecisionLog`).
    """

    request: Request
    options: RequestOptions = DEFAULT_OPTIONS
    match: LeasedMatch | None = None
    saved: list[int] = field(default_factory=list)
    loading: bool = False
    failed: bool = False
    wake_step: int = 0
    waiting_since: float | None = None
    sources: dict[str, int] = field(default_factory=dict)
    shares_failed_block: bool = False
    recorded: tuple[str, int, int, int, str] | None = None

    @property
    def loads(self) -> bool:
        return self.options.loads and not self.failed and not self.request.skip_reading_prefix_cache

    @property
    def no_load_reason(self) -> str:
        """Why no page may be loaded for the request, in one word; "" if pages may be loaded."""
        if not self.options.loads:
            return "opted_out"
        if self.failed:
            return "load_failed"
        return "skips_prefix_cache" if self.request.skip_reading_prefix_cache else ""
