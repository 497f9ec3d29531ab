"""Names of LMCache's objects in the store.

LMCache names an object by model, KV rank, object group, chunk hash and salt. Two objects of one
name may differ in chunk size, dtype or layout. Therefore a scope is a `Family` (model, group, salt)
in one `ObjectFormat` (bytes, dtypes, shapes), and an object is never read into memory of a
different format. The key contains rank and hash.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ritornello._core import Scope

ENGINE = "lmcache"
# The layout in scopes of pages whose shape the core does not know. LMCache's layout, if it is
# known, follows after a slash.
OPAQUE = "opaque"
RANK_BYTES = 8
HASH_BYTES_MAX = 64 - RANK_BYTES
# Bytes of a collision-resistant hash (sha256, blake3). Lengths distinguish hashes, because LMCache
# does not name its hash: the two weak hashes that it supports have 8 bytes (builtin) and 16 bytes
# (xxhash).
STRONG_HASH_BYTES = 32
# Maximum number of prefixes that `RankPrefixes` keeps: more than an engine has workers.
RANK_PREFIXES_MAX = 4096
# Separates the fields of a key in the native interface, which is one string.
SEPARATOR = "@"
# The shape of serialized objects: a row of bytes.
SERIALIZED = re.compile(r"uint8\[\d+\]")


class Family(NamedTuple):
    """The part of an object's name that is in its scope: model, object group and salt. The other
    parts, KV rank and chunk hash, are in its key.
    """

    model: str
    group: int
    salt: str


class ObjectFormat(NamedTuple):
    """Size and layout of an object. `layout`: dtypes, shapes and the name of LMCache's
    `MemoryFormat`, as `adapter._layout` writes them; "" if LMCache shows the object's bytes only.
    """

    nbytes: int
    layout: str = ""

    @property
    def is_serialized(self) -> bool:
        """Whether objects of this format are the output of one of LMCache's serdes."""
        return SERIALIZED.fullmatch(self.layout.partition("@")[0]) is not None

    @property
    def has_unknown_dtype(self) -> bool:
        """Whether objects of this format may be any 8-bit kind of KV: vLLM allocates all kinds as
        uint8.
        """
        return "uint8[" in self.layout and not self.is_serialized


class ObjectName(NamedTuple):
    """An object's family, and its key within the family."""

    family: Family
    key: bytes


class Group(NamedTuple):
    """Objects of one family: their indices in the request, and their keys."""

    family: Family
    indices: Sequence[int]
    keys: list[bytes]


def page_key(kv_rank: int, chunk_hash: bytes) -> bytes:
    """Returns the store's key of an object. ValueError if the rank is negative or too long, or if
    the hash is empty or too long.
    """
    if kv_rank >> (8 * RANK_BYTES) or not 0 < len(chunk_hash) <= HASH_BYTES_MAX:
        raise ValueError(
            f"rank {kv_rank:#x} does not fit in {RANK_BYTES} bytes, or the hash has "
            f"{len(chunk_hash)} bytes instead of 1 to {HASH_BYTES_MAX}"
        )
    return kv_rank.to_bytes(RANK_BYTES) + chunk_hash


class RankPrefixes(dict[int, bytes]):
    """Key prefixes by KV rank, computed at first use and kept. OverflowError for a rank that is
    negative or longer than `RANK_BYTES`.
    """

    def __missing__(self, kv_rank: int) -> bytes:
        prefix = kv_rank.to_bytes(RANK_BYTES)
        if len(self) >= RANK_PREFIXES_MAX:
            self.clear()
        self[kv_rank] = prefix
        return prefix


RANK_PREFIXES = RankPrefixes()


