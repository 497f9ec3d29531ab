"""Settings of the connector (`kv_connector_extra_config`) and options of one request."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ritornello.connector.engine_tiers import EngineTiers, never_written
from ritornello.connector.fail_safe import FailSafeStore
from ritornello.connector.meter import Meter
from ritornello.connector.settings import StoreSettings, checked

NO_LOAD = "ritornello.no_load"
NO_STORE = "ritornello.no_store"
RETAIN = "ritornello.retain"
YEAR = 366 * 86400.0
PLACE = "kv_connector_extra_config"
GPU_MEMORY = (
    "vLLM has this tier itself, sized by --gpu-memory-utilization or --kv-cache-memory-bytes"
)
# On CPUs the host tier is Ritornello's.
CPU_TIERS = EngineTiers(
    PLACE, device="vLLM's KV memory on CPUs is sized by VLLM_CPU_KVCACHE_SPACE (GiB)"
)


@dataclass(frozen=True, slots=True)
class Settings(StoreSettings):
    """`read_only`: load pages, never save any."""

    read_only: bool = False

    @property
    def opened_tiers(self) -> tuple[str, ...]:
        """The tiers to open. With `read_only` the remote has the write policy "none", because with
        the policy "selective" lookups alone cause writes to the remote.
        """
        if not (self.read_only and self.has_remote):
            return self.tiers
        *above, remote = self.tiers
        return (*above, never_written(remote))

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """Parses the connector's extra configuration. ValueError says what to write instead."""
        read_only = extra.get("read_only", False)
        if not isinstance(read_only, bool):
            raise ValueError(f'{PLACE}: "read_only" is true or false, not {read_only!r}')
        return cls(**checked(extra, PLACE, ("read_only",)))

    @classmethod
    def parse_on_cpus(cls, extra: Mapping[str, Any]) -> "Settings":
        """Parses the extra configuration of an engine on CPUs, whose host tier is Ritornello's."""
        settings = cls.parse(extra)
        CPU_TIERS.check(settings.tiers)
        return settings


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of one request, from its `kv_transfer_params`: `{"ritornello.no_load": true}` loads
    nothing, `{"ritornello.no_store": true}` saves nothing, `{"ritornello.retain": 3600}` protects
    the request's pages, and the pages before them, from eviction for an hour if the store's policy
    permits it. Invalid values are ignored: an option must not fail a request.
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
