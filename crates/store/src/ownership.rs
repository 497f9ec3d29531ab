//! Restricts a store to directories of the user that runs this process.

use crate::directory::Directory;
use ritornello_format::{Error, Result, VolumeMarker};
use ritornello_medium::FileOwner;
use std::io;
use std::path::Path;

/// Returns the error for a directory of another user, with advice.
#[must_use]
pub fn foreign_directory(dir: &Path, owner: FileOwner) -> Error {
    let error = if owner.by_group {
        // A Kubernetes volume with `fsGroup` belongs to another user but is writable by group, so a
        // subdirectory of this user can be created in it.
        let inside = dir.join("ritornello");
        Error::invalid(format!(
            "the directory belongs to another user, and this user may write to it by group only \
             (as with a Kubernetes volume and fsGroup): name {} instead, which is then created",
            inside.display()
        ))
    } else {
        Error::invalid(
            "the directory belongs to another user, and that user could read the prompts in it: \
             run as that user, or name a new directory",
        )
    };
    error.with("dir", dir.display()).with("owner", owner.uid)
}

impl Directory {
    /// Refuses a directory of another user. A directory that does not exist passes.
    ///
    /// # Errors
    /// `Invalid` if the directory belongs to another user; file-system errors.
    pub(crate) fn check_owner(&self, dir: &Path) -> Result<()> {
        match self.medium.owner(dir) {
            Ok(owner) if owner.is_this_user => Ok(()),
            Ok(owner) => Err(foreign_directory(dir, owner)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(self.refused(error).with("path", dir.display())),
        }
    }

    /// Revokes other users' access to a directory of this user.
    pub(crate) fn close_to_others(&self, dir: &Path) -> io::Result<()> {
        if self.medium.owner(dir)?.is_open {
            self.medium.close_to_others(dir)?;
        }
        Ok(())
    }

    /// Reads the marker in `dir`; `None` if `dir` has no marker. Fails without reading if the
    /// directory belongs to another user.
    pub(crate) fn marker_in(&self, dir: &Path) -> io::Result<Option<Result<VolumeMarker>>> {
        self.check_owner(dir).map_err(io::Error::other)?;
        let found = self.read_in(dir, VolumeMarker::FILE)?;
        Ok(found.map(|bytes| VolumeMarker::decode(&bytes)))
    }
}
