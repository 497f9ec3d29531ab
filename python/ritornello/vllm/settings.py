"""Settings of the connector (`kv_connector_extra_config`) and options of one request."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.meter import Meter
from ritornello.connector.settings import StoreSettings, check

if TYPE_CHECKING:
    from ritornello._core import Gate

NO_LOAD = "ritornello.no_load"
NO_STORE = "ritornello.no_store"
RETAIN = "ritornello.retain"
YEAR = 366 * 86400.0
PLACE = "kv_connector_extra_config"
GATES: tuple["Gate", ...] = ("auto", "always", "never")
# Settings that require `tiers`, and all settings of the connector.
OF_TIERS = ("tiers", "prefetch", "gate")
OWN = ("read_only", *OF_TIERS)


@dataclass(frozen=True, slots=True)
class Settings(StoreSettings):
    """`read_only`: load pages, never save any.

    `tiers`, instead of `path` and the settings of a store: ("host 8GiB", "disk /nvme/kv 200GiB",
    "s3://bucket/prefix"), as `Cache.open` takes them. `prefetch`: how long a request waits for
    pages of a remote. `gate`: whether found pages are loaded; "auto" loads them if that is faster
    than computing.
    """

    read_only: bool = False
    # Excluded from repr: options of a remote's address may be secrets.
    tiers: tuple[str, ...] = field(default=(), repr=False)
    prefetch: str = "timeout"
    gate: "Gate" = "auto"

    @property
    def has_remote(self) -> bool:
        """Whether the last tier is a remote, which names a page by all keys before it."""
        return bool(self.tiers) and self.tiers[-1].split()[0] not in ("host", "disk")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """Parses the connector's extra configuration. ValueError says what to write instead."""
        read_only = extra.get("read_only", False)
        if not isinstance(read_only, bool):
            raise ValueError(f'{PLACE}: "read_only" is true or false, not {read_only!r}')
        if "tiers" in extra:
            return cls._of_tiers(extra, read_only)
        check(extra, PLACE, OWN)
        alone = next((name for name in OF_TIERS if name in extra), None)
        if alone:
            raise ValueError(f'{PLACE}: "{alone}" goes with "tiers"')
        return cls(**extra)

    @classmethod
    def _of_tiers(cls, extra: Mapping[str, Any], read_only: bool) -> "Settings":
        other = next((name for name in extra if name not in OWN), None)
        if other:
            raise ValueError(
                f'{PLACE}: "{other}" does not go with "tiers": each tier names its place and size '
                'itself, for example "disk /nvme/kv 200GiB"'
            )
        tiers, prefetch = extra["tiers"], extra.get("prefetch", "timeout")
        if (
            not isinstance(tiers, list | tuple)
            or not tiers
            or not all(isinstance(tier, str) and tier.split() for tier in tiers)
        ):
            raise ValueError(
                f'{PLACE}: "tiers" is a list like '
                '["host 8GiB", "disk /nvme/kv 200GiB", "s3://bucket/prefix"]'
            )
        if not isinstance(prefetch, str):
            raise ValueError(
                f'{PLACE}: "prefetch" is "best_effort", "wait_complete" or "timeout", '
                f"not {prefetch!r}"
            )
        gate_setting = extra.get("gate", "auto")
        gate = next((known for known in GATES if known == gate_setting), None)
        if gate is None:
            raise ValueError(f'{PLACE}: "gate" is one of {", ".join(GATES)}, not {gate_setting!r}')
        return cls("", read_only=read_only, tiers=tuple(tiers), prefetch=prefetch, gate=gate)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of one request, from its `kv_transfer_params`: `{"ritornello.no_load": true}`
    computes the whole prompt, `{"ritornello.no_store": true}` saves nothing, `{"ritornello.retain":
    3600}` protects the request's pages, and the pages before them, from eviction for an hour if the
    store's policy permits it. Invalid values are ignored: an option must not fail a request.
    """

    loads: bool = True
    stores: bool = True
    retain: float = 0.0

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> "RequestOptions":
        if not params:
            return DEFAULT_OPTIONS
        return cls(
            loads=params.get(NO_LOAD) is not True,
            stores=params.get(NO_STORE) is not True,
            retain=_seconds(params.get(RETAIN)),
        )

    def permitted(self, store: FailSafeStore, meter: Meter) -> "RequestOptions":
        """Returns the options that the store's policy permits, and counts ignored options."""
        if not self.retain or store.permits_retention():
            return self
        meter.add("ignored_retentions")
        return replace(self, retain=0.0)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return 0.0
    return float(min(value, YEAR))


DEFAULT_OPTIONS = RequestOptions()
