//! The open files of segments.

use super::{IoMode, Segments};
use crate::open_files;
use parking_lot::RwLock;
use ritornello_format::{Result, SegmentId};
use ritornello_medium::{Access, MediumFile};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Open files by segment.
#[derive(Default)]
pub(super) struct Files {
    open: RwLock<HashMap<SegmentId, Arc<dyn MediumFile>>>,
    /// Largest number of segment files for which a raise of the limit of open files was attempted.
    reserved: AtomicUsize,
}

impl Files {
    /// Closes the files of a volume.
    pub(super) fn close_volume(&self, volume: u8) {
        self.open.write().retain(|id, _| id.volume() != volume);
    }
}

impl Segments {
    /// Whether the file of a segment is open: [`Segments::file`] then does not wait for the disk.
    pub(crate) fn is_open(&self, id: SegmentId) -> bool {
        self.files.open.read().contains_key(&id)
    }

    /// The open file of a segment. Opens it if necessary.
    pub(crate) fn file(&self, id: SegmentId) -> io::Result<Arc<dyn MediumFile>> {
        if let Some(file) = self.files.open.read().get(&id) {
            return Ok(Arc::clone(file));
        }
        let path = self.path(id).map_err(io::Error::other)?;
        let access = Access { write: true, create: false, direct: self.volume(id).direct };
        let file = self.medium.open(&path, access)?;
        // Check after the open: a later mount on the directory does not affect the open file.
        self.check_volume(id.volume())?;
        Ok(self.cache_file(id, file))
    }

    /// Caches an open file, unless the segment has one already. Returns the cached file.
    pub(super) fn cache_file(
        &self,
        id: SegmentId,
        file: Arc<dyn MediumFile>,
    ) -> Arc<dyn MediumFile> {
        let (kept, count) = {
            let mut files = self.files.open.write();
            let kept = Arc::clone(files.entry(id).or_insert(file));
            (kept, files.len())
        };
        // If more segments are open than `reserved`, raise the limit of open files for twice their
        // number.
        if count > self.files.reserved.load(Relaxed) {
            self.reserve_files(2 * count);
        }
        kept
    }

    /// Raises the limit of open files so that `count` segments can be open, unless the files are
    /// simulated. If the limit cannot be raised that far, adds a warning to the report.
    pub fn reserve_files(&self, count: usize) {
        let had = self.files.reserved.fetch_max(count, Relaxed);
        if count <= had || self.report.read().mode == IoMode::Simulated {
            return;
        }
        let left = count.saturating_sub(self.files.open.read().len());
        if let Err(error) = open_files::reserve(left as u64) {
            tracing::warn!("{error}");
            let mut report = self.report.write();
            report.warnings.retain(|known| !known.contains("may open"));
            report.warnings.push(error.to_string());
        }
    }

    /// Closes the file and the map of a segment.
    pub(super) fn close(&self, id: SegmentId) {
        self.files.open.write().remove(&id);
        if let Some(maps) = &self.maps {
            maps.open.write().remove(&id);
        }
    }

    /// Closes all files and maps: the next call opens the files again by name.
    pub fn close_all(&self) {
        self.files.open.write().clear();
        if let Some(maps) = &self.maps {
            maps.open.write().clear();
        }
    }

    pub(super) fn path(&self, id: SegmentId) -> Result<PathBuf> {
        Ok(self.dir(id.volume())?.join(Segments::file_name(id)))
    }
}
