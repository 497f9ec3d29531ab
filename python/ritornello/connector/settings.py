"""Store settings that all connectors share; each connector adds its own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Settings of the store with text values.
WORDS = ("eviction", "codec", "admission")
SIZES = ("capacity", "write_budget")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """`path`: the store's directory, or a list of directories, one per disk, the first of which has
    the metadata. `capacity`: the size of the store ("200GiB"), needed only to create it; half of
    the free space if omitted. The other settings are arguments of `Store.open`, which validates
    them. The process that opens the store first determines the settings in effect.
    """

    path: str | Sequence[str]
    capacity: str | int | None = None
    write_budget: str | int | None = None
    eviction: str | None = None
    codec: str | None = None
    admission: str | None = None

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories of `path`."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of `Store.open` besides the capacity."""
        given = {name: getattr(self, name) for name in (*WORDS, "write_budget")}
        return {name: value for name, value in given.items() if value is not None}


def check(given: Mapping[str, Any], place: str, own: Collection[str] = ()) -> None:
    """Raises ValueError, with what to write instead, for an invalid setting. `place` names the part
    of the engine's configuration, `own` the keys that the connector checks itself.
    """
    known = ("path", *SIZES, *WORDS, *own)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"{place}: unknown key {unknown[0]!r}; ritornello knows {', '.join(known)}"
        )
    path = given.get("path")
    if not isinstance(path, str | list | tuple) or path == "":
        raise ValueError(
            f'{place} needs "path", the directory of the store, for example '
            '{"path": "/nvme/kv", "capacity": "200GiB"}'
        )
    if not path or not all(isinstance(directory, str) and directory for directory in path):
        raise ValueError(
            f'{place}: "path" is a directory, or a list of directories, one per disk, for example '
            f'["/nvme0/kv", "/nvme1/kv"], not {path!r}'
        )
    for name in SIZES:
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise ValueError(
                f'{place}: "{name}" is text like "200GiB" (a capacity) or "2TB/day" (a budget), '
                f"or a number of bytes, not {value!r}"
            )
    for name in WORDS:
        if not isinstance(given.get(name), str | None):
            raise ValueError(f'{place}: "{name}" is a word of Store.open, not {given[name]!r}')
