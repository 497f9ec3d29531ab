"""The choice whether reads go through staging memory. It depends on the disk, and on whether the
memory that the reads fill consists of huge pages.
"""

import os
from pathlib import Path

import pytest

from ritornello.staging_choice import cuts_requests, is_huge, nearest, wants_staging

SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                4096 kB
AnonHugePages:      4096 kB
VmFlags: rd wr mr mw me ac hg
7f0000400000-7f0000800000 rw-s 00000000 00:19 7 /dev/shm/region
Size:               4096 kB
Rss:                4096 kB
AnonHugePages:         0 kB
ShmemPmdMapped:     2048 kB
7f0000800000-7f0000c00000 rw-s 00000000 00:0f 8 /anon_hugepage (deleted)
Rss:                   0 kB
Shared_Hugetlb:     4096 kB
"""
MIB = 1 << 20


@pytest.mark.parametrize(
    ("at", "nbytes", "expected"),
    [
        (0, 4 * MIB, True),
        (4 * MIB, 4 * MIB, False),
        (8 * MIB, 4 * MIB, True),
        (4 * MIB - 1, 2, True),
        (3 * MIB, MIB, True),
        (12 * MIB, MIB, False),
    ],
)
def test_memory_is_huge_if_most_resident_bytes_are_in_huge_pages(
    at: int, nbytes: int, expected: bool
) -> None:
    assert is_huge(SMAPS.splitlines(), 0x7F0000000000 + at, nbytes) is expected


@pytest.mark.parametrize(
    ("segments", "sectors_kb", "boundary", "expected"),
    [(254, 4096, 0, True), (254, 1016, 0, False), (127, 1280, 4095, False)],
)
def test_limits_of_disk_tell_whether_requests_are_cut(
    tmp_path: Path, segments: int, sectors_kb: int, boundary: int, expected: bool
) -> None:
    disk = tmp_path / "devices" / "vda"
    queue = disk / "queue"
    queue.mkdir(parents=True)
    (disk / "vda1").mkdir()
    limits = {
        "max_segments": segments,
        "max_sectors_kb": sectors_kb,
        "virt_boundary_mask": boundary,
    }
    for name, value in limits.items():
        (queue / name).write_text(f"{value}\n")
    (tmp_path / "8:0").symlink_to(disk)
    (tmp_path / "8:1").symlink_to(disk / "vda1")
    for minor in (0, 1):
        assert cuts_requests(os.makedev(8, minor), tmp_path) is expected
    with pytest.raises(OSError, match="queue"):
        cuts_requests(os.makedev(9, 9), tmp_path)


def test_unknown_disk_is_read_directly(tmp_path: Path) -> None:
    assert nearest(tmp_path / "not" / "there") == tmp_path
    assert not wants_staging(["/proc", "/sys"], 0, 1)
