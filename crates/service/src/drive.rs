//! The kernel's statistics of the drives under the directories of a store.
//!
//! How worn an NVMe drive is, the kernel tells only a process with the right `CAP_SYS_ADMIN`, so it
//! is left to programs made for it (`docs/operations.md`).

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The mounts that this process sees (`man 5 proc_pid_mountinfo`).
const MOUNTS: &str = "/proc/self/mountinfo";
/// The directory in which the kernel lists block devices by their numbers.
const DEVICES: &str = "/sys/dev/block";
/// Bytes of a sector in the kernel's statistics of a block device, whatever the device's own
/// sectors (`Documentation/block/stat.rst` of the Linux kernel).
const SECTOR: u64 = 512;
/// Position of the number of written sectors in these statistics.
const WRITTEN_SECTORS: usize = 6;

/// For each of `dirs` that is on one block device: the directory, and the bytes that all programs have
/// written to its drive since the kernel attached it. Leaves out directories in memory, on a network
/// or on Btrfs. Reads no directory, so that a disk that hangs delays no answer.
pub(crate) fn written_bytes<'a>(dirs: impl Iterator<Item = &'a str>) -> Vec<(String, u64)> {
    let Ok(mounts) = fs::read(MOUNTS) else { return Vec::new() };
    let mounts = parse(&mounts);
    let written = |dir: &str| written_to(Path::new(DEVICES), device_of(&mounts, Path::new(dir))?);
    dirs.filter_map(|dir| Some((dir.to_owned(), written(dir)?))).collect()
}

/// A mount: where it is, and the numbers of its device, separated by a colon.
type Mount = (PathBuf, String);

fn parse(mounts: &[u8]) -> Vec<Mount> {
    let mount = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let device = String::from_utf8(fields.next()?.to_vec()).ok()?;
        let at = unescaped(fields.nth(1)?);
        Some((PathBuf::from(OsString::from_vec(at)), device))
    };
    mounts.split(|byte| *byte == b'\n').filter_map(mount).collect()
}

/// The kernel writes a space, tab, newline or backslash in a path as a backslash and three octal
/// digits.
fn unescaped(path: &[u8]) -> Vec<u8> {
    let (mut plain, mut rest) = (Vec::new(), path);
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match byte.filter(|_| *first == b'\\') {
            Some(byte) => {
                plain.push(byte);
                rest = &after[3..];
            }
            None => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    plain
}

/// The device of the mount that has `dir`: the deepest, and of several at one place the last.
fn device_of<'a>(mounts: &'a [Mount], dir: &Path) -> Option<&'a str> {
    let above = mounts.iter().filter(|(at, _)| dir.starts_with(at));
    let mount = above.max_by_key(|(at, _)| at.components().count());
    mount.map(|(_, device)| device.as_str())
}

fn written_to(devices: &Path, numbers: &str) -> Option<u64> {
    let mut device = fs::canonicalize(devices.join(numbers)).ok()?;
    if device.join("partition").exists() {
        device.pop();
    }
    let statistics = fs::read_to_string(device.join("stat")).ok()?;
    let sectors: u64 = statistics.split_whitespace().nth(WRITTEN_SECTORS)?.parse().ok()?;
    sectors.checked_mul(SECTOR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn writes_to_a_partition_are_those_of_its_drive() {
        let dir = tempfile::tempdir().unwrap();
        let drive = dir.path().join("devices/nvme0n1");
        let partition = drive.join("nvme0n1p2");
        fs::create_dir_all(&partition).unwrap();
        fs::write(drive.join("stat"), "  11 22 33 44 55 66 7000 88 0 10 20\n").unwrap();
        fs::write(partition.join("stat"), "1 2 3 4 5 6 7 8 0 1 2\n").unwrap();
        fs::write(partition.join("partition"), "2\n").unwrap();
        symlink(&drive, dir.path().join("259:0")).unwrap();
        symlink(&partition, dir.path().join("259:2")).unwrap();
        for numbers in ["259:0", "259:2"] {
            assert_eq!(written_to(dir.path(), numbers), Some(7000 * SECTOR));
        }
        assert_eq!(written_to(dir.path(), "259:1"), None);
        fs::write(drive.join("stat"), "11 22\n").unwrap();
        assert_eq!(written_to(dir.path(), "259:0"), None);
    }

    #[test]
    fn directory_has_the_device_of_its_deepest_and_last_mount() {
        let mounts = parse(
            b"22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            23 22 0:21 / /proc rw - proc proc rw\n\
            24 22 259:1 /kv /mnt/a\\040b\\134 rw master:1 - xfs /dev/nvme0n1p1 rw\n\
            25 22 259:2 / /mnt/kv rw - xfs /dev/nvme1n1p2 rw\n\
            26 25 259:3 / /mnt/kv rw - xfs /dev/nvme1n1p3 rw\n\
            short line\n",
        );
        for (dir, device) in [
            ("/var/kv", "254:0"),
            ("/proc/kv", "0:21"),
            ("/mnt/a b\\/kv", "259:1"),
            ("/mnt/kv", "259:3"),
            ("/mnt/kv2", "254:0"),
        ] {
            assert_eq!(device_of(&mounts, Path::new(dir)), Some(device), "{dir}");
        }
        assert_eq!(device_of(&[], Path::new("/")), None);
    }

    #[test]
    fn directory_in_memory_has_no_drive() {
        assert_eq!(written_bytes(["/proc/kv"].into_iter()), []);
    }
}
