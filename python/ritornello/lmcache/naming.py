"""How LMCache's objects are named in the store.

LMCache names an object by model, KV rank, object group, chunk hash and salt. Two objects of one
name may still differ in what they are: the chunk size, the dtype or the layout changed. So a
scope is a `Family` (model, group, salt) in one `ObjectFormat` (bytes, dtypes, shapes), and an object of
another form is never read into memory that expects this one. The key holds the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ritornello._core import Scope

ENGINE = "lmcache"
# The core's name for layouts that need no shape; behind a slash, which one it is.
OPAQUE = "opaque"
RANK_BYTES = 8
HASH_BYTES_MAX = 64 - RANK_BYTES
# Bytes of a hash that resists collisions (sha256, blake3). LMCache does not say which hash it uses;
# of the weak ones it knows, builtin has 8 bytes and xxhash 16.
STRONG_HASH_BYTES = 32
# Of an engine's workers there are fewer.
RANKS_KNOWN = 4096
# In a key of the native door, which is one string.
SEPARATOR = "@"


class Family(NamedTuple):
    """Objects that one lookup may ask for together."""

    model: str
    group: int
    salt: str


class ObjectFormat(NamedTuple):
    """`layout` says dtypes, shapes and format; "" where LMCache shows bytes only."""

    nbytes: int
    layout: str = ""


class ObjectName(NamedTuple):
    """An object: its family, and its key there."""

    family: Family
    key: bytes


class Group(NamedTuple):
    """Objects of one family: where each stood in what was asked, and its key."""

    family: Family
    places: Sequence[int]
    keys: list[bytes]


def page_key(kv_rank: int, chunk_hash: bytes) -> bytes:
    """ValueError for what no key can hold."""
    if kv_rank >> (8 * RANK_BYTES) or not 0 < len(chunk_hash) <= HASH_BYTES_MAX:
        raise ValueError(f"rank {kv_rank:#x} or a hash of {len(chunk_hash)} bytes is too long")
    return kv_rank.to_bytes(RANK_BYTES) + chunk_hash


class Prefixes(dict[int, bytes]):
    """What keys of a KV rank begin with, made once for each of the ranks in use. OverflowError for
    what is no rank.
    """

    def __missing__(self, kv_rank: int) -> bytes:
        prefix = kv_rank.to_bytes(RANK_BYTES)
        if len(self) >= RANKS_KNOWN:
            self.clear()
        self[kv_rank] = prefix
        return prefix


PREFIXES = Prefixes()


def group_objects(objects: Sequence[Any]) -> list[Group]:
    """LMCache's object keys by family. Those that no key can hold are left out.

    A lookup is a few microseconds in the store, so what is done for each of its keys here counts:
    the usual case is one family.
    """
    if not objects:
        return []
    first, prefixes = objects[0], PREFIXES
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
    """None stands for what has no name."""
    groups: dict[Family, tuple[list[int], list[bytes]]] = {}
    for at, name in enumerate(names):
        if name is not None:
            places, keys = groups.setdefault(name.family, ([], []))
            places.append(at)
            keys.append(name.key)
    return [Group(family, places, keys) for family, (places, keys) in groups.items()]


def split_key(key: bytes) -> tuple[int, bytes]:
    """KV rank and chunk hash."""
    return int.from_bytes(key[:RANK_BYTES]), key[RANK_BYTES:]


def parse_name(text: str) -> ObjectName:
    """From `model@kv_rank@group@chunk_hash[@salt]`, numbers and hash in hexadecimal digits, as
    LMCache's native bridge writes it. ValueError for anything else.
    """
    model, rank, group, digest, *salt = text.split(SEPARATOR)
    if len(salt) > 1:
        raise ValueError(f"{text!r} is not an object key of LMCache")
    family = Family(model, int(group, 16), salt[0] if salt else "")
    return ObjectName(family, page_key(int(rank, 16), bytes.fromhex(digest)))


def dtype_of(form: ObjectFormat) -> str:
    """The dtype that all of an object has, which lossless codecs want to know; "" for none."""
    layout = form.layout.partition("@")[0]
    dtypes = {tensor.partition("[")[0] for tensor in layout.split("+")}
    return dtypes.pop() if len(dtypes) == 1 else ""


def scope_of(family: Family, form: ObjectFormat, namespace: str) -> "Scope":
    from ritornello._core import Scope

    extra = {"engine": ENGINE}
    if namespace:
        extra["namespace"] = namespace
    return Scope(
        family.model,
        dtype_of(form),
        0,
        layers=(0, 0),
        kv_heads=(0, 0),
        head_dim=0,
        layout=f"{OPAQUE}/{form.layout}" if form.layout else OPAQUE,
        salt=family.salt.encode(errors="surrogateescape"),
        part=family.group,
        extra=extra,
        chained=False,
        page_bytes=form.nbytes,
    )


def parse_scope(described: Mapping[str, Any], namespace: str) -> tuple[Family, ObjectFormat] | None:
    """What `Scope.describe()` says, if it is a scope of ours in that namespace."""
    extra = described["extra"]
    if extra.get("engine") != ENGINE or extra.get("namespace", "") != namespace:
        return None
    salt = described["salt"].decode(errors="surrogateescape")
    family = Family(described["model"], described["part"], salt)
    layout = described["layout"].removeprefix(OPAQUE).removeprefix("/")
    return family, ObjectFormat(described["page_bytes"], layout)
