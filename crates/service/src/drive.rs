//! The kernel's statistics of the drives under the directories of a store.
//!
//! The kernel tells only root how worn an NVMe drive is, so this is left to programs made for it
//! (`docs/operations.md`, *Sizing*).

use parking_lot::Mutex;
use rustix::fs::{major, minor};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The directory in which the kernel lists block devices by their numbers.
const DEVICES: &str = "/sys/dev/block";
/// Bytes of a sector in the kernel's statistics of a block device, whatever the device's own
/// sectors (`Documentation/block/stat.rst` of the Linux kernel).
const SECTOR: u64 = 512;
/// Position of the number of written sectors in these statistics.
const WRITTEN_SECTORS: usize = 6;

/// The drives of a store's directories, as far as they are known.
#[derive(Debug, Default)]
pub(crate) struct Drives(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// The statistics of each directory's drive; `None` for a directory that is not on one block
    /// device.
    statistics: BTreeMap<String, Option<PathBuf>>,
    is_searching: bool,
}

impl Drives {
    /// For each of `dirs` whose drive is known: the directory, and the bytes that all programs have
    /// written to the drive since the kernel attached it. Waits for no disk. Forgets all other
    /// directories, which may return on another drive.
    pub(crate) fn written_bytes(&self, dirs: &[String]) -> Vec<(String, u64)> {
        let mut known = self.0.lock();
        known.statistics.retain(|dir, _| dirs.contains(dir));
        let on_drives = known.statistics.iter();
        let on_drives =
            on_drives.filter_map(|(dir, drive)| Some((dir.clone(), drive.as_ref()?.clone())));
        let on_drives: Vec<_> = on_drives.collect();
        drop(known);
        let written = |(dir, drive): (String, PathBuf)| Some((dir, written_bytes(&drive)?));
        on_drives.into_iter().filter_map(written).collect()
    }

    /// Finds the drives of the `dirs` that are not known yet; a relative name is below `store`. May
    /// wait for a disk without a limit; while one call waits, other calls return.
    pub(crate) fn find(&self, store: &Path, dirs: &[String]) {
        let mut known = self.0.lock();
        let unknown = |dir: &&String| !known.statistics.contains_key(*dir);
        let unknown: Vec<String> = dirs.iter().filter(unknown).cloned().collect();
        if unknown.is_empty() || known.is_searching {
            return;
        }
        known.is_searching = true;
        drop(known);
        let find = |dir: String| {
            let device = fs::metadata(store.join(&dir)).ok().map(|found| found.dev());
            let drive = |device| drive_of(Path::new(DEVICES), major(device), minor(device));
            (dir, device.and_then(drive))
        };
        let found: Vec<_> = unknown.into_iter().map(find).collect();
        let mut known = self.0.lock();
        known.statistics.extend(found);
        known.is_searching = false;
    }
}

/// The statistics of the drive that is the block device, or has it as a partition. `None` if the
/// device is no block device, as for file systems in memory or on a network.
fn drive_of(devices: &Path, major: u32, minor: u32) -> Option<PathBuf> {
    let mut device = fs::canonicalize(devices.join(format!("{major}:{minor}"))).ok()?;
    if device.join("partition").exists() {
        device.pop();
    }
    Some(device.join("stat"))
}

fn written_bytes(statistics: &Path) -> Option<u64> {
    let statistics = fs::read_to_string(statistics).ok()?;
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
        let written =
            |minor| drive_of(dir.path(), 259, minor).and_then(|found| written_bytes(&found));
        assert_eq!([0, 1, 2].map(written), [Some(7000 * SECTOR), None, Some(7000 * SECTOR)]);
        fs::write(drive.join("stat"), "11 22\n").unwrap();
        assert_eq!(written(0), None);
    }

    #[test]
    fn drives_are_known_once_found_and_until_their_directory_is_not_listed() {
        let store = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::create_dir(store.path().join("segments")).unwrap();
        let device = fs::metadata(store.path()).unwrap().dev();
        let kernel = drive_of(Path::new(DEVICES), major(device), minor(device));
        let expected = kernel.and_then(|found| written_bytes(&found)).is_some();
        let [own, proc, gone] = ["segments", "/proc", "gone"].map(str::to_owned);
        let (dirs, drives) = ([own.clone(), proc, gone], Drives::default());
        let known = |dirs: &[String]| -> Vec<String> {
            drives.written_bytes(dirs).into_iter().map(|(dir, _)| dir).collect()
        };
        assert!(known(&dirs).is_empty());
        drives.find(store.path(), &dirs);
        assert_eq!(known(&dirs), if expected { vec![own] } else { Vec::new() });
        assert!(known(&dirs[1..]).is_empty() && known(&dirs).is_empty());
    }
}
