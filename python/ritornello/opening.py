"""How every connector opens its store, from what a user said in the engine's own configuration."""

import shutil
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING

from ritornello.memory import nearest
from ritornello.settings import StoreSettings

if TYPE_CHECKING:
    from ritornello._core import Store

MIB = 1 << 20
# The policy file of a store.
POLICY = "policy.toml"


def open_store(settings: StoreSettings, logger: Logger) -> "Store":
    """Without a capacity, a store that is not there yet gets half of the free space."""
    from ritornello._core import InvalidError, Store

    path, options = Path(settings.path), settings.options()
    if settings.capacity is not None:
        return Store.open(settings.path, settings.capacity, **options)
    try:
        return Store.open(settings.path, **options)
    except InvalidError:
        # A policy may be written before there is a store.
        if path.is_dir() and any(entry.name != POLICY for entry in path.iterdir()):
            raise
        capacity = default_capacity(path)
        logger.warning(
            'ritornello: creating %s with half of the free space, %d MiB; say "capacity" to choose',
            settings.path,
            capacity // MIB,
        )
        return Store.open(settings.path, capacity, **options)


def open_existing(settings: StoreSettings) -> "Store":
    """Opens the store at the path, and never makes one."""
    from ritornello._core import Store

    return Store.open(settings.path, **settings.options())


def device(settings: StoreSettings) -> int:
    """Number of the device that the store is or would be on."""
    return nearest(Path(settings.path)).stat().st_dev


def default_capacity(path: Path) -> int:
    """Half of the space that is free where `path` is or would be, in whole MiB."""
    return shutil.disk_usage(nearest(path)).free // 2 // MIB * MIB
