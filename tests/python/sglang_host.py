"""A stand-in for SGLang's host pools (KV buffers in host memory), which only gives access to the
memory of pages.
"""

import hashlib
from typing import Any

import numpy as np

from ritornello.connector.identity import ModelIdentity
from ritornello.sglang.identity import Engine
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.pools import Pool
from ritornello.sglang.store import SGLangStore

ENGINE = Engine("0.5.23", ModelIdentity("m", b"w"), 2, (0, 1), (0, 1), (0, 1), False)
TOKENS, PAGES, PIECE = 4, 8, 4096


class Array(np.ndarray[Any, Any]):
    """A NumPy array with the methods of torch's tensors that `ritornello.sglang.pools` calls."""

    device = "cpu"

    def contiguous(self) -> "Array":
        return np.ascontiguousarray(self).view(Array)

    def is_contiguous(self) -> bool:
        return bool(self.flags.c_contiguous)


class Host:
    """A host pool whose pages consist of `pieces` pieces each. All pieces are in `memory`, of shape
    (pieces, pages, PIECE). If the pool is not `named`, it refuses to return the addresses of its
    pages.
    """

    layout, dtype, page_size = "odd", "torch.uint8", TOKENS
    layer_num, start_layer, end_layer = 2, 0, 2

    def __init__(self, pieces: int = 3, named: bool = True, pages: int = PAGES) -> None:
        generator = np.random.default_rng(pieces)
        memory = generator.integers(0, 256, (pieces, pages, PIECE), np.uint8)
        self.memory, self.named, self.page_num = memory, named, pages

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        if not self.named:
            raise ValueError("Unsupported layout: odd")
        pages = [int(slot) // TOKENS for slot in indices[::TOKENS]]
        found = [piece[page].ctypes.data for page in pages for piece in self.memory]
        return found, [PIECE] * len(found)

    def get_dummy_flat_data_page(self) -> Array:
        return np.zeros(self.memory.shape[0] * PIECE, np.uint8).view(Array)

    def get_data_page(self, slot: int, flat: bool = True) -> Array:
        return self.memory[:, slot // TOKENS].flatten().view(Array)

    def set_from_flat_data_page(self, slot: int, page: Array) -> None:
        self.memory[:, slot // TOKENS] = page.reshape(-1, PIECE)


def slots(*pages: int) -> Any:
    return np.concatenate([np.arange(page * TOKENS, (page + 1) * TOKENS) for page in pages])


def keys(pages: int) -> list[bytes]:
    return [hashlib.sha256(bytes([page])).digest() for page in range(pages)]


def pool_of(host: Host, store: SGLangStore, meter: RateMeter, name: str = "kv") -> Pool:
    counts_tokens = name == "kv"
    made = Pool(
        name, host, np.arange, store, meter, in_place=True, split=1, counts_tokens=counts_tokens
    )
    made.describe(ENGINE)
    return made
