//! Reads the state of a store from its files, while no process owns the store.

use crate::directory::Directory;
use crate::stats::SCOPES_SHOWN;
use ritornello_format::{Manifest, Result, ScopeRegistry};
use ritornello_index::RunIndex;
use ritornello_volume::segments::Segments;
use serde::Serialize;
use std::path::Path;

/// A store as its files describe it, without a recovery. The fields have the meaning of the fields
/// of [`CatalogStats`](crate::CatalogStats) with the same names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoredStats {
    /// Identity of the store, as hexadecimal digits.
    pub uuid: String,
    /// Number of openings by an owner; zero if the creation or restore of the store has not ended.
    pub owner_epoch: u32,
    /// Whether the last owner closed the store, and all changes were durable then.
    pub clean: bool,
    /// Host, boot and process id of the last owner.
    pub last_owner: String,
    /// Backend of the index.
    pub index: String,
    /// Budget in bytes: segments and metadata.
    pub capacity_bytes: u64,
    /// Bytes per segment file.
    pub segment_bytes: u64,
    /// Segment files in the directories that are present.
    pub segments: u64,
    /// The directories of the segments.
    pub paths: Vec<StoredVolume>,
    /// Registered scopes; `None` if the registry is damaged or cannot be read.
    pub scopes: Option<u64>,
    /// The scopes that were registered first, at most [`SCOPES_SHOWN`].
    pub first_scopes: Vec<StoredScope>,
    /// Contents of the index's newest checkpoint; `None` without a checkpoint, if it cannot be
    /// read, or if the index is not `run`.
    pub checkpoint: Option<StoredCheckpoint>,
    /// Bytes of journal records after the checkpoint, whose changes it may not show; `None` if they
    /// cannot be read, or if the index is not `run`.
    pub journal_bytes: Option<u64>,
}

/// A directory of segments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoredVolume {
    /// The directory, relative to the store's or absolute.
    pub dir: String,
    /// Whether the directory is being drained.
    pub draining: bool,
    /// Segment files.
    pub segments: u64,
    /// Reason why the directory is absent; `None` if it is present.
    pub absent: Option<String>,
}

/// A registered scope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoredScope {
    /// Digest of the scope's identity, as hexadecimal digits.
    pub id: String,
    /// The model that the scope names.
    pub model: String,
    /// The scope's quota in bytes on disk, if any.
    pub quota_bytes: Option<u64>,
}

/// Contents of a checkpoint of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StoredCheckpoint {
    /// Runs in the checkpoint.
    pub runs: u64,
    /// Pages in the checkpoint.
    pub pages: u64,
}

impl Directory {
    /// Reads the state of the store from its files, without a change of any file or directory;
    /// `None` if no store exists. Opens no index and takes no lock: if an owner changes the store during the
    /// call, the fields may describe different moments.
    ///
    /// # Errors
    /// Errors of [`Directory::manifest`].
    pub fn stored_stats(&self) -> Result<Option<StoredStats>> {
        let Some(manifest) = self.manifest()? else { return Ok(None) };
        let paths = self.stored_volumes(&manifest);
        let registry = self.registry().ok().flatten().map(|stored| stored.registry);
        let index = (manifest.index == "run")
            .then(|| RunIndex::stored(self.medium.as_ref(), &self.index()).ok())
            .flatten();
        Ok(Some(StoredStats {
            uuid: manifest.uuid.iter().map(|byte| format!("{byte:02x}")).collect(),
            owner_epoch: manifest.owner_epoch,
            clean: manifest.clean,
            last_owner: manifest.owner,
            index: manifest.index,
            capacity_bytes: manifest.capacity,
            segment_bytes: manifest.segment_bytes,
            segments: paths.iter().map(|path| path.segments).sum(),
            paths,
            scopes: registry.as_ref().map(|registry| registry.scopes.len() as u64),
            first_scopes: registry.as_ref().map(first_scopes).unwrap_or_default(),
            checkpoint: index
                .and_then(|index| index.checkpoint)
                .map(|(runs, pages)| StoredCheckpoint { runs, pages }),
            journal_bytes: index.map(|index| index.journal_bytes),
        }))
    }

    fn stored_volumes(&self, manifest: &Manifest) -> Vec<StoredVolume> {
        let there = (0..=u8::MAX).zip(&manifest.volumes).filter(|(_, volume)| !volume.is_retired());
        there
            .map(|(number, volume)| {
                let at = self.stored_volume_state(manifest, number);
                StoredVolume {
                    dir: volume.dir.clone(),
                    draining: volume.draining,
                    segments: self.segment_files(&at.dir()),
                    absent: at.absence().map(str::to_owned),
                }
            })
            .collect()
    }

    /// Number of segment files in `dir`; zero if `dir` cannot be read, or is empty.
    fn segment_files(&self, dir: &Path) -> u64 {
        let names = self.medium.list(dir).unwrap_or_default();
        names.iter().filter(|name| Segments::is_segment(name)).count() as u64
    }
}

fn first_scopes(registry: &ScopeRegistry) -> Vec<StoredScope> {
    let shown = registry.scopes.iter().take(SCOPES_SHOWN);
    shown
        .map(|(slot, scope)| StoredScope {
            id: scope.id().to_string(),
            model: scope.model.clone(),
            quota_bytes: registry.settings.get(slot).and_then(|settings| settings.quota_bytes),
        })
        .collect()
}
