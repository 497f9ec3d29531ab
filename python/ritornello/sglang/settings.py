"""Settings in `--hicache-storage-backend-extra-config`."""

from collections.abc import Mapping
from typing import Any

from ritornello.connector.settings import StoreSettings, checked

FLAG = "--hicache-storage-backend-extra-config"
# SGLang's own keys in the same JSON object.
ENGINE = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})


class Settings(StoreSettings):
    """The store's settings."""

    __slots__ = ()

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> "Settings":
        """Parses SGLang's extra configuration. ValueError says what to write instead."""
        given = {name: value for name, value in (extra or {}).items() if name not in ENGINE}
        return cls(**checked(given, FLAG))
