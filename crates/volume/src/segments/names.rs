//! The names of segments in the directories of their volumes.

use super::{Segments, selftest};
use ritornello_format::{Error, Result, SegmentId, VolumeMarker};
use std::ffi::OsStr;
use std::io;

/// Prefix of the file name of a segment; at least six decimal digits follow.
const FILE_PREFIX: &str = "seg-";

impl Segments {
    /// Lists the segments of all present volumes, in order, and makes their names durable: see
    /// [`Segments::list_durably`].
    ///
    /// # Errors
    /// Errors of [`Segments::list_durably`].
    pub fn existing(&self) -> Result<Vec<SegmentId>> {
        let volumes = self.dirs().into_iter().map(|(volume, _)| self.list_durably(volume));
        Ok(volumes.collect::<Result<Vec<_>>>()?.concat())
    }

    /// The segments of all volumes whose directories can be listed now; other volumes are left out.
    #[must_use]
    pub fn listable(&self) -> Vec<SegmentId> {
        self.dirs()
            .into_iter()
            .flat_map(|(volume, _)| self.list(volume).unwrap_or_default())
            .collect()
    }

    /// The segments of one volume, in order.
    ///
    /// # Errors
    /// `Retry` if the volume's directory cannot be listed, or holds neither a segment nor the
    /// volume's marker file; `Invalid` if the volume is absent, retired or unknown.
    pub fn list(&self, volume: u8) -> Result<Vec<SegmentId>> {
        let dir = self.dir(volume)?;
        let names = self.medium.list(&dir).map_err(|error| {
            Error::retry("a volume's directory cannot be listed")
                .with("dir", dir.display())
                .because(error)
        })?;
        let numbers = names.iter().filter_map(|name| number_of(name.to_str()?));
        let mut found: Vec<SegmentId> =
            numbers.map(|number| SegmentId::new(volume, number)).collect();
        found.sort_unstable();
        // A mounted volume without segments still has its marker file; an empty mount point has
        // none.
        if found.is_empty() && !names.iter().any(|name| name == VolumeMarker::FILE) {
            return Err(Error::retry(
                "a volume's directory has no segment and no marker: is its file system mounted?",
            )
            .with("dir", dir.display()));
        }
        Ok(found)
    }

    /// Lists the segments of one volume for an owner, which may write to them, and makes their
    /// names durable: a previous owner may have died before it synced the directory.
    ///
    /// # Errors
    /// Errors of [`Segments::list`]; `Retry` if the directory cannot be synced, or does not hold
    /// the volume.
    pub fn list_durably(&self, volume: u8) -> Result<Vec<SegmentId>> {
        let listed = self.list(volume)?;
        self.sync_names(volume)?;
        Ok(listed)
    }

    /// Syncs the directory of a volume, and checks that the synced directory holds this volume.
    pub(super) fn sync_names(&self, volume: u8) -> io::Result<()> {
        self.medium.sync_dir(&self.dir(volume).map_err(io::Error::other)?)?;
        // Check after the sync: a different file system may have been mounted on the directory
        // before the sync.
        self.check_volume(volume)
    }

    /// Whether a file of this name was made by a test of a directory: by the self-test, or by the
    /// test whether files get huge pages. A test removes its file, unless the test is interrupted.
    #[must_use]
    pub fn is_left_over(name: &OsStr) -> bool {
        name.to_str().is_some_and(|name| name.starts_with(selftest::PREFIX))
    }

    /// The name of a segment's file in the directory of its volume.
    #[must_use]
    pub fn file_name(id: SegmentId) -> String {
        format!("{FILE_PREFIX}{:06}", id.number())
    }

    /// Whether `name` is the file name of a segment.
    #[must_use]
    pub fn is_segment(name: &OsStr) -> bool {
        name.to_str().and_then(number_of).is_some()
    }
}

fn number_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix(FILE_PREFIX)?;
    let number = digits.parse().ok()?;
    // Accept only names that `file_name` returns: not "seg-7" or "seg-+00007".
    (name == Segments::file_name(SegmentId::new(0, number))).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_names_are_segments() {
        assert_eq!(number_of("seg-000007"), Some(7));
        assert_eq!(number_of("seg-1234567"), Some(1_234_567));
        for other in ["seg-7", "seg-+00007", "seg-000007.tmp", "seg-99999999", "LOCK", "seg-"] {
            assert_eq!(number_of(other), None, "{other}");
        }
    }
}
