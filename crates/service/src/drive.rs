//! The kernel's statistics of the drives under the directories of a store.
//!
//! The kernel tells only root how worn an NVMe drive is, so this is left to programs made for it
//! (`docs/operations.md`, *Sizing*).

use crate::limits::SEARCHES_MAX;
use parking_lot::Mutex;
use rustix::fs::{major, minor};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

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
    /// Directories that a search reads now, and whether the directory was forgotten during its
    /// search. A forgotten directory stays until its search ends, so a directory that hangs
    /// occupies one search, also if it is listed again. Its drive is unknown until the search ends.
    claimed: BTreeMap<String, bool>,
    /// Directories whose device could not be read the last time.
    failed: BTreeSet<String>,
    /// Number of searches that have not ended.
    searches: usize,
}

impl Known {
    /// Claims the directory for one search. Returns `false` if its drive is known, or another
    /// search reads the directory.
    fn claim(&mut self, dir: &str) -> bool {
        if self.statistics.contains_key(dir) || self.claimed.contains_key(dir) {
            return false;
        }
        self.claimed.insert(dir.to_owned(), false);
        true
    }

    /// Ends the claim, and stores what was found. Drops the result if the directory was forgotten
    /// during the search: it may have returned on another drive, which a later search finds.
    fn complete(&mut self, dir: String, found: io::Result<Option<PathBuf>>) {
        if self.claimed.remove(&dir) != Some(false) {
            return;
        }
        match found {
            Ok(drive) => {
                self.failed.remove(&dir);
                self.statistics.insert(dir, drive);
            }
            Err(_) => {
                self.failed.insert(dir);
            }
        }
    }
}

impl Drives {
    /// For each of `dirs` whose drive is known: the directory, and the bytes that all programs have
    /// written to the drive since the kernel attached it. Waits for no disk. Forgets all other
    /// directories, which may return on another drive.
    pub(crate) fn written_bytes(&self, dirs: &[String]) -> Vec<(String, u64)> {
        let mut known = self.0.lock();
        known.statistics.retain(|dir, _| dirs.contains(dir));
        for (dir, is_forgotten) in &mut known.claimed {
            *is_forgotten |= !dirs.contains(dir);
        }
        known.failed.retain(|dir| dirs.contains(dir));
        let on_drives = known.statistics.iter();
        let on_drives =
            on_drives.filter_map(|(dir, drive)| Some((dir.clone(), drive.as_ref()?.clone())));
        let on_drives: Vec<_> = on_drives.collect();
        drop(known);
        let written = |(dir, drive): (String, PathBuf)| Some((dir, written_bytes(&drive)?));
        on_drives.into_iter().filter_map(written).collect()
    }

    /// Finds the drives of the `dirs` that are not known yet; a relative name is below `store`. May
    /// wait for a disk without a limit. While a call waits for a directory, other calls search the
    /// other directories; at most [`SEARCHES_MAX`] calls wait, further calls return.
    pub(crate) fn find(&self, store: &Path, dirs: &[String]) {
        self.find_by(dirs, |dir| {
            let device = fs::metadata(store.join(dir))?.dev();
            Ok(drive_of(Path::new(DEVICES), major(device), minor(device)))
        });
    }

