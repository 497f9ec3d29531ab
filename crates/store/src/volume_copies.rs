//! Copies of the manifest and the scope registry in the directories of volumes. `ritornello paths
//! restore` reads them if the store's own directory is lost.

use crate::directory::{COPY_OF_MANIFEST, Directory};
use ritornello_format::{Manifest, VolumeMarker};
use std::ffi::OsStr;
use std::io;
use std::path::Path;

/// Names of the copies in a volume's directory.
pub const VOLUME_COPIES: [&str; 2] = [COPY_OF_MANIFEST, COPY_OF_SCOPES];
pub(crate) const COPY_OF_SCOPES: &str = "VOLUME.scopes";

/// Whether `name` is a copy in a volume's directory, or an unfinished copy.
#[must_use]
pub fn is_volume_copy(name: &str) -> bool {
    let ends_after = |copy| name.strip_prefix(copy).is_some_and(|end| ["", ".new"].contains(&end));
    VOLUME_COPIES.iter().any(ends_after)
}

impl Directory {
    /// Replaces the copies in `dir`, durably: the scopes before the manifest, which is therefore
    /// never newer than the scopes beside it.
    ///
    /// # Errors
    /// File-system errors; an error if `dir` lacks `marker`, because another file system may be
    /// mounted there.
    pub(crate) fn write_copies(
        &self,
        dir: &Path,
        marker: VolumeMarker,
        manifest: &[u8],
        scopes: &[u8],
    ) -> io::Result<()> {
        for (name, bytes) in [(COPY_OF_SCOPES, scopes), (COPY_OF_MANIFEST, manifest)] {
            if !self.has_marker(dir, marker) {
                return Err(io::Error::other("the directory does not carry the volume's marker"));
            }
            self.replace_in(dir, name, bytes)?;
        }
        Ok(())
    }

    /// Removes the copies from the directory of a volume that is no longer used.
    pub(crate) fn remove_copies(&self, dir: &Path) -> io::Result<()> {
        for name in VOLUME_COPIES.map(|copy| [copy.to_owned(), format!("{copy}.new")]).concat() {
            match self.medium.remove(&dir.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the file `name` in `dir` is a copy that `store` may remove: the copies in `dir` are
    /// not another store's.
    pub(crate) fn is_own_copy(&self, dir: &Path, name: &OsStr, store: [u8; 16]) -> bool {
        let found = self.read_in(dir, COPY_OF_MANIFEST).ok().flatten();
        let manifest = found.and_then(|bytes| Manifest::decode(&bytes).ok());
        name.to_str().is_some_and(is_volume_copy)
            && manifest.is_none_or(|manifest| manifest.uuid == store)
    }
}
