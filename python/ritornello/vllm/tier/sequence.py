"""Which chunks (pages of vLLM's host tier) are consecutive in a request.

vLLM records in a request's context, for each of its keys, the number of tokens up to the end of
the key's chunk. These positions tell which keys follow a key, so that one call looks up many keys,
and which keys precede it, which a put needs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ritornello.vllm.engine_config import key_positions

# An offload key is a block hash and, as four big-endian bytes, the number of its KV group.
GROUP_BYTES = 4


class Context(Protocol):
    """The used part of a vLLM `ReqContext`."""

    @property
    def req_id(self) -> str: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...
    def get_offload_key_position(self, key: Any, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. `chained`: a chunk is useful only with all chunks before it (full
    attention). `window_chunks`: of a group that is not chained, the number of chunks at the end of
    a prefix that are needed to continue after it.
    """

    number: int
    chunk_tokens: int
    chained: bool
    window_chunks: int = 1


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def chunk_number(context: Context, key: bytes, group: Group) -> int | None:
    """Returns the index of the chunk `key` in its request; None if the index is unknown, or if the
    tokens of `key` end inside a chunk.
    """
    end = context.get_offload_key_position(key)
    if end is None or end % group.chunk_tokens:
        return None
    return end // group.chunk_tokens - 1


class KeySequence:
    """The keys of one request and group by chunk number, as far as vLLM has recorded them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._known_count = -1
        self._keys: dict[int, bytes] = {}
        self._leading: list[bytes] = []

    def following(self, context: Context, key: bytes) -> list[bytes]:
        """Returns `key` and the keys that follow it without a gap."""
        number = chunk_number(context, key, self._group)
        keys = self._keys_by_number(context)
        if number is None or keys.get(number) != key:
            return [key]
        if number < len(leading := self._leading_keys(context)):
            return leading[number:]
        found = [key]
        while (successor := keys.get(number + len(found))) is not None:
            found.append(successor)
        return found

    def leading(self, context: Context) -> Sequence[bytes]:
        """Returns the keys from the first chunk up to the first unknown chunk; the same object
        until vLLM records further keys.
        """
        return self._leading_keys(context)

    def window(self, context: Context, key: bytes) -> Sequence[bytes]:
        """Returns the known keys of the window that ends with `key`."""
        number, keys = chunk_number(context, key, self._group), self._keys_by_number(context)
        if number is None:
            return [key]
        first = max(number + 1 - self._group.window_chunks, 0)
        return [keys[place] for place in range(first, number + 1) if place in keys]

    def before(self, context: Context, key: bytes) -> Sequence[bytes]:
        """Returns the keys of all chunks before `key`. If some of them are unknown, returns only
        the key of the last chunk before `key`, or no key if this chunk is unknown too.
        """
        number = chunk_number(context, key, self._group) or 0
        leading = self.leading(context)
        if len(leading) >= number:
            return leading[:number]
        predecessor = self._keys_by_number(context).get(number - 1)
        return [] if predecessor is None else [predecessor]

    def _leading_keys(self, context: Context) -> list[bytes]:
        keys = self._keys_by_number(context)
        if not self._leading:
            if 0 in keys and list(keys) == list(range(len(keys))):
                self._leading = list(keys.values())
            while (key := keys.get(len(self._leading))) is not None:
                self._leading.append(key)
        return self._leading

    def _keys_by_number(self, context: Context) -> Mapping[int, bytes]:
        # Without positions each key is looked up alone, and puts have no parents.
        positions = key_positions(context)
        if len(positions) != self._known_count:
            step, suffix = self._group.chunk_tokens, self._group.number.to_bytes(GROUP_BYTES, "big")
            self._known_count = len(positions)
            self._leading = []
            if self._are_consecutive(positions):
                self._keys = dict(enumerate(positions))
            else:
                self._keys = {
                    end // step - 1: key
                    for key, end in positions.items()
                    if not end % step and key.endswith(suffix)
                }
        return self._keys

    def _are_consecutive(self, positions: Mapping[bytes, int]) -> bool:
        """Returns whether `positions` are the ends of consecutive chunks of this group, in order
        from the first chunk, as vLLM records them for a model with one group. With several groups
        positions repeat, or decrease. If true, the caller needs no loop over the keys, which would
        take three times as long as this check.
        """
        step, ends = self._group.chunk_tokens, list(positions.values())
        if not ends or ends[-1] != step * len(ends):
            return False
        keys = list(positions)
        outer = (keys[0], keys[-1])
        return ends == list(range(step, ends[-1] + 1, step)) and all(
            group_of(key) == self._group.number for key in outer
        )


def consecutive_runs(context: Context, group: Group, keys: Sequence[bytes]) -> Iterator[slice]:
    """Yields the slices of `keys`, all of `group`, that one call of the store may move or look up:
    each series of consecutive chunks if the group is chained, otherwise all keys.
    """
    if not group.chained:
        if keys:
            yield slice(0, len(keys))
        return
    start = 0
    last: int | None = None
    for index, key in enumerate(keys):
        number = chunk_number(context, key, group)
        if index and (number is None or last is None or number != last + 1):
            yield slice(start, index)
            start = index
        last = number
    if keys:
        yield slice(start, len(keys))
