"""Settings in `adapter_params`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ritornello.connector.settings import StoreSettings, checked

PLACE = "adapter_params"
# Kinds of tiers that are LMCache's own, and the setting of LMCache that gives their size.
OF_LMCACHE = {
    "host": "--l1-size-gb",
    "device": "the engine's own setting (vLLM: --gpu-memory-utilization)",
    "gpu": "the engine's own setting (vLLM: --gpu-memory-utilization)",
}


@dataclass(frozen=True, slots=True)
class Settings(StoreSettings):
    """`namespace`: separates objects that LMCache's keys do not distinguish, such as objects of a
    different revision of the weights.
    """

    namespace: str = ""

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> "Settings":
        """Parses `adapter_params`. ValueError says what to write instead."""
        arguments = checked(params, PLACE, ("namespace",))
        if not isinstance(params.get("namespace", ""), str):
            raise ValueError(f'{PLACE}: "namespace" is text, not {params["namespace"]!r}')
        settings = cls(**arguments)
        settings._check_tiers()
        return settings

    def _check_tiers(self) -> None:
        for tier in self.tiers:
            kind = tier.split()[0]
            if kind in OF_LMCACHE:
                raise ValueError(
                    f'{PLACE}: "tiers": {tier!r}: LMCache has this tier itself, sized by '
                    f'{OF_LMCACHE[kind]}; begin with the disk, as "disk /nvme/kv 200GiB"'
                )
        if self.tiers and self.tiers[0].split()[0] != "disk":
            raise ValueError(
                f'{PLACE}: "tiers" begins with the disk, as "disk /nvme/kv 200GiB": pages of a '
                "remote are loaded from there"
            )
