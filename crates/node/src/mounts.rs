//! Which mount a path leads to, compared with the mounts at an earlier time.
//!
//! A path that leads to another directory than before does so because a file system was mounted over
//! the directory, because the directory's file system was unmounted, or because the directory was
//! moved. Mounts tell which: `statx(2)` gives the mount of a path, `/proc/self/mountinfo` lists all.

use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The paths at which this process has opened stores, with the mounts when it last did.
static OPENED: Mutex<BTreeMap<PathBuf, Mounts>> = Mutex::new(BTreeMap::new());

/// The lock is held for a lookup only. In a forked child a thread that does not exist there may
/// hold it forever.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Records that a store was opened at `path`.
pub(crate) fn record_opening(path: &Path, mounts: &Mounts) {
    if let Some(mut opened) = OPENED.try_lock_for(LOCK_TIMEOUT) {
        opened.insert(path.to_owned(), mounts.clone());
    }
}

/// Checks that a new store may be created at `path`.
///
/// # Errors
/// `Retry` if this process had a store there on a file system that is not mounted now.
pub(crate) fn check_creation(path: &Path) -> Result<()> {
    let opened = OPENED.try_lock_for(LOCK_TIMEOUT);
    let before = opened.and_then(|opened| opened.get(path).cloned()).unwrap_or_default();
    if before.place(path) == Place::Below {
        return Err(Error::retry(
            "the file system of the store that this process had here is not mounted, and no store \
             is made below its mount point: mount it, or start the process anew",
        )
        .with("dir", path.display()));
    }
    Ok(())
}

/// One mount: its identifier, which the kernel reuses, with device, root and mount point.
type Mount = [String; 4];

/// The mounts of this process at one time, and the one that a path led to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mounts {
    own: Option<Mount>,
    all: BTreeSet<Mount>,
}

/// Where a path leads now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// To the mount that it led to before, or the kernel does not say.
    Same,
    /// To a mount that was made since.
    New,
    /// To a mount that was there before, below the one that is gone.
    Below,
}

impl Mounts {
    /// The mounts now, around `path`.
    pub(crate) fn around(path: &Path) -> Self {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let all: BTreeSet<Mount> = table.lines().filter_map(parse).collect();
        let own = mount_number(path);
        let own = own.and_then(|number| all.iter().find(|mount| mount[0] == number).cloned());
        Self { own, all }
    }

    /// Where `path` leads now, or the nearest directory above it that exists.
    pub(crate) fn place(&self, path: &Path) -> Place {
        let now = Self::around(path);
        match (&self.own, now.own) {
            (Some(before), Some(found)) if *before != found => {
                if self.all.contains(&found) {
                    Place::Below
                } else {
                    Place::New
                }
            }
            _ => Place::Same,
        }
    }
}

/// The mount on a line of `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`): the fields 1, 3, 4 and 5.
fn parse(line: &str) -> Option<Mount> {
    let mut fields = line.split(' ').map(str::to_owned);
    let number = fields.next()?;
    Some([number, fields.nth(1)?, fields.next()?, fields.next()?])
}

/// `None` where the kernel is older than Linux 5.8.
fn mount_number(path: &Path) -> Option<String> {
    let found = path
        .ancestors()
        .find_map(|part| statx(CWD, part, AtFlags::empty(), StatxFlags::MNT_ID).ok())?;
    let has_number = found.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    has_number.then(|| found.stx_mnt_id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_differ_by_number_device_root_and_point() {
        let line = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue";
        let mount = ["36", "98:0", "/mnt1", "/mnt2"].map(str::to_owned);
        assert_eq!(parse(line), Some(mount));
        assert_eq!(parse("36 35 98:0 /mnt1"), None);
    }

    #[test]
    fn path_stays_on_its_mount_and_leaves_it_for_new_and_old_ones() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = Mounts::around(&dir.path().join("not/there/yet"));
        let Some(own) = mounts.own.clone() else { return };
        assert_eq!(mounts.place(dir.path()), Place::Same);
        let mut other = own.clone();
        other[0].push('0');
        let gone = Mounts { own: Some(other.clone()), all: [other, own].into() };
        assert_eq!(gone.place(dir.path()), Place::Below);
        let before = Mounts { own: gone.own.clone(), all: gone.own.into_iter().collect() };
        assert_eq!(before.place(dir.path()), Place::New);
    }
}
