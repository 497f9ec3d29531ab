"""LMCache's own parts at a small scale: adapters made by its factory, and objects in one memory
area like LMCache's first tier (L1).
"""

import argparse
import json
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from servers.lmcache import adapter_of

MIB = 1 << 20
WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class AdapterKind:
    """One of LMCache's two kinds of adapters, `plugin` or `native_plugin`, and the path of its
    store.
    """

    kind: str
    path: Path

    def spec(self, **further: Any) -> dict[str, Any]:
        """Returns the value of LMCache's option `--l2-adapter`. `further` adds keys to the value,
        except `params`, whose entries become parameters of the adapter.
        """
        params = further.pop("params", {})
        return {**adapter_of(self.path, self.kind, **params), **further}

    def json(self, **further: Any) -> str:
        return json.dumps(self.spec(**further))

    def open(self, memory: "Memory | None" = None, **further: Any) -> Any:
        """Returns an adapter that LMCache's factory made."""
        desc = None if memory is None else memory.desc
        return create_l2_adapter(config_of(self.spec(**further)).adapters[0], l1_memory_desc=desc)


def config_of(spec: dict[str, Any]) -> Any:
    return parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))


@dataclass
class Memory:
    """One memory area, like LMCache's first tier (L1). `objects` takes memory objects from it, one
    after another; `taken`: bytes taken, padding to 4 KiB included.
    """

    size: int
    taken: int = 0
    tensor: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        backing = torch.zeros(self.size + 4095, dtype=torch.uint8)
        start = -backing.data_ptr() % 4096
        self.tensor = backing[start : start + self.size]

    @property
    def desc(self) -> L1MemoryDesc:
        return L1MemoryDesc(ptr=self.tensor.data_ptr(), size=self.size, align_bytes=4096)

    def objects(
        self, count: int, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16
    ) -> list[TensorMemoryObj]:
        made = []
        for _ in range(count):
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            raw = self.tensor[self.taken : self.taken + nbytes]
            assert raw.numel() == nbytes, f"the memory area of {self.size} bytes is full"
            meta = MemoryObjMetadata(
                shape=torch.Size(shape),
                dtype=dtype,
                address=self.taken,
                phy_size=nbytes,
                fmt=MemoryFormat.KV_2LTD,
                ref_count=1,
            )
            self.taken += -(-nbytes // 4096) * 4096
            made.append(TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None))
        return made


def keys_of(count: int, *, start: int = 0, **fields: Any) -> list[ObjectKey]:
    names: dict[str, Any] = {"model_name": "org/model-7b", "kv_rank": 0x01000100, **fields}
    return [
        ObjectKey(chunk_hash=number.to_bytes(32), **names) for number in range(start, start + count)
    ]


def fill(objects: Sequence[TensorMemoryObj], keys: Sequence[ObjectKey]) -> None:
    """Writes to each object the bytes that `has_right_bytes` expects of its key."""
    for obj, key in zip(objects, keys, strict=True):
        seed = torch.Generator().manual_seed(hash_of(key))
        obj.raw_data.copy_(torch.randint(0, 256, obj.raw_data.shape, generator=seed))


def has_right_bytes(obj: TensorMemoryObj, key: ObjectKey) -> bool:
    seed = torch.Generator().manual_seed(hash_of(key))
    expected = torch.randint(0, 256, obj.raw_data.shape, generator=seed).to(torch.uint8)
    return torch.equal(obj.raw_data, expected)


def hash_of(key: ObjectKey) -> int:
    import zlib

    return zlib.crc32(repr(key).encode())


def wait(fd: int, take: Any) -> Any:
    """Returns the result of `take`. While it is None, waits for the eventfd, as LMCache's
    controllers do.
    """
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        result = take()
        if result is not None:
            return result
        if select.select([fd], [], [], WAIT_SECONDS)[0]:
            consume_fd(fd)
    raise AssertionError(f"no result within {WAIT_SECONDS} s")


def store(adapter: Any, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> Any:
    """Stores objects through the adapter, and returns LMCache's result object."""
    number = adapter.submit_store_task(keys, objects)
    fd = adapter.get_store_event_fd()
    return wait(fd, lambda: adapter.pop_completed_store_tasks().get(number))


def lookup(
    adapter: Any, keys: list[ObjectKey], hint: dict[int, MemoryLayoutDesc] | None = None
) -> Any:
    number = adapter.submit_lookup_and_lock_task(keys, hint or {})
    fd = adapter.get_lookup_and_lock_event_fd()
    found = wait(fd, lambda: adapter.query_lookup_and_lock_result(number))
    return [found.test(at) for at in range(len(keys))]


def load(adapter: Any, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> list[bool]:
    number = adapter.submit_load_task(keys, objects)
    loaded = wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(number))
    return [loaded.test(at) for at in range(len(keys))]
