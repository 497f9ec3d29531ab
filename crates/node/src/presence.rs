//! A client's proof that it may be writing: a locked file with a random name under `clients/`.
//!
//! An owner writes the name to its reservation log before it grants space. A later owner, to which
//! the client never connected, reuses the space only when the name's lock is free and the segments
//! are drained; [`crate::record_lock`] says what a free lock proves.

use crate::node_directory::{CLIENTS, NodeDirectory};
use crate::record_lock;
use ritornello_format::{Error, Result};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// Number of random bytes of a name, which are written as hexadecimal digits.
const NAME_BYTES: usize = 16;
/// Maximum number of names that [`Presence::announce`] tries. A name fails if the [`sweep`] of an
/// owner locks or removes its file before the process that created the file has locked the file.
const ATTEMPTS: u32 = 8;

/// A locked name. While it exists, space that was granted under the name is given to no other
/// process.
#[derive(Debug)]
pub(crate) struct Presence {
    directory: Arc<NodeDirectory>,
    name: String,
    file: Option<File>,
}

impl Presence {
    /// Draws a name and locks its file.
    pub(crate) fn announce(directory: &Arc<NodeDirectory>) -> Result<Self> {
        for _ in 0..ATTEMPTS {
            let name = random_name()?;
            // Insert the name before the file exists, because `sweep` skips this process's names.
            directory.names.lock().insert(name.clone());
            let mut presence = Self { directory: Arc::clone(directory), name, file: None };
            if presence.lock().map_err(unannounced)? {
                return Ok(presence);
            }
        }
        Err(unannounced(io::Error::other("another process keeps removing this process's file")))
    }

    /// The name, as the server and the reservation log know it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn lock(&mut self) -> io::Result<bool> {
        let path = path(&self.name);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file: File =
            rustix::fs::openat(self.directory.dir(), &path, flags, Mode::RUSR | Mode::WUSR)?.into();
        // `sweep` locks a file before it removes the file. A concurrent `sweep` therefore holds the
        // lock now, or has removed the file, or will find the lock taken.
        let locked = record_lock::try_lock(&file)?;
        let named = rustix::fs::statat(self.directory.dir(), &path, AtFlags::SYMLINK_NOFOLLOW);
        let own = file.metadata()?;
        let named = named.is_ok_and(|named| (named.st_dev, named.st_ino) == (own.dev(), own.ino()));
        self.file = Some(file);
        Ok(locked && named)
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if !self.directory.process.is_current() {
            // In a forked child this value is a copy, and the name belongs to the parent.
            if let Some(file) = self.file.take() {
                let _ = file.into_raw_fd();
            }
            return;
        }
        // If the removal fails, an owner sweeps the file later.
        let _ = rustix::fs::unlinkat(self.directory.dir(), path(&self.name), AtFlags::empty());
        self.directory.names.lock().remove(&self.name);
    }
}

/// Returns whether the process with this name may still be writing.
pub(crate) fn is_alive(directory: &NodeDirectory, name: &str) -> bool {
    if !is_name(name) {
        return false;
    }
    // Check this process's names first, because opening and closing the file of such a name would
    // release this process's lock on it.
    if directory.names.lock().contains(name) {
        return true;
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match rustix::fs::openat(directory.dir(), path(name), flags, Mode::empty()) {
        Ok(file) => !matches!(record_lock::holder(&file.into()), Ok(None)),
        Err(Errno::NOENT) => false,
        // The lock's state is unknown, so the process counts as alive.
        Err(_) => true,
    }
}

/// Removes the files under `clients/` whose processes are dead. Only the owner calls this.
pub(crate) fn sweep(directory: &NodeDirectory) {
    let Ok(names) = directory.names_in(CLIENTS) else { return };
    for name in names.iter().filter(|name| is_name(name)) {
        if directory.names.lock().contains(name) {
            continue;
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let Ok(file) = rustix::fs::openat(directory.dir(), path(name), flags, Mode::empty()) else {
            continue;
        };
        let file = File::from(file);
        // The file is locked before it is removed: `Presence::lock` relies on this order.
        if let Ok(true) = record_lock::try_lock(&file) {
            let _ = rustix::fs::unlinkat(directory.dir(), path(name), AtFlags::empty());
        }
    }
}

/// Returns whether [`Presence::announce`] could have drawn `name`. Such a name contains no path
/// separator.
pub(crate) fn is_name(name: &str) -> bool {
    name.len() == 2 * NAME_BYTES && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns 32 random hexadecimal digits, unique for all practical purposes.
pub(crate) fn random_name() -> Result<String> {
    let mut bytes = [0; NAME_BYTES];
    let mut filled = 0;
    while filled < NAME_BYTES {
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(&mut bytes[filled..], flags) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => {
                return Err(Error::retry("the kernel gave no random bytes: try again")
                    .because(io::Error::from(error)));
            }
        }
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn path(name: &str) -> String {
    format!("{CLIENTS}/{name}")
}

fn unannounced(error: io::Error) -> Error {
    Error::retry(
        "this process cannot lock a file of its own under clients/ in the store's directory: check \
         that it may write there",
    )
    .because(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_name_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Arc::new(NodeDirectory::open(dir.path()).unwrap());
        let presence = Presence::announce(&directory).unwrap();
        let name = presence.name().to_owned();
        assert!(is_alive(&directory, &name));
        sweep(&directory);
        assert!(dir.path().join(CLIENTS).join(&name).exists());
        drop(presence);
        assert!(!is_alive(&directory, &name));
        assert!(!dir.path().join(CLIENTS).join(&name).exists());
    }

    #[test]
    fn sweep_removes_dead_names_only() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Arc::new(NodeDirectory::open(dir.path()).unwrap());
        let stale = dir.path().join(CLIENTS).join("0123456789abcdef0123456789abcdef");
        let other = dir.path().join(CLIENTS).join("README");
        std::fs::write(&stale, b"").unwrap();
        std::fs::write(&other, b"").unwrap();
        assert!(!is_alive(&directory, "0123456789abcdef0123456789abcdef"));
        assert!(!is_alive(&directory, "../LOCK"));
        sweep(&directory);
        assert!(!stale.exists() && other.exists());
    }

    #[test]
    fn sweep_stays_in_a_moved_directory() {
        const NAME: &str = "0123456789abcdef0123456789abcdef";
        let root = tempfile::tempdir().unwrap();
        let (dir, moved) = (root.path().join("dir"), root.path().join("moved"));
        std::fs::create_dir(&dir).unwrap();
        let directory = NodeDirectory::open(&dir).unwrap();
        std::fs::rename(&dir, &moved).unwrap();
        std::fs::write(moved.join(CLIENTS).join(NAME), b"").unwrap();
        sweep(&directory);
        assert!(!moved.join(CLIENTS).join(NAME).exists());
    }
}
