"""What a user says of a store, whatever the engine; each connector adds what is its own."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

# Settings of the store that are one word.
WORDS = ("eviction", "codec", "admission")
SIZES = ("capacity", "write_budget")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """`path`: the store's directory. `capacity`: its size ("200GiB"), needed only when it is
    created; half of the free space where omitted. The others are those of `Store.open`, which
    checks them; whichever process opens the store first decides.
    """

    path: str
    capacity: str | int | None = None
    write_budget: str | int | None = None
    eviction: str | None = None
    codec: str | None = None
    admission: str | None = None

    def options(self) -> dict[str, Any]:
        """What is said to `Store.open` besides path and capacity."""
        said = {name: getattr(self, name) for name in (*WORDS, "write_budget")}
        return {name: value for name, value in said.items() if value is not None}


def check(said: Mapping[str, Any], place: str, own: Collection[str] = ()) -> None:
    """ValueError says what to write instead, in that `place` of the engine's configuration. `own`:
    the connector's keys, which it checks itself.
    """
    known = ("path", *SIZES, *WORDS, *own)
    unknown = sorted(set(said) - set(known))
    if unknown:
        raise ValueError(
            f"{place}: unknown key {unknown[0]!r}; ritornello knows {', '.join(known)}"
        )
    path = said.get("path")
    if not isinstance(path, str) or not path:
        raise ValueError(
            f'{place} needs "path", the directory of the store, for example '
            '{"path": "/nvme/kv", "capacity": "200GiB"}'
        )
    for name in SIZES:
        value = said.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise ValueError(
                f'{place}: "{name}" is text like "200GiB" (a capacity) or "2TB/day" (a budget), '
                f"or a number of bytes, not {value!r}"
            )
    for name in WORDS:
        if not isinstance(said.get(name), str | None):
            raise ValueError(f'{place}: "{name}" is a word of Store.open, not {said[name]!r}')
