"""Memory that a disk reaches slowly: small pages, where a request may name few pieces of memory.

Direct I/O names the physical pieces of its memory, and in pages of 4 KiB each page is one. A
virtual disk that takes 254 of them moves 1 MiB a request, and fills huge pages twice as fast:
there a copy out of the store's own staging memory, which lies in huge pages, is the faster way and
costs no more processor time. Writes gain nothing. Disks that are told every 4 KiB anyway (NVMe)
are reached in place.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = 4096
SYSFS = Path("/sys/dev/block")
MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
# Kilobytes of a mapping that lie in huge pages, by kind.
HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Private_Hugetlb", "Shared_Hugetlb")


def wants_staging(folder: str | os.PathLike[str], address: int, nbytes: int) -> bool:
    """Whether reads from files in `folder`, which need not be there yet, come to this memory faster
    through staging. No, where it cannot be found out.
    """
    try:
        if not cuts_requests(nearest(Path(folder)).stat().st_dev):
            return False
        with Path("/proc/self/smaps").open() as mappings:
            return not is_huge(mappings, address, nbytes)
    except (OSError, ValueError):
        return False


def nearest(folder: Path) -> Path:
    """The folder, or the one that is there in which it would be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return place


def cuts_requests(device: int, sysfs: Path = SYSFS) -> bool:
    """Whether requests to the disk of a device number are cut for the number of their pieces, and
    not for their length.
    """
    node = (sysfs / f"{os.major(device)}:{os.minor(device)}").resolve()
    # A partition's queue is that of its disk.
    queue = (node if (node / "queue").is_dir() else node.parent) / "queue"

    def limit(name: str) -> int:
        return int((queue / name).read_text())

    pieces = limit("max_segments") * PAGE
    return limit("virt_boundary_mask") == 0 and pieces < limit("max_sectors_kb") << 10


def is_huge(mappings: Iterable[str], address: int, nbytes: int) -> bool:
    """Whether most of what is resident of this memory lies in huge pages, by `smaps`."""
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
