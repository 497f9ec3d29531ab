"""Which chunks follow upon each other in a request.

vLLM notes in a request's context, for each of its keys, the token at which that chunk ends. From
there come the next keys (so that many are asked for at once) and the one before (a stored run hangs
behind it).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# An offload key is the block's hash and, in four big-endian bytes, the number of its KV group.
GROUP_BYTES = 4


class Context(Protocol):
    """What is used of a vLLM `ReqContext`."""

    @property
    def req_id(self) -> str: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...
    def get_offload_key_position(self, key: Any, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. `chained`: a chunk is of use only with all before it (full attention)."""

    number: int
    chunk_tokens: int
    chained: bool


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def chunk_number(context: Context, key: bytes, group: Group) -> int | None:
    """Chunk number `key` has in its request, from 0; None where that is not known, or for a key
    that ends inside a chunk.
    """
    end = context.get_offload_key_position(key)
    if end is None or end % group.chunk_tokens:
        return None
    return end // group.chunk_tokens - 1


class KeySequence:
    """The keys of one request and group by their place, as far as vLLM has named them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._seen = -1
        self._keys: dict[int, bytes] = {}

    def following(self, context: Context, key: bytes) -> list[bytes]:
        """`key` and those that follow upon it without a gap."""
        place = chunk_number(context, key, self._group)
        keys = self._known(context)
        if place is None or keys.get(place) != key:
            return [key]
        found = [key]
        while (follower := keys.get(place + len(found))) is not None:
            found.append(follower)
        return found

    def predecessor(self, context: Context, key: bytes) -> bytes | None:
        place = chunk_number(context, key, self._group)
        return self._known(context).get(place - 1) if place else None

    def _known(self, context: Context) -> Mapping[int, bytes]:
        # Without this the tier asks key by key and runs have no parents; nothing else changes.
        ends: Mapping[bytes, int] = getattr(context, "_offload_key_positions", {})
        if len(ends) != self._seen:
            step, suffix = self._group.chunk_tokens, self._group.number.to_bytes(GROUP_BYTES, "big")
            self._seen = len(ends)
            self._keys = {
                end // step - 1: key
                for key, end in ends.items()
                if end % step == 0 and key[-GROUP_BYTES:] == suffix
            }
        return self._keys


def consecutive_runs(context: Context, group: Group, keys: Sequence[bytes]) -> Iterator[slice]:
    """Pieces of `keys`, all of `group`, that may be one batch: consecutive chunks of the request
    where the group is chained, and everything where it is not.
    """
    if not group.chained:
        if keys:
            yield slice(0, len(keys))
        return
    begin = 0
    last: int | None = None
    for at, key in enumerate(keys):
        place = chunk_number(context, key, group)
        if at and (place is None or last is None or place != last + 1):
            yield slice(begin, at)
            begin = at
        last = place
    if keys:
        yield slice(begin, len(keys))
