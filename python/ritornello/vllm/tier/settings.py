"""Settings of the tier, besides `type` and `module_path`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ritornello.connector.settings import OF_TIERS
from ritornello.vllm.settings import Settings

LOCALITIES = ("LOCAL", "REMOTE")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """`store`: the settings that tier and connector share. `enable_kv_events`: report chunks that
    were stored or lost to vLLM's event publisher. `locality`: where the store is, as seen from
    vLLM, for these events and for requests that choose tiers; None leaves it open.
    """

    store: Settings
    enable_kv_events: bool = False
    locality: str | None = None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "TierSettings":
        """Parses the tier's configuration. ValueError says what to write instead."""
        other = next((name for name in OF_TIERS if name in config), None)
        if other:
            raise ValueError(
                f'"{other}" is a setting of RitornelloConnector: the RitornelloTier in '
                '"secondary_tiers" is one store, at its "path"'
            )
        rest = dict(config)
        events = rest.pop("enable_kv_events", False)
        if not isinstance(events, bool):
            raise ValueError(f'"enable_kv_events" is true or false, not {events!r}')
        locality = rest.pop("locality", None)
        if locality is not None and locality not in LOCALITIES:
            raise ValueError(f'"locality" is one of {", ".join(LOCALITIES)}, not {locality!r}')
        return cls(Settings.parse(rest), events, locality)
