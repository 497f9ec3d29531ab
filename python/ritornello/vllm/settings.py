"""What a user may set: for the engine (`kv_connector_extra_config`) and for one request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_LOAD = "ritornello.no_load"
NO_STORE = "ritornello.no_store"
RETAIN = "ritornello.retain"
YEAR = 366 * 86400.0
# Settings of the store that are one word.
WORDS = ("eviction", "codec", "admission")
KEYS = ("path", "capacity", "read_only", *WORDS, "write_budget")


@dataclass(frozen=True, slots=True)
class Settings:
    """`path`: the store's directory. `capacity`: its size ("200GiB"), needed only when it is
    created; half of the free space where omitted. `read_only`: load pages, never save any.
    `eviction`, `codec`, `admission` and `write_budget` are those of `Store.open`, which checks
    them; whichever process opens the store first decides.
    """

    path: str
    capacity: str | int | None = None
    read_only: bool = False
    eviction: str | None = None
    codec: str | None = None
    admission: str | None = None
    write_budget: str | int | None = None

    def options(self) -> dict[str, Any]:
        """What is said to `Store.open` besides path and capacity."""
        said = {name: getattr(self, name) for name in (*WORDS, "write_budget")}
        return {name: value for name, value in said.items() if value is not None}

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """From the extra configuration of the connector; ValueError says what to write instead."""
        unknown = sorted(set(extra) - set(KEYS))
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: unknown key {unknown[0]!r}; "
                f"ritornello knows {', '.join(KEYS)}"
            )
        path = extra.get("path")
        if not isinstance(path, str) or not path:
            raise ValueError(
                'kv_connector_extra_config needs "path", the directory of the store, '
                'for example {"path": "/nvme/kv", "capacity": "200GiB"}'
            )
        capacity = extra.get("capacity")
        if isinstance(capacity, bool) or not isinstance(capacity, str | int | None):
            raise ValueError(
                'kv_connector_extra_config: "capacity" is a size like "200GiB" or a number '
                f"of bytes, not {capacity!r}"
            )
        read_only = extra.get("read_only", False)
        if not isinstance(read_only, bool):
            raise ValueError(
                f'kv_connector_extra_config: "read_only" is true or false, not {read_only!r}'
            )
        words = {name: extra.get(name) for name in WORDS}
        for name, word in words.items():
            if not isinstance(word, str | None):
                raise ValueError(
                    f'kv_connector_extra_config: "{name}" is a word of Store.open, not {word!r}'
                )
        budget = extra.get("write_budget")
        if isinstance(budget, bool) or not isinstance(budget, str | int | None):
            raise ValueError(
                'kv_connector_extra_config: "write_budget" is a size and a span like "2TB/day" or '
                f"a number of bytes a day, not {budget!r}"
            )
        return cls(path, capacity, read_only, **words, write_budget=budget)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request may do, from its `kv_transfer_params`:
    `{"ritornello.no_load": true}` computes the whole prompt, `{"ritornello.no_store": true}`
    leaves nothing behind, `{"ritornello.retain": 3600}` keeps the pages of the request, and those
    before them, from being evicted for an hour. What is not understood is ignored: a wish
    must not fail a request.
    """

    loads: bool = True
    stores: bool = True
    retain: float = 0.0

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> "Wishes":
        if not params:
            return EVERYTHING
        return cls(
            loads=params.get(NO_LOAD) is not True,
            stores=params.get(NO_STORE) is not True,
            retain=_seconds(params.get(RETAIN)),
        )


def _seconds(wish: Any) -> float:
    if isinstance(wish, bool) or not isinstance(wish, int | float) or not wish > 0:
        return 0.0
    return float(min(wish, YEAR))


EVERYTHING = Wishes()
