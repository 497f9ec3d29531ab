"""vLLM's tiering on a machine without a GPU: its `TieringOffloadingSpec` with a worker that copies
CPU tensors.

All parts except the worker are vLLM's own: the connector, the tiering manager, the host tier in
shared memory. vLLM's worker refuses CPU memory; this worker copies synchronously and in order.
"""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks between the layers of each KV cache group and host memory. A chunk is
    `blocks_per_chunk` blocks of one group.
    """

    def __init__(
        self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for cache in caches.tensors:
            rows = region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk)
            split = rows.unflatten(1, (blocks_per_chunk, cache.page_size_bytes))
            pairs.append((cache.tensor, split))
        # Groups share tensors. Each group copies only the bytes of its layers, without padding.
        self._groups = [
            [
                (
                    pairs[ref.tensor_idx][0][:, : ref.page_size_bytes],
                    pairs[ref.tensor_idx][1][..., : ref.page_size_bytes],
                )
                for ref in refs
            ]
            for refs in caches.group_data_refs
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        for group, block, chunk, part in self._places(src_spec, dst_spec.chunk_ids):
            for cache, rows in self._groups[group]:
                rows[chunk, part] = cache[block]
        self._finished.append(TransferResult(job_id, True))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        for group, block, chunk, part in self._places(dst_spec, src_spec.chunk_ids):
            for cache, rows in self._groups[group]:
                cache[block] = rows[chunk, part]
        self._finished.append(TransferResult(job_id, True))
        return True

    def _places(self, blocks: GPULoadStoreSpec, chunks: Any) -> Iterator[tuple[int, int, int, int]]:
        """Yields for each block: its group, its id in the engine's KV memory, its chunk in host
        memory, and its index in the chunk. A transfer lists the blocks and the chunks of the first
        group, then of the second, and so on; the first and the last chunk of a group may lack
        blocks.
        """
        block_ids, chunk_ids = blocks.block_ids.tolist(), chunks.tolist()
        past_blocks = past_chunks = 0
        groups = zip(blocks.group_sizes, blocks.block_indices, strict=True)
        for group, (size, first) in enumerate(groups):
            if not size:
                continue
            skipped = first % self._blocks_per_chunk
            for at in range(size):
                chunk, part = divmod(skipped + at, self._blocks_per_chunk)
                yield group, block_ids[past_blocks + at], chunk_ids[past_chunks + chunk], part
            past_blocks += size
            past_chunks += -(-(skipped + size) // self._blocks_per_chunk)
        assert (past_blocks, past_chunks) == (len(block_ids), len(chunk_ids))

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._groups.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, region, self.blocks_per_chunk)
