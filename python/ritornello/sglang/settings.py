"""Settings of the storage, in SGLang's option `--hicache-storage-backend-extra-config`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ritornello.connector.engine_tiers import EngineTiers, never_written
from ritornello.connector.settings import StoreSettings, checked

FLAG = "--hicache-storage-backend-extra-config"
# SGLang's own keys in the same JSON object. SGLang adds `file_storage_path` for every storage if
# the server has the option --file-storage-path.
ENGINE = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
)
ENGINE_TIERS = EngineTiers(
    FLAG,
    device="SGLang has this tier itself, sized by --mem-fraction-static",
    host=(
        "SGLang has this tier itself, sized by --hicache-size (GB) or --hicache-ratio; begin with "
        "the disk"
    ),
)


class Settings(StoreSettings):
    """The settings of SGLang's storage: those of `StoreSettings`, and no others."""

    __slots__ = ()

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> "Settings":
        """Parses SGLang's extra configuration. ValueError says what to write instead."""
        given = {name: value for name, value in (extra or {}).items() if name not in ENGINE}
        settings = cls(**checked(given, FLAG))
        ENGINE_TIERS.check(settings.tiers)
        return settings

    def without_write_through(self) -> "Settings":
        """Returns settings with which no page is written to the remote when it is put. They are for
        an SGLang that puts pages without the keys before them. A remote takes no such page of the
        main pool, and a page of a side pool is useless without the main pool's pages. A remote with
        `write=selective` keeps its policy: it takes pages by their hits, and lookups name all keys.
        """
        if not self.has_remote:
            return self
        *above, remote = self.tiers
        if any(word.startswith("write=selective") for word in remote.split()):
            return self
        return replace(self, tiers=(*above, never_written(remote)))
