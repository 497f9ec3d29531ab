"""The keys that are stored, a page at a time.

A cursor names a scope, a place among its runs and the keys to leave out there, because the store
lists whole runs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ritornello.lmcache.naming import Family

if TYPE_CHECKING:
    from ritornello._core import Scope


class Listed(NamedTuple):
    """One object."""

    family: Family
    key: bytes
    nbytes: int


def list_objects(
    held: "list[tuple[Family, Scope, int]]",
    keys_of: "Callable[[Scope, int, int], tuple[list[bytes], int]]",
    limit: int,
    cursor: str | None,
) -> tuple[list[Listed], str | None]:
    """At most `limit` objects of `held` (each scope with the number of its objects), and the cursor
    of the next page, None behind the last. ValueError for a cursor that is none, or less than one
    object.
    """
    if limit < 1:
        raise ValueError(f"a page has at least one key, not {limit}")
    start, after, skip = _parse(cursor)
    ids = [scope.id.hex() for _, scope, _ in held]
    if start and start not in ids:
        # The scope was dropped meanwhile, and where it stood nobody knows.
        return [], None
    listed: list[Listed] = []
    for family, scope, objects in held[ids.index(start) if start else 0 :]:
        # Where the list goes on it may be empty by now, and is a place all the same.
        going = objects > 0
        if not going:
            after = skip = 0
        while going:
            room = limit - len(listed)
            if room == 0:
                return listed, f"{scope.id.hex()}:{after}:{skip}"
            keys, behind = keys_of(scope, after, skip + room)
            new = keys[skip : skip + room]
            listed += [Listed(family, key, scope.page_bytes) for key in new]
            if skip + len(new) < len(keys):
                skip += len(new)
            else:
                going, after, skip = behind != 0, behind, 0
    return listed, None


def _parse(cursor: str | None) -> tuple[str, int, int]:
    if not cursor:
        return "", 0, 0
    parts = cursor.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts[1:]):
        raise ValueError(f"{cursor!r} is not a cursor of a list of keys")
    return bytes.fromhex(parts[0]).hex(), int(parts[1]), int(parts[2])
