"""Settings in `adapter_params`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ritornello.connector.settings import StoreSettings, checked

PLACE = "adapter_params"


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
        return cls(**arguments)
