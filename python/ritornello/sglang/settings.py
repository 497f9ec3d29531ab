"""Settings in `--hicache-storage-backend-extra-config`."""

from collections.abc import Mapping
from typing import Any

from ritornello.connector.settings import StoreSettings, checked

FLAG = "--hicache-storage-backend-extra-config"
# SGLang's own keys in the same JSON object.
ENGINE = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
# Tiers above the storage, which SGLang fills.
ENGINE_TIERS = frozenset({"device", "host"})


class Settings(StoreSettings):
    """The store's settings."""

    __slots__ = ()

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> "Settings":
        """Parses SGLang's extra configuration. ValueError says what to write instead."""
        given = {name: value for name, value in (extra or {}).items() if name not in ENGINE}
        settings = cls(**checked(given, FLAG))
        for tier in settings.tiers:
            if tier.split()[0] in ENGINE_TIERS:
                raise ValueError(
                    f'{FLAG}: "tiers" begins with the disk, {tier!r} is a tier of SGLang itself: '
                    "say --hicache-size (GB) or --hicache-ratio for host memory"
                )
        return settings
