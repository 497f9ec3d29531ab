"""vLLM's scheduler, tiering manager and offloading worker over KV cache groups of given kinds,
without a model. In place of a model, `GroupEngine` writes to each block bytes that follow from the
tokens, and before it continues after a prefix, it checks the bytes of all blocks that a model of
these kinds would read.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from harness import BLOCK

WAIT_SECONDS = 60.0
LAYOUT = "LBHNC"


class GroupEngine:
    """`transfer`: vLLM's configuration of the connector, `RitornelloConnector` or vLLM's offloading
    connector with our tier. The caller must replace `data_path.data_path` first, so that
    `RitornelloConnector` has the data path of GPU engines. `specs`: the kind of each layer.
    `cache`: fields of vLLM's `CacheConfig`.
    """

    def __init__(
        self, model: Path, transfer: dict[str, Any], specs: dict[str, Any], **cache: Any
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheLayout
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.worker.utils import allocate_kv_cache

        config = EngineArgs(
            model=str(model),
            max_model_len=1024,
            block_size=BLOCK,
            num_gpu_blocks_override=200,
            kv_transfer_config=transfer,
        ).create_engine_config()
        for name, value in {"kv_cache_layout": LAYOUT, **cache}.items():
            setattr(config.cache_config, name, value)
        (groups,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [1 << 30])
        groups.kv_cache_layout = LAYOUT
        planned = kv_cache_utils.generate_scheduler_kv_cache_config([groups])
        config.cache_config.num_gpu_blocks = planned.num_blocks
        block, hashed = kv_cache_utils.resolve_kv_cache_block_sizes(planned, config)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_function)
        self._hasher = kv_cache_utils.get_request_block_hasher(hashed, hash_function)
        with set_current_vllm_config(config):
            self.scheduler: Any = Scheduler(
                config, planned, StructuredOutputManager(config), block, hashed
            )
            self._worker: Any = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, groups
            )
        caches = allocate_kv_cache(groups, "cpu", KVCacheLayout[LAYOUT])
        self._worker.register_kv_caches(caches)
        self._groups = groups
        self._memory = next(iter(caches.values())).untyped_storage()
        # The index of the first token that was computed for each request, by the request's name.
        self._begun: dict[str, int] = {}
        # No worker that counts changes of the weights runs here, and without one a `WeightGuard`
        # treats the weights as changed. So remove the guard from the data path and the tier.
        self.path._guard = None
        (tier,) = self.path.connector_scheduler.manager.secondary_tiers
        # None if the tier does not serve the engine.
        self.tier = tier._tier
        if self.tier is not None:
            self.tier._guard = None

    @property
    def kinds(self) -> list[str]:
        return [type(group.kv_cache_spec).__name__ for group in self._groups.kv_cache_groups]

    @property
    def path(self) -> Any:
        connector = self.scheduler.connector
        return getattr(connector, "data_path", connector)

    def answer(self, prompt: list[int]) -> int:
        """Answers a prompt. Returns how many tokens of the prompt were not computed."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            f"request-{len(self._begun)}",
            prompt,
            SamplingParams(max_tokens=2, ignore_eos=True),
            None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        until = monotonic() + WAIT_SECONDS
        while not request.is_finished() or self.path.connector_scheduler.has_pending_push_work():
            self._step()
            assert monotonic() < until
        return self._begun[request.request_id]

    def stop(self) -> None:
        """Stops the engine once the store, or the last of its tiers, has all chunks."""
        if self.tier is not None:
            assert self.tier._jobs.wait(60)
            self.tier._store._store.flush()
        self.scheduler.shutdown()
        self._worker.shutdown()

    def _step(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        worker = self._worker
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        sampled = [self._compute(*scheduled) for scheduled in output.num_scheduled_tokens.items()]
        worker.start_load_kv(None)
        worker.wait_for_save()
        sent, received = worker.get_finished(output.finished_req_ids)
        done = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        ran = ModelRunnerOutput(
            names,
            {name: place for place, name in enumerate(names)},
            sampled,
            kv_connector_output=done,
        )
        self.scheduler.update_from_output(output, ran)

    def _compute(self, name: str, count: int) -> list[int]:
        """Checks the bytes of the prefix that a step reads, and writes the bytes of the `count`
        tokens that it computes. Returns the next token, once the whole prompt is computed.
        """
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        start, tokens = end - count, request.all_token_ids
        self._begun.setdefault(name, start)
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for group, table in zip(self._groups.kv_cache_groups, tables, strict=True):
            block, window = group.kv_cache_spec.block_size, window_of(group.kv_cache_spec, start)
            for number in range(max(start - window, 0) // block, -(-start // block)):
                assert table[number], f"block {number} of a needed prefix is not in memory"
                for page, expected in self._pages(group, table[number], tokens, start, number):
                    assert bytes(page) == expected, (name, group, number)
            first = (end - 1 if window == 1 else start) // block
            for number in range(first, -(-end // block)):
                if table[number]:
                    for page, content in self._pages(group, table[number], tokens, end, number):
                        page[:] = content
        return [7] if end >= request.num_tokens else []

    def _pages(
        self, group: Any, block: int, tokens: Any, computed: int, number: int
    ) -> Iterator[tuple[memoryview, bytes]]:
        """Yields, for each layer of `group`, the memory of the block `block`, and the bytes that
        this memory must hold once the first `computed` tokens of `tokens` are computed, if the
        block is number `number` of its request.
        """
        import numpy as np
        import torch

        memory = torch.tensor([], dtype=torch.int8).set_(self._memory).numpy().view(np.uint8)
        end = min((number + 1) * group.kv_cache_spec.block_size, computed)
        prefix = repr(list(tokens[:end])).encode()
        layers = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for tensor in self._groups.kv_cache_tensors:
            for place, layer in enumerate(tensor.layers):
                if layer not in group.layer_names:
                    continue
                size = layers.get(layer, group.kv_cache_spec).real_page_size_bytes
                at = tensor.offset + place * tensor.layer_stride + block * tensor.block_stride
                content = hashlib.shake_128(layer.encode() + prefix).digest(size)
                yield memory[at : at + size].data, content


def window_of(spec: Any, start: int) -> int:
    """Returns how many tokens before token `start` a model reads to compute it; 1 for a recurrent
    state, which covers all tokens before it.
    """
    if hasattr(spec, "mamba_cache_mode"):
        return 1
    if size := getattr(spec, "attention_chunk_size", None):
        return start % size
    window = getattr(spec, "sliding_window", None)
    return window - 1 if window else start