    /// Like [`Drives::find`]; `drive` finds the drive of a directory, and fails if the directory
    /// must be tried again by a later call.
    fn find_by(&self, dirs: &[String], drive: impl Fn(&str) -> io::Result<Option<PathBuf>>) {
        let mut known = self.0.lock();
        let unknown = |dir: &&String| !known.statistics.contains_key(*dir);
        let mut unknown: Vec<String> = dirs.iter().filter(unknown).cloned().collect();
        if unknown.is_empty() || known.searches >= SEARCHES_MAX {
            return;
        }
        // A directory that failed before may hang now, so it is the last.
        unknown.sort_by_key(|dir| known.failed.contains(dir));
        known.searches += 1;
        drop(known);
        for dir in unknown {
            if !self.0.lock().claim(&dir) {
                continue;
            }
            let found = drive(&dir);
            self.0.lock().complete(dir, found);
        }
        self.0.lock().searches -= 1;
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
    use parking_lot::RwLock;
    use std::cell::RefCell;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;
    use std::time::Duration;

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

    /// The directories whose drive is known.
    fn known(drives: &Drives) -> Vec<String> {
        drives.0.lock().statistics.keys().cloned().collect()
    }

    #[test]
    fn drives_of_other_directories_are_found_while_one_hangs() {
        let drives = Arc::new(Drives::default());
        let disk = Arc::new(RwLock::new(()));
        let dirs = ["a", "hangs", "z"].map(str::to_owned);
        let locked = disk.write();
        let search = {
            let (drives, disk, dirs) = (Arc::clone(&drives), Arc::clone(&disk), dirs.clone());
            std::thread::spawn(move || {
                drives.find_by(&dirs, |dir| {
                    if dir == "hangs" {
                        drop(disk.read());
                    }
                    Ok(None)
                });
            })
        };
        while !drives.0.lock().claimed.contains_key("hangs") {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(known(&drives), ["a"], "a result is stored as soon as it is found");
        let later = ["a", "hangs", "new", "z"].map(str::to_owned);
        drives.find_by(&later, |dir| {
            assert_ne!(dir, "hangs", "a search waits for this directory already");
            Ok(None)
        });
        assert_eq!(known(&drives), ["a", "new", "z"]);
        drop(locked);
        search.join().unwrap();
        assert_eq!(known(&drives), ["a", "hangs", "new", "z"]);
        assert_eq!(drives.0.lock().searches, 0);
    }

    #[test]
    fn directory_that_cannot_be_read_is_tried_again_after_the_others() {
        let drives = Drives::default();
        let dirs = ["fails", "other"].map(str::to_owned);
        let order = RefCell::new(Vec::new());
        let search = |is_failing: bool| {
            drives.find_by(&dirs, |dir| {
                order.borrow_mut().push(dir.to_owned());
                if is_failing { Err(io::ErrorKind::NotFound.into()) } else { Ok(None) }
            });
        };
        drives.find_by(&dirs[..1], |_| Err(io::ErrorKind::NotFound.into()));
        search(true);
        assert!(known(&drives).is_empty());
        search(false);
        assert_eq!(known(&drives), dirs);
        assert_eq!(order.take(), ["other", "fails", "fails", "other"]);
    }

    #[test]
    fn directory_that_is_listed_again_during_its_search_begins_no_other() {
        let drives = Drives::default();
        let dirs = ["kv".to_owned()];
        drives.find_by(&dirs, |_| {
            for _ in 0..2 {
                assert!(drives.written_bytes(&[]).is_empty());
                assert!(drives.written_bytes(&dirs).is_empty());
                drives.find_by(&dirs, |_| panic!("a search reads this directory already"));
            }
            Ok(None)
        });
        assert!(known(&drives).is_empty(), "the directory may have returned on another drive");
        drives.find_by(&dirs, |_| Ok(None));
        assert_eq!(known(&drives), dirs);
    }

    #[test]
    fn searches_that_hang_are_limited() {
        let drives = Drives::default();
        drives.0.lock().searches = SEARCHES_MAX;
        drives.find_by(&["kv".to_owned()], |_| panic!("one search too many"));
        drives.0.lock().searches -= 1;
        drives.find_by(&["kv".to_owned()], |_| Ok(None));
        assert_eq!(known(&drives), ["kv"]);
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
        let written = |dirs: &[String]| -> Vec<String> {
            drives.written_bytes(dirs).into_iter().map(|(dir, _)| dir).collect()
        };
        assert!(written(&dirs).is_empty());
        drives.find(store.path(), &dirs);
        assert_eq!(written(&dirs), if expected { vec![own] } else { Vec::new() });
        assert!(written(&dirs[1..]).is_empty() && written(&dirs).is_empty());
    }
}
