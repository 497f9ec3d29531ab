//! Which mount a path leads to, compared with the mounts at an earlier time.
//!
//! A path leads to a different directory after a file system was mounted over the directory, after
//! the directory's file system was unmounted, or after the directory was moved. Mounts show which
//! of these happened: `statx(2)` gives the mount of a path, `/proc/self/mountinfo` lists all
//! mounts.

use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, statx};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The paths at which this process has opened directories of stores, each with the mounts at the
/// last opening.
static OPENED: Mutex<BTreeMap<PathBuf, Mounts>> = Mutex::new(BTreeMap::new());

/// Timeout of the lock on [`OPENED`]. A thread holds the lock for a lookup only, but if a thread of
/// the parent holds it during a fork, it stays locked in the child forever.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Records that the directory of a store was opened at `path`.
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
             is created below its mount point: mount it, or restart the process",
        )
        .with("dir", path.display()));
    }
    Ok(())
}

/// A mount: its identifier, which the kernel may reuse, its device, its root and its mount point.
type Mount = [String; 4];

/// The mounts of this process at one time, and the mount that a path led to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mounts {
    own: Option<Mount>,
    all: BTreeSet<Mount>,
}

/// The mount that a path leads to now, compared with an earlier time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The mount that the path led to at the earlier time.
    Same,
    /// A mount that was made after the earlier time.
    New,
    /// Another mount that existed at the earlier time: the mount that the path led to was removed,
    /// and the path now leads to the file system below its mount point.
    Below,
    /// The kernel does not report the mount.
    Unknown,
}

impl Mounts {
    /// Returns the current mounts, with the mount that `path` leads to.
    pub(crate) fn around(path: &Path) -> Self {
        // Read the table of mounts after the mount's number, so that the table lists the mount,
        // unless the mount was removed between the two reads.
        let number = mount_number(path);
        Self::of(number, &std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
    }

    fn of(number: Option<String>, table: &str) -> Self {
        let all: BTreeSet<Mount> = table.lines().filter_map(parse).collect();
        let own = number.filter(|_| !all.is_empty()).map(|number| {
            let listed = all.iter().find(|mount| mount[0] == number).cloned();
            listed.unwrap_or_else(|| unlisted(number))
        });
        Self { own, all }
    }

    /// Whether the kernel reports the mount that the path leads to.
    pub(crate) fn are_known(&self) -> bool {
        self.own.is_some()
    }

    /// Returns where `path` leads now; for a path that does not exist, where its nearest existing
    /// ancestor leads.
    pub(crate) fn place(&self, path: &Path) -> Place {
        self.compare(Self::around(path).own)
    }

    fn compare(&self, now: Option<Mount>) -> Place {
        match (&self.own, now) {
            (Some(before), Some(found)) if *before == found => Place::Same,
            (Some(_), Some(found)) if self.all.contains(&found) || is_unlisted(&found) => {
                Place::Below
            }
            (Some(_), Some(_)) => Place::New,
            _ => Place::Unknown,
        }
    }
}

/// Returns the mount that contains the root directory of a `chroot(2)`, which
/// `/proc/self/mountinfo` does not list. [`Mounts::compare`] counts such a mount as one that
/// existed before.
fn unlisted(number: String) -> Mount {
    [number, String::new(), String::new(), String::new()]
}

fn is_unlisted(mount: &Mount) -> bool {
    mount[1].is_empty()
}

/// The mount on a line of `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`): the fields 1, 3, 4 and
/// 5.
fn parse(line: &str) -> Option<Mount> {
    let mut fields = line.split(' ').map(str::to_owned);
    let number = fields.next()?;
    Some([number, fields.nth(1)?, fields.next()?, fields.next()?])
}

/// The number of the mount that `path` leads to, or, if `path` does not exist, its nearest existing
/// ancestor; `None` if the kernel does not report the number.
fn mount_number(path: &Path) -> Option<String> {
    let found = path.ancestors().find_map(|part| match number_of(part) {
        Err(Errno::NOENT | Errno::NOTDIR) => None,
        found => Some(found.ok().flatten()),
    });
    found.flatten()
}

fn number_of(path: &Path) -> rustix::io::Result<Option<String>> {
    match statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID) {
        Ok(found) if found.stx_mask & StatxFlags::MNT_ID.bits() != 0 => {
            Ok(Some(found.stx_mnt_id.to_string()))
        }
        // The kernel is older than Linux 5.8, a filter of system calls forbids `statx`, or `path`
        // cannot be examined, so that the next call fails too.
        _ => number_by_descriptor(path),
    }
}

/// Reads the number from `/proc/self/fdinfo`, which has it since Linux 3.15.
fn number_by_descriptor(path: &Path) -> rustix::io::Result<Option<String>> {
    let open = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", open.as_raw_fd()));
    let info = info.unwrap_or_default();
    Ok(info.lines().find_map(|line| Some(line.strip_prefix("mnt_id:")?.trim().to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_line_gives_number_device_root_and_point() {
        let line = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue";
        let mount = ["36", "98:0", "/mnt1", "/mnt2"].map(str::to_owned);
        assert_eq!(parse(line), Some(mount));
        assert_eq!(parse("36 35 98:0 /mnt1"), None);
    }

    #[test]
    fn path_leads_to_same_new_or_earlier_mount() {
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

    #[test]
    fn fdinfo_and_statx_report_the_same_mount() {
        for path in ["/", "/proc", "/dev"].map(Path::new) {
            let number = number_by_descriptor(path).unwrap();
            assert!(number.is_some() && number == number_of(path).unwrap(), "{}", path.display());
        }
        assert_eq!(
            mount_number(Path::new("/proc/not/there")),
            number_of(Path::new("/proc")).unwrap()
        );
    }

    const ROOT: &str = "20 1 8:1 / / rw - ext4 /dev/sda1 rw";
    const DISK: &str = "31 20 8:2 / /mnt rw - ext4 /dev/sda2 rw";

    fn mounts(number: &str, lines: &[&str]) -> Mounts {
        Mounts::of(Some(number.to_owned()), &lines.join("\n"))
    }

    #[test]
    fn unlisted_root_of_chroot_counts_as_earlier_mount() {
        let proc = "25 20 0:5 / /proc rw - proc proc rw";
        let before = mounts("20", &[proc]);
        assert!(before.are_known());
        assert_eq!(before.compare(before.own.clone()), Place::Same);
        let mounted = mounts("31", &[proc, DISK]);
        assert_eq!(before.compare(mounted.own.clone()), Place::New);
        assert_eq!(mounted.compare(before.own), Place::Below);
    }

    #[test]
    fn place_is_unknown_without_numbers_or_table() {
        let known = mounts("31", &[ROOT, DISK]);
        for unknown in [Mounts::of(None, ROOT), Mounts::of(Some("20".to_owned()), "")] {
            assert!(!unknown.are_known());
            assert_eq!(known.compare(unknown.own.clone()), Place::Unknown);
            assert_eq!(unknown.compare(known.own.clone()), Place::Unknown);
        }
    }
}
