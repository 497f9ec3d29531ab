"""A connector that runs beside Ritornello's in MultiConnector: it copies the blocks of a prompt to
this process's memory, and loads them for later requests with the same prompt at the start of the
step that computes the remaining tokens.

Like NIXL's connector, it sends a handshake, and does not accept the handshake of another connector.
"""

# mypy: allow-subclassing-any

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

BLOCK = 32


@dataclass
class Mode:
    """Whether the connector remembers the blocks of prompts (`remembers`), and lends remembered
    blocks (`lends`). `fails`: the index in a prompt of the first block that loads report as failed,
    if any. Loads report all later blocks as failed too, and fill the failed blocks with zeros.
    """

    remembers: bool = False
    lends: bool = False
    fails: int | None = None


MODE = Mode()
# Copies of the blocks of each remembered prompt, by layer.
REMEMBERED: dict[tuple[int, ...], dict[str, Any]] = {}
# For each load, the number of blocks that it filled, failed blocks included.
LENT: list[int] = []


@dataclass
class Facts(KVConnectorHandshakeMetadata):
    address: str = "here"


@dataclass
class Work(KVConnectorMetadata):
    """The work of one step. `fill`: prompts, each with the index of the first block to fill, and
    the prompt's blocks up to the last block to fill. `remember`: prompts, each with the blocks to
    copy.
    """

    fill: list[tuple[tuple[int, ...], int, list[int]]] = field(default_factory=list)
    remember: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)


class LenderConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._caches: dict[str, Any] = {}
        self._fill: list[tuple[tuple[int, ...], int, list[int]]] = []
        self._failed: set[int] = set()
        self._local = 0

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        assert metadata
        for facts in metadata.values():
            if not isinstance(facts, Facts):
                raise ValueError(
                    f"received {type(facts).__name__}, the handshake of another connector"
                )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        asked = tuple(request.prompt_token_ids)
        if not MODE.lends or asked not in REMEMBERED:
            return 0, False
        self._local = num_computed_tokens
        return max((len(asked) - 1) // BLOCK * BLOCK - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._local // BLOCK
            held = blocks.get_block_ids()[0][: first + num_external_tokens // BLOCK]
            self._fill.append((tuple(request.prompt_token_ids), first, held))

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        work, self._fill = Work(self._fill), []
        if MODE.remembers:
            for new in scheduler_output.scheduled_new_reqs:
                asked = tuple(new.prompt_token_ids)
                work.remember.append((asked, new.block_ids[0][: len(asked) // BLOCK]))
        return work

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def get_handshake_metadata(self) -> Facts:
        return Facts()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for asked, first, held in self._connector_metadata.fill:
            LENT.append(len(held) - first)
            for place in range(first, len(held)):
                broken = MODE.fails is not None and place >= MODE.fails
                if broken:
                    self._failed.add(held[place])
                for name, cache in self._caches.items():
                    cache[held[place]] = 0 if broken else REMEMBERED[asked][name][place]

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None:
        for asked, held in self._connector_metadata.remember:
            REMEMBERED[asked] = {
                name: [cache[block].clone() for block in held]
                for name, cache in self._caches.items()
            }

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