def group_objects(objects: Sequence[Any]) -> list[Group]:
    """Groups LMCache's object keys by family, without keys that the store cannot hold.

    The common case of one family has a fast path, because a lookup takes only a few microseconds in
    the store.
    """
    if not objects:
        return []
    first, prefixes = objects[0], RANK_PREFIXES
    model, number, salt = family = Family(first.model_name, first.object_group_id, first.cache_salt)
    with suppress(OverflowError):
        keys = [
            prefixes[key.kv_rank] + key.chunk_hash
            for key in objects
            if key.model_name == model and key.object_group_id == number and key.cache_salt == salt
        ]
        lengths = set(map(len, keys))
        if (
            len(keys) == len(objects)
            and min(lengths) > RANK_BYTES
            and max(lengths) <= RANK_BYTES + HASH_BYTES_MAX
        ):
            return [Group(family, range(len(keys)), keys)]
    return group_names(map(_name, objects))


def _name(key: Any) -> ObjectName | None:
    family = Family(key.model_name, key.object_group_id, key.cache_salt)
    with suppress(ValueError):
        return ObjectName(family, page_key(key.kv_rank, key.chunk_hash))
    return None


def group_names(names: Iterable[ObjectName | None]) -> list[Group]:
    """Groups names by family, without entries that are None. The indices of a group are positions
    in `names`.
    """
    groups: dict[Family, tuple[list[int], list[bytes]]] = {}
    for index, name in enumerate(names):
        if name is not None:
            indices, keys = groups.setdefault(name.family, ([], []))
            indices.append(index)
            keys.append(name.key)
    return [Group(family, indices, keys) for family, (indices, keys) in groups.items()]


def split_key(key: bytes) -> tuple[int, bytes]:
    """Returns KV rank and chunk hash."""
    return int.from_bytes(key[:RANK_BYTES]), key[RANK_BYTES:]


def parse_name(text: str) -> ObjectName:
    """Parses `model@kv_rank@group@chunk_hash[@salt]`, with numbers and hash in hexadecimal, as
    LMCache's native bridge writes it. ValueError for anything else.
    """
    model, rank, group, digest, *salt = text.split(SEPARATOR)
    if len(salt) > 1:
        raise ValueError(
            f"{text!r} is not an object key of LMCache: expected "
            "model@kv_rank@group@chunk_hash[@salt]"
        )
    family = Family(model, int(group, 16), salt[0] if salt else "")
    return ObjectName(family, page_key(int(rank, 16), bytes.fromhex(digest)))


def dtype_of(object_format: ObjectFormat) -> str:
    """Returns the dtype of the whole object, which lossless codecs use; "" if there is none or
    several.
    """
    layout = object_format.layout.partition("@")[0]
    dtypes = {tensor.partition("[")[0] for tensor in layout.split("+")}
    return dtypes.pop() if len(dtypes) == 1 else ""


def scope_of(family: Family, object_format: ObjectFormat, namespace: str) -> "Scope":
    from ritornello._core import Scope

    extra = {"engine": ENGINE}
    if namespace:
        extra["namespace"] = namespace
    return Scope(
        family.model,
        dtype_of(object_format),
        0,
        layers=(0, 0),
        kv_heads=(0, 0),
        head_dim=0,
        layout=f"{OPAQUE}/{object_format.layout}" if object_format.layout else OPAQUE,
        salt=family.salt.encode(errors="surrogateescape"),
        part=family.group,
        extra=extra,
        chained=False,
        page_bytes=object_format.nbytes,
    )


def parse_scope(described: Mapping[str, Any], namespace: str) -> tuple[Family, ObjectFormat] | None:
    """Returns family and format from `Scope.describe()`, or None for a scope of another engine or
    namespace.
    """
    extra = described["extra"]
    if extra.get("engine") != ENGINE or extra.get("namespace", "") != namespace:
        return None
    salt = described["salt"].decode(errors="surrogateescape")
    family = Family(described["model"], described["part"], salt)
    layout = described["layout"].removeprefix(OPAQUE).removeprefix("/")
    return family, ObjectFormat(described["page_bytes"], layout)
