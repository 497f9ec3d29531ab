"""Settings that all connectors share; each connector adds its own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ritornello._core import shown_tier
from ritornello.connector.engine_tiers import directories_of

if TYPE_CHECKING:
    from ritornello._core import Gate

# Settings of the store with text values.
WORDS = ("eviction", "codec", "admission")
SIZES = ("capacity", "write_budget")
# `tiers`, and the settings that are permitted only beside it.
OF_TIERS = ("tiers", "prefetch", "gate")
# Settings of every connector, in the order in which an error message lists them.
SHARED = ("path", "capacity", *WORDS, "write_budget", *OF_TIERS)
GATES: tuple["Gate", ...] = ("auto", "always", "never")
# Kinds of tiers on this machine; any other kind is a remote.
LOCAL_TIERS = ("host", "disk")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """`path`: the store's directory, or a list of directories, one per disk, the first of which has
    the metadata. `capacity`: the size of the store ("200GiB"), needed only to create it; half of
    the free space if omitted. The other settings of a store are arguments of `Store.open`, which
    validates them. The process that opens the store first determines the settings in effect.

    `tiers`, instead of `path` and the settings of a store: ("host 8GiB", "disk /nvme/kv 200GiB",
    "s3://bucket/prefix"), as `Cache.open` takes them. `prefetch`: how long a request waits for
    pages of a remote. `gate`: whether found pages are loaded; "auto" loads them if the cache
    expects that to be faster than computing, or cannot compare.
    """

    path: str | Sequence[str] = ""
    capacity: str | int | None = None
    write_budget: str | int | None = None
    eviction: str | None = None
    codec: str | None = None
    admission: str | None = None
    # Excluded from repr: options of a remote's address may be secrets.
    tiers: tuple[str, ...] = field(default=(), repr=False)
    prefetch: str = "timeout"
    gate: "Gate" = "auto"

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories of `path`, or of the disks in `tiers`."""
        if self.tiers:
            return tuple(found for tier in self.tiers for found in directories_of(tier))
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    @property
    def opened_tiers(self) -> tuple[str, ...]:
        """The tiers to pass to `Cache.open`; a connector may change their write policies."""
        return self.tiers

    @property
    def shown_tiers(self) -> tuple[str, ...]:
        """`tiers` without the users, passwords and options of addresses, which may be secrets."""
        return tuple(map(shown_tier, self.tiers))

    @property
    def has_remote(self) -> bool:
        """Whether the last tier is a remote. Puts and lookups of chained pages then need all keys
        before the page, because a remote packs pages into objects by their position in the prompt.
        """
        return bool(self.tiers) and self.tiers[-1].split()[0] not in LOCAL_TIERS

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of `Store.open` besides the capacity."""
        given = {name: getattr(self, name) for name in (*WORDS, "write_budget")}
        return {name: value for name, value in given.items() if value is not None}


def checked(given: Mapping[str, Any], place: str, own: Collection[str] = ()) -> dict[str, Any]:
    """Returns `given` as arguments of the connector's subclass of `StoreSettings`. Raises
    ValueError, with what to write instead, for a setting that is unknown, missing, of the wrong
    type or not permitted beside another setting, and for an unknown gate; opening the store checks
    the other values. `place` names the part of the engine's configuration, `own` the keys that the
    connector checks itself.
    """
    if "tiers" in given:
        return _checked_tiers(given, place, own)
    known = (*SHARED, *own)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"{place}: unknown key {unknown[0]!r}; ritornello knows {', '.join(known)}"
        )
    alone = next((name for name in OF_TIERS if name in given), None)
    if alone:
        raise ValueError(
            f'{place}: "{alone}" is permitted only beside "tiers": leave it out, or replace "path" '
            'by "tiers"'
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
            raise ValueError(
                f'{place}: "{name}" is a text that Store.open accepts, not {given[name]!r}'
            )
    return dict(given)


def _checked_tiers(given: Mapping[str, Any], place: str, own: Collection[str]) -> dict[str, Any]:
    other = next((name for name in given if name not in (*OF_TIERS, *own)), None)
    if other:
        raise ValueError(
            f'{place}: "{other}" is not permitted beside "tiers": each tier names its place and '
            'size itself, for example "disk /nvme/kv 200GiB"'
        )
    tiers, prefetch, gate = (
        given["tiers"],
        given.get("prefetch", "timeout"),
        given.get("gate", "auto"),
    )
    if (
        not isinstance(tiers, list | tuple)
        or not tiers
        or not all(isinstance(tier, str) and tier.split() for tier in tiers)
    ):
        raise ValueError(
            f'{place}: "tiers" is a list like '
            '["host 8GiB", "disk /nvme/kv 200GiB", "s3://bucket/prefix"]'
        )
    if not isinstance(prefetch, str):
        raise ValueError(
            f'{place}: "prefetch" is text: "best_effort", "wait_complete", "timeout", or with two '
            f'times in seconds "timeout(1, 0.25)", not {prefetch!r}'
        )
    if gate not in GATES:
        raise ValueError(f'{place}: "gate" is one of {", ".join(GATES)}, not {gate!r}')
    return {**given, "tiers": tuple(tiers)}
