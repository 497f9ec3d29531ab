//! Who owns a directory, and who else may write to it.

use rustix::process::{getegid, geteuid, getgroups};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// The owner and the rights of a directory, as this process sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The user that the directory belongs to.
    pub uid: u32,
    /// Whether that is the user this process runs as.
    pub is_this_user: bool,
    /// Whether users other than the owner have any rights there.
    pub is_open: bool,
    /// Whether this process may write there as a member of the directory's group.
    pub by_group: bool,
}

impl Owner {
    /// The owner of a directory that only this user can reach.
    #[must_use]
    pub fn this_user() -> Self {
        let uid = geteuid().as_raw();
        Self { uid, is_this_user: true, is_open: false, by_group: false }
    }

    /// The owner of the directory that `found` describes.
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
