"""Opens a connector's store as the user's configuration describes it."""

import shutil
from collections.abc import Iterable
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ritornello.connector.settings import StoreSettings
from ritornello.staging_choice import nearest

if TYPE_CHECKING:
    from ritornello._core import Store

MIB = 1 << 20
# Part of the core's error for a directory without a store, when no capacity was given.
NO_STORE = "there is no store here yet"


def open_store(settings: StoreSettings, logger: Logger) -> "Store":
    """Opens or creates the store. Without a capacity, a new store gets half of the free space.
    If the settings name tiers, opens a `Cache` instead; its type is `Store` for the type checker
    only.
    """
    from ritornello._core import Cache, InvalidError, Store

    if settings.tiers:
        return cast("Store", Cache.open(settings.opened_tiers, prefetch=settings.prefetch))
    options = settings.options()
    if settings.capacity is not None:
        return Store.open(settings.path, settings.capacity, **options)
    try:
        return Store.open(settings.path, **options)
    except InvalidError as error:
        if NO_STORE not in str(error):
            raise
        capacity = free_bytes(settings.directories) // 2 // MIB * MIB
        store = Store.open(settings.path, capacity, **options)
        logger.warning(
            "ritornello: created the store in %s with half of the free space, %d MiB: set "
            '"capacity" to choose another size',
            ", ".join(settings.directories),
            capacity // MIB,
        )
        return store


def free_bytes(directories: Iterable[str]) -> int:
    """Returns the free space of the file systems of these directories, which may not exist yet."""
    places = map(nearest, map(Path, directories))
    file_systems = {place.stat().st_dev: place for place in places}
    return sum(shutil.disk_usage(place).free for place in file_systems.values())
