"""Lists the stored keys, a page of the list at a time.

The store lists all keys of a run (pages stored together) in one call. A cursor therefore names a
scope, the last run of the scope of which all keys were listed, and how many keys of later runs were
listed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ritornello.lmcache.naming import Family

if TYPE_CHECKING:
    from ritornello._core import Scope


def list_objects(
    stored: "list[tuple[Family, Scope, int]]",
    keys_of: "Callable[[Scope, int, int], tuple[list[bytes], int]]",
    limit: int,
    cursor: str | None,
) -> tuple[list[tuple[Family, bytes, int]], str | None]:
    """Returns the family (model, object group and salt), the key and the length in bytes of at most
    `limit` objects, and the cursor of the next page of the list, None after its last page. If the
    scope of `cursor` was dropped since the previous call, the list begins again, because later
    scopes would be left out otherwise; objects may then be listed twice. `stored`: families, their
    scopes, and the number of objects in each scope. ValueError for an invalid cursor or a limit
    below 1.
    """
    if limit < 1:
        raise ValueError(f"the page size is {limit}: use at least 1 key per page")
    start, after, skip = _parse(cursor)
    ids = [scope.id.hex() for _, scope, _ in stored]
    if start not in ids:
        start, after, skip = "", 0, 0
    listed: list[tuple[Family, bytes, int]] = []
    for family, scope, objects in stored[ids.index(start) if start else 0 :]:
        # The scope of the cursor may have become empty, and is still a valid position.
        has_more = objects > 0
        if not has_more:
            after = skip = 0
        while has_more:
            room = limit - len(listed)
            if room == 0:
                return listed, f"{scope.id.hex()}:{after}:{skip}"
            keys, next_after = keys_of(scope, after, skip + room)
            new = keys[skip : skip + room]
            listed += [(family, key, scope.page_bytes) for key in new]
            if skip + len(new) < len(keys):
                skip += len(new)
            else:
                has_more, after, skip = next_after != 0, next_after, 0
    return listed, None


def _parse(cursor: str | None) -> tuple[str, int, int]:
    if not cursor:
        return "", 0, 0
    parts = cursor.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts[1:]):
        raise ValueError(
            f"{cursor!r} is not a cursor of a list of keys: pass the token that the previous page "
            "returned"
        )
    return bytes.fromhex(parts[0]).hex(), int(parts[1]), int(parts[2])
