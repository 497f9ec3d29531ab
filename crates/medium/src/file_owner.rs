//! Ownership and access rights of a directory.

use rustix::process::{getegid, geteuid, getgroups};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// The owner and the rights of a directory, relative to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOwner {
    /// The owning user.
    pub uid: u32,
    /// Whether this process runs as the owning user.
    pub is_this_user: bool,
    /// Whether other users have any access.
    pub is_open: bool,
    /// Whether members of the directory's group may write in it, and this process is a member.
    pub by_group: bool,
}

impl FileOwner {
    /// The owner of a directory that only this process's user can access.
    #[must_use]
    pub fn this_user() -> Self {
        let uid = geteuid().as_raw();
        Self { uid, is_this_user: true, is_open: false, by_group: false }
    }

    /// Reads the owner from the metadata of a directory.
    #[must_use]
    pub fn of(found: &Metadata) -> Self {
        let is_member = || {
            let groups = getgroups().unwrap_or_default();
            groups.into_iter().chain([getegid()]).any(|group| group.as_raw() == found.gid())
        };
        Self {
            uid: found.uid(),
            is_this_user: found.uid() == geteuid().as_raw(),
            is_open: found.mode() & 0o077 != 0,
            by_group: found.mode() & 0o020 != 0 && is_member(),
        }
    }
}
