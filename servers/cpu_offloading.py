"""vLLM's tiering on a machine without a GPU: its `TieringOffloadingSpec` with a worker that copies
CPU tensors.

All parts except the worker are vLLM's own: the connector, the tiering manager, the host tier in
shared memory. vLLM's worker refuses CPU memory; this worker copies synchronously and in order.
"""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

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
    """Worker for one KV group; a chunk is `blocks_per_chunk` blocks."""

    def __init__(
        self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        assert len(caches.group_data_refs) == 1
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for cache in caches.tensors:
            rows = region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk)
            split = rows.unflatten(1, (blocks_per_chunk, cache.page_size_bytes))
            self._pairs.append((cache.tensor, split))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        for block, chunk, part in self._places(src_spec, dst_spec.chunk_ids):
            for cache, rows in self._pairs:
                rows[chunk, part] = cache[block]
        self._finished.append(TransferResult(job_id, True))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        for block, chunk, part in self._places(dst_spec, src_spec.chunk_ids):
            for cache, rows in self._pairs:
                cache[block] = rows[chunk, part]
        self._finished.append(TransferResult(job_id, True))
        return True

    def _places(self, blocks: GPULoadStoreSpec, chunks: Any) -> list[tuple[int, int, int]]:
        (first,) = blocks.block_indices
        skipped = first % self._blocks_per_chunk
        found = []
        for at, block in enumerate(blocks.block_ids.tolist()):
            chunk, part = divmod(skipped + at, self._blocks_per_chunk)
            found.append((block, int(chunks[chunk]), part))
        return found

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pairs.clear()
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
