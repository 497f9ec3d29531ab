"""Settings of `RitornelloL2Adapter` and `NativeClient`, in `adapter_params` of LMCache's option
`--l2-adapter`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ritornello.connector.engine_tiers import EngineTiers
from ritornello.connector.settings import StoreSettings, checked

PLACE = "adapter_params"
ENGINE_TIERS = EngineTiers(
    PLACE,
    device=(
        "the engine above LMCache has this tier itself, sized by its own setting (vLLM: "
        "--gpu-memory-utilization, SGLang: --mem-fraction-static)"
    ),
    host="LMCache has this tier itself, sized by --l1-size-gb; begin with the disk",
)


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
        ENGINE_TIERS.check(settings.tiers)
        return settings
