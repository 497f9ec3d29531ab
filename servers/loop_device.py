"""Loop devices with a file system, which can be throttled, or fail beyond an offset. Requires
root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

# The blkio controller of cgroup v1 throttles the direct I/O of chosen processes to a loop device,
# without device-mapper.
BLKIO = Path("/sys/fs/cgroup/blkio")
WRITES, READS = "blkio.throttle.write_bps_device", "blkio.throttle.read_bps_device"
# Fields of `struct loop_info64` up to the flags, and the size of the struct in bytes.
LOOP_HEAD, LOOP_INFO = struct.Struct("=QQQQQIIII"), 232
LOOP_SET_STATUS64, LOOP_GET_STATUS64 = 0x4C04, 0x4C05


class DeviceUnavailableError(Exception):
    """This machine cannot make or throttle loop devices; the message names what is missing."""


def command(*words: str | Path) -> str:
    """Runs a command that must succeed. Returns its output."""
    line = [str(word) for word in words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(line)}: {done.stderr.strip()}"
    return done.stdout.strip()


def check_disks() -> None:
    """Raises `DeviceUnavailableError` if loop devices cannot be made and mounted."""
    if os.geteuid() != 0:
        raise DeviceUnavailableError("loop devices need root")
    if not Path("/dev/loop-control").exists():
        raise DeviceUnavailableError("/dev/loop-control is missing: no loop devices")
    for tool in ("losetup", "mkfs.ext4", "mount", "umount"):
        if shutil.which(tool) is None:
            raise DeviceUnavailableError(f"{tool} is not installed")


def check_throttle() -> None:
    """Raises `DeviceUnavailableError` if I/O to a device cannot be throttled."""
    for limit in (WRITES, READS):
        if not (BLKIO / limit).exists():
            raise DeviceUnavailableError(f"{BLKIO / limit} is missing: no blkio cgroup v1")


class Disk:
    """A file system on a loop device, mounted at `path`. In ext4 the front of the device contains
    all metadata, the journal included.
    """

    def __init__(self, backing: Path, mebibytes: int, file_system: str = "ext4") -> None:
        self.backing = backing
        self.path = backing.with_suffix(".mnt")
        self.path.mkdir()
        self.mounted = False
        self.device: Path | None = None
        with backing.open("wb") as file:
            file.truncate(mebibytes << 20)
        if file_system == "ext4":
            # Lazy initialization is off, so that no kernel thread writes to the device after mkfs.
            options = "packed_meta_blocks=1,lazy_itable_init=0,lazy_journal_init=0,nodiscard"
            command("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", options, backing)
        else:
            make = f"mkfs.{file_system}"
            if shutil.which(make) is None:
                raise DeviceUnavailableError(f"{make} is not installed")
            command(make, "-q", backing)
        self.attach()
        # Offset in bytes of the data area, which begins after all metadata: the first block that
        # ext4 allocates in the empty file system. In a file system with files, the next allocated
        # block depends on the processor that runs the allocation. 0 for other file systems.
        self.data = self._first_free() if file_system == "ext4" else 0

    def attach(self) -> None:
        """Attaches the backing file to a free loop device, and mounts its file system."""
        line = ["losetup", "--find", "--show", str(self.backing)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise DeviceUnavailableError(f"no loop device can be attached: {done.stderr.strip()}")
        self.device = Path(done.stdout.strip())
        done = subprocess.run(
            ["mount", str(self.device), str(self.path)], capture_output=True, text=True, timeout=60
        )
        if done.returncode != 0:
            self.detach()
            raise DeviceUnavailableError(f"a loop device cannot be mounted: {done.stderr.strip()}")
        self.mounted = True

    def mount(self) -> None:
        """Mounts the file system again."""
        assert self.device is not None
        command("mount", self.device, self.path)
        self.mounted = True

    def unmount(self) -> None:
        """Unmounts the file system; its device stays."""
        command("umount", self.path)
        self.mounted = False

    def detach(self) -> None:
        """Unmounts the file system, and frees the loop device. Idempotent."""
        if self.mounted:
            deadline = time.monotonic() + 20
            while subprocess.run(["umount", str(self.path)], capture_output=True).returncode != 0:
                if time.monotonic() > deadline:
                    # The kernel unmounts a busy file system when its last file is closed.
                    command("umount", "--lazy", self.path)
                    break
                time.sleep(0.1)
            self.mounted = False
        if self.device is not None:
            command("losetup", "--detach", self.device)
            self.device = None

    def number(self) -> str:
        """Returns the major and minor number of the device, as MAJOR:MINOR."""
        assert self.device is not None
        return Path("/sys/block", self.device.name, "dev").read_text().strip()

    def written(self) -> int:
        """Returns the bytes that have been written to the device."""
        assert self.device is not None
        return 512 * int(Path("/sys/block", self.device.name, "stat").read_text().split()[6])

    def cut(self, length: int) -> None:
        """Makes requests beyond the first `length` bytes of the device fail with EIO. With zero, no
        request fails.
        """
        assert self.device is not None
        with self.device.open("rb") as device:
            info = bytearray(LOOP_INFO)
            fcntl.ioctl(device, LOOP_GET_STATUS64, info)
            fields = list(LOOP_HEAD.unpack_from(info))
            fields[4] = length
            LOOP_HEAD.pack_into(info, 0, *fields)
            fcntl.ioctl(device, LOOP_SET_STATUS64, bytes(info))

    def _first_free(self) -> int:
        """Returns the offset in bytes of the block that the next file gets."""
        probe = self.path / "probe"
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            block = fcntl.ioctl(file, 1, struct.pack("i", 0))  # FIBMAP
        probe.unlink()
        return 4096 * int(struct.unpack("i", block)[0])

    def after_power_loss(self, to: Path) -> Disk:
        """Returns a mounted copy of the device as a power loss would leave it: without data that is
        only in the page cache of the mounted file system. `to`: the backing file of the copy.
        """
        copy = object.__new__(Disk)
        copy.backing = to
        copy.path = to.with_suffix(".mnt")
        copy.path.mkdir()
        copy.mounted = False
        copy.device = None
        shutil.copyfile(self.backing, to)
        copy.attach()
        return copy


class Throttle:
    """A cgroup that limits the rates of its processes on each of the devices of `disks`."""

    def __init__(self, disks: Sequence[Disk], name: str) -> None:
        self.disks = disks
        self.group = BLKIO / f"ritornello-{os.getpid()}-{name}"
        try:
            self.group.mkdir()
        except OSError as error:
            raise DeviceUnavailableError(f"no cgroup can be made below {BLKIO}: {error}") from error

    def add(self, pid: int) -> None:
        """Moves a process, with all its threads, into the cgroup."""
        (self.group / "cgroup.procs").write_text(str(pid))

    def limit(self, writes: int, reads: int = 0) -> None:
        """Sets the rates in bytes per second of each device; zero removes a limit."""
        for disk in self.disks:
            (self.group / WRITES).write_text(f"{disk.number()} {writes}")
            (self.group / READS).write_text(f"{disk.number()} {reads}")

    def remove(self) -> None:
        """Lifts the limits, and removes the cgroup, whose processes must have ended or left it."""
        if not self.group.exists():
            return
        self.limit(0)
        deadline = time.monotonic() + 20
        while True:
            try:
                self.group.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
