"""Settings of our secondary tier of vLLM's offloading, besides `type` and `module_path`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ritornello.connector.engine_tiers import EngineTiers
from ritornello.vllm.settings import GPU_MEMORY, PLACE, Settings

LOCALITIES = ("LOCAL", "REMOTE")
ENGINE_TIERS = EngineTiers(
    PLACE,
    device=GPU_MEMORY,
    host=(
        'vLLM\'s own host memory is the host tier: its size is "cpu_bytes_to_use", next to '
        '"secondary_tiers"'
    ),
)


@dataclass(frozen=True, slots=True)
class TierSettings:
    """`store`: the settings that tier and connector share; its `tiers` are one disk, and at most
    one remote below it, because vLLM's host memory is the host tier. `enable_kv_events`: vLLM's
    event publisher is told which chunks were stored, and which a load found missing or damaged.
    `locality`: where the store is, as seen from vLLM, for these events and for requests that choose
    tiers; None if it is not declared.
    """

    store: Settings
    enable_kv_events: bool = False
    locality: str | None = None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "TierSettings":
        """Parses the tier's configuration. ValueError says what to write instead."""
        rest = dict(config)
        events = rest.pop("enable_kv_events", False)
        if not isinstance(events, bool):
            raise ValueError(f'"enable_kv_events" is true or false, not {events!r}')
        locality = rest.pop("locality", None)
        if locality is not None and locality not in LOCALITIES:
            raise ValueError(f'"locality" is one of {", ".join(LOCALITIES)}, not {locality!r}')
        store = Settings.parse(rest)
        ENGINE_TIERS.check(store.tiers)
        return cls(store, events, locality)
