"""LMCache's own storage manager in a separate process, for tests and by hand:

    python driver.py SPEC put|get COUNT [kill]

SPEC is the value of LMCache's option `--l2-adapter`, in JSON. `put` writes COUNT objects to
LMCache's memory (L1), and waits until the store (L2) has them, at most a minute. `get` prefetches
COUNT objects and compares the values of all objects found. Prints the counts that `put` or `get`
returns as one line of JSON. `kill`: the process ends itself by SIGKILL, at least five seconds after
this line.
"""

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from harness import config_of, hash_of, keys_of
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.storage_manager import StorageManager

LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 4, 256, 64])], dtypes=[torch.bfloat16])
WAIT_SECONDS = 60.0


def manager_of(spec: dict[str, Any]) -> StorageManager:
    memory = L1MemoryManagerConfig(size_in_bytes=256 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=config_of(spec),
        )
    )


def expected_of(key: Any) -> torch.Tensor:
    seed = torch.Generator().manual_seed(hash_of(key))
    return torch.randint(-100, 100, LAYOUT.shapes[0], generator=seed).to(torch.bfloat16)


def is_busy(manager: StorageManager) -> bool:
    return bool(manager.report_status()["store_controller"]["in_flight_task_count"])


def put(manager: StorageManager, count: int) -> dict[str, Any]:
    keys = keys_of(count)
    reserved = manager.reserve_write(keys, LAYOUT)
    for key, obj in reserved.items():
        obj.tensor.copy_(expected_of(key))
    manager.finish_write(list(reserved))
    # Minimum bytes in L2 after all objects are stored: one byte for each element of the KV cache.
    # In L1 an element has two bytes, but LMCache may encode objects for L2.
    nbytes = count * LAYOUT.shapes[0].numel()
    until = time.monotonic() + WAIT_SECONDS
    used = 0
    while (used < nbytes or is_busy(manager)) and time.monotonic() < until:
        time.sleep(0.05)
        used = sum(adapter.get_usage().total_bytes_used for _, adapter in manager.l2_adapters())
    return {"written": len(reserved), "used": used}


def get(manager: StorageManager, count: int) -> dict[str, Any]:
    keys = keys_of(count)
    spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)])
    used = sum(adapter.get_usage().total_bytes_used for _, adapter in manager.l2_adapters())
    handle = manager.submit_prefetch_task(spec)
    if not manager.wait_prefetch_status(handle, WAIT_SECONDS):
        raise SystemExit(f"LMCache's prefetch did not end within {WAIT_SECONDS} s")
    result = manager.query_prefetch_status(handle)
    hits = [key for at, key in enumerate(keys) if result.hit_cells[0].test(at)]
    wrong = 0
    with manager.read_prefetched_results(hits) as objects:
        for key, obj in zip(hits, objects or [], strict=True):
            wrong += not torch.equal(obj.tensor, expected_of(key))
    manager.finish_read_prefetched(hits)
    return {"hits": result.l2_hit_count, "wrong": wrong, "used": used}


def main() -> None:
    spec, doing, count, *rest = sys.argv[1:]
    manager = manager_of(json.loads(spec))
    print(json.dumps({"put": put, "get": get}[doing](manager, int(count))), flush=True)
    if rest == ["kill"]:
        # Wait until the put is durable: the store syncs every two seconds.
        time.sleep(5)
        os.kill(os.getpid(), signal.SIGKILL)
    manager.close()


if __name__ == "__main__":
    main()
