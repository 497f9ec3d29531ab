"""What a user may set: for the engine (`kv_connector_extra_config`) and for one request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_LOAD = "ritornello.no_load"
NO_STORE = "ritornello.no_store"


@dataclass(frozen=True, slots=True)
class Settings:
    """`path`: the store's directory. `capacity`: its size ("200GiB"), needed only when it is
    created; half of the free space where omitted. `read_only`: load pages, never save any.
    """

    path: str
    capacity: str | int | None = None
    read_only: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """From the extra configuration of the connector; ValueError says what to write instead."""
        unknown = sorted(set(extra) - {"path", "capacity", "read_only"})
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: unknown key {unknown[0]!r}; "
                "ritornello knows path, capacity and read_only"
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
        return cls(path, capacity, read_only)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request may do, from its `kv_transfer_params`:
    `{"ritornello.no_load": true}` computes the whole prompt, `{"ritornello.no_store": true}`
    leaves nothing behind.
    """

    loads: bool = True
    stores: bool = True

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> "Wishes":
        if not params:
            return EVERYTHING
        return cls(loads=params.get(NO_LOAD) is not True, stores=params.get(NO_STORE) is not True)


EVERYTHING = Wishes()
