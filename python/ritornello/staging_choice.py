"""Decides whether reads go through the store's staging memory.

A direct I/O request lists the physically contiguous pieces of its target memory; in memory of 4 KiB
pages, usually each page is one piece. A virtual disk that accepts 254 pieces per request moves
about 1 MiB per request into such memory, and about twice the bytes per second into huge pages. On
such a disk, a read into the store's staging memory, which consists of huge pages, followed by a
copy to the target is faster and costs no more processor time. Writes gain nothing. NVMe disks,
whose requests list every 4 KiB in any case, read into the target memory directly.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = 4096
SYSFS = Path("/sys/dev/block")
MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
# Fields of `smaps` that count kilobytes in huge pages, one for each kind of mapping.
HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Private_Hugetlb", "Shared_Hugetlb")


def wants_staging(folders: Iterable[str], address: int, nbytes: int) -> bool:
    """Returns whether reads from files in any of `folders` into the `nbytes` at `address` are
    faster through staging; False if that cannot be determined. A folder may be missing.
    """
    if not any(map(_is_on_cutting_disk, folders)):
        return False
    try:
        with Path("/proc/self/smaps").open() as mappings:
            return not is_huge(mappings, address, nbytes)
    except (OSError, ValueError):
        return False


def _is_on_cutting_disk(folder: str) -> bool:
    try:
        return cuts_requests(nearest(Path(folder)).stat().st_dev)
    except (OSError, ValueError):
        return False


def nearest(folder: Path) -> Path:
    """Returns the folder; if it is missing, its nearest ancestor that exists."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return place


def cuts_requests(device: int, sysfs: Path = SYSFS) -> bool:
    """Returns whether a request into 4 KiB pages reaches the disk's limit on pieces before its
    limit on bytes. False for NVMe disks, which have a boundary mask: their requests list every
    4 KiB in any case. `device`: the disk's device number.
    """
    node = (sysfs / f"{os.major(device)}:{os.minor(device)}").resolve()
    # A partition has the queue of its disk.
    queue = (node if (node / "queue").is_dir() else node.parent) / "queue"

    def limit(name: str) -> int:
        return int((queue / name).read_text())

    pieces = limit("max_segments") * PAGE
    return limit("virt_boundary_mask") == 0 and pieces < limit("max_sectors_kb") << 10


def is_huge(mappings: Iterable[str], address: int, nbytes: int) -> bool:
    """Returns whether more than half of the resident memory is in huge pages, over the mappings
    that overlap the `nbytes` at `address`. `mappings`: the lines of `smaps`.
    """
    resident = huge = 0
    inside = False
    for line in mappings:
        found = MAPPING.match(line)
        if found is not None:
            start, end = (int(number, 16) for number in found.groups())
            inside = start < address + nbytes and address < end
        elif inside:
            name, _, value = line.partition(":")
            if name == "Rss":
                resident += int(value.split()[0])
            elif name in HUGE:
                huge += int(value.split()[0])
    return 2 * huge > resident
