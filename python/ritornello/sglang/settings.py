"""What a user may set, in `--hicache-storage-backend-extra-config`."""

from collections.abc import Mapping
from typing import Any

from ritornello.settings import StoreSettings, check

FLAG = "--hicache-storage-backend-extra-config"
# Keys of the same JSON object that are SGLang's own and still in it when it comes here.
ENGINE = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})


class Settings(StoreSettings):
    """Those of the store."""

    __slots__ = ()

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> "Settings":
        """From SGLang's extra configuration; ValueError says what to write instead."""
        said = {name: value for name, value in (extra or {}).items() if name not in ENGINE}
        check(said, FLAG)
        return cls(**said)
