//! Reads the state of a store from its files, while no process owns the store.

use crate::directory::Directory;
use crate::stats::SCOPES_SHOWN;
use ritornello_format::{Error, Manifest, Result, ScopeRegistry};
use ritornello_index::{RunIndex, StoredIndex};
use ritornello_volume::segments::Segments;
use serde::Serialize;
use std::io;
use std::path::Path;

/// A store as its files describe it, without a recovery. The fields have the meaning of the fields
/// of [`CatalogStats`](crate::CatalogStats) with the same names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoredStats {
    /// Identity of the store, as hexadecimal digits.
    pub uuid: String,
    /// Number of openings by an owner, plus 65,536 for each restore; zero if the creation or
    /// restore of the store has not ended.
    pub owner_epoch: u32,
    /// Whether the last owner closed the store when all changes were durable, no volume or segment
    /// was absent, and no write of the owner or of a dead process could be in flight; also true for
    /// a store that no owner has opened yet.
    pub clean: bool,
    /// Host, boot and process id of the last owner.
    pub last_owner: String,
    /// Backend of the index.
    pub index: String,
    /// Capacity in bytes: the maximum of segments and metadata together.
    pub capacity_bytes: u64,
    /// Bytes per segment file.
    pub segment_bytes: u64,
    /// Segment files in the directories that are present.
    pub segments: u64,
    /// The directories of the segments.
    pub paths: Vec<StoredVolume>,
    /// Registered scopes; `None` if the registry is damaged or cannot be read, or is missing
    /// although the store has segments or pages.
    pub scopes: Option<u64>,
    /// The scopes that were registered first, at most [`SCOPES_SHOWN`].
    pub first_scopes: Vec<StoredScope>,
    /// Contents of the newest checkpoint of the index whose header and end are intact; the frames
    /// between them are not read. `None` without such a checkpoint, or if `journal_bytes` is
    /// `None`.
    pub checkpoint: Option<StoredCheckpoint>,
    /// Bytes of the journal records whose changes may be missing in the checkpoint; without a
    /// checkpoint, bytes of all journal records. `None` if the index is not `run`, if its files
    /// cannot be read, if no checkpoint is intact and the journal does not begin with the first
    /// change, or if the creation or restore of the store has not ended.
    pub journal_bytes: Option<u64>,
    /// Files and directories that are damaged, missing or unreadable, some with what the next owner
    /// does about them. `paths` says why directories are absent.
    pub problems: Vec<String>,
    /// Why no process can open the store, as far as its files tell; `None` if no reason is known.
    /// `problems` contains this text too.
    #[serde(skip)]
    pub unopenable: Option<String>,
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
    /// `None` if no store exists. Opens no index and takes no lock: if an owner changes the store
    /// during the call, the fields may describe different moments.
    ///
    /// # Errors
    /// Errors of [`Directory::manifest`].
    pub fn stored_stats(&self) -> Result<Option<StoredStats>> {
        let Some(manifest) = self.manifest()? else { return Ok(None) };
        let mut problems = Vec::new();
        let paths = self.stored_volumes(&manifest, &mut problems);
        let index = self.stored_index(&manifest, &mut problems);
        // A new store has no registry. A scope is registered before its first page is put, and the
        // first put makes the first segment, so a store with segments or pages has a registry.
        let has_pages = paths.iter().any(|path| path.segments > 0)
            || index.and_then(|index| index.checkpoint).is_some_and(|(_, pages)| pages > 0);
        let (registry, unreadable) = self.stored_scopes(has_pages, &mut problems);
        let refusal = self.stored_refusal(&manifest).map(|error| error.to_string());
        problems.extend(refusal.clone());
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
            problems,
            unopenable: refusal.or(unreadable),
        }))
    }

    /// The contents of the index's files. `None`, with a problem, if the files cannot be read, or
    /// if no checkpoint is intact and the journal does not begin with the first change. `None`
    /// without a problem if the index is not `run`, or if the creation or restore of the store has
    /// not ended, because the store may then have no index.
    fn stored_index(&self, manifest: &Manifest, problems: &mut Vec<String>) -> Option<StoredIndex> {
        if manifest.index != "run" || manifest.owner_epoch == 0 {
            return None;
        }
        match RunIndex::stored(self.medium.as_ref(), &self.index()) {
            Ok(index) if index.lacks_checkpoint => {
                problems.push(
                    "no checkpoint of the index is intact: the next owner finds the pages of the \
                     journal only"
                        .to_owned(),
                );
                None
            }
            Ok(index) => Some(index),
            Err(error) => {
                problems.push(format!("the index cannot be read: {error}"));
                None
            }
        }
    }

    /// The error with which an opening refuses the store, because a restore of it was interrupted,
    /// or because it was restored in another directory.
    fn stored_refusal(&self, manifest: &Manifest) -> Option<Error> {
        if manifest.is_being_restored() {
            return Some(self.interrupted_restore());
        }
        let numbers = (0..=u8::MAX).zip(&manifest.volumes).map(|(number, _)| number);
        let dirs = numbers.map(|number| self.stored_volume_state(manifest, number).dir());
        let dirs: Vec<_> = dirs.filter(|dir| !dir.as_os_str().is_empty()).collect();
        self.check_not_restored(manifest, &dirs).err()
    }

    /// The scope registry; `None` if it is damaged or cannot be read, or if it is missing and
    /// `has_pages` is set. Returns in addition the error of a registry that cannot be read, because
    /// every opening fails on it.
    fn stored_scopes(
        &self,
        has_pages: bool,
        problems: &mut Vec<String>,
    ) -> (Option<ScopeRegistry>, Option<String>) {
        let problem = match self.registry() {
            Ok(Some(stored)) if stored.head_bytes > 0 || !has_pages => {
                return (Some(stored.registry), None);
            }
            Ok(Some(_)) => "SCOPES is missing: the next owner drops all pages".to_owned(),
            Ok(None) => "SCOPES is damaged: the next owner drops all pages".to_owned(),
            Err(error) => {
                let problem = format!("SCOPES cannot be read: {error}");
                problems.push(problem.clone());
                return (None, Some(problem));
            }
        };
        problems.push(problem);
        (None, None)
    }

    fn stored_volumes(&self, manifest: &Manifest, problems: &mut Vec<String>) -> Vec<StoredVolume> {
        let volumes = (0..=u8::MAX).zip(&manifest.volumes);
        volumes
            .filter(|(_, volume)| !volume.is_retired())
            .map(|(number, volume)| {
                let at = self.stored_volume_state(manifest, number);
                let absent = at.absence().map(str::to_owned);
                let files = if absent.is_some() { Ok(0) } else { self.segment_files(&at.dir()) };
                let segments = files.unwrap_or_else(|error| {
                    problems.push(format!("{}: cannot be listed: {error}", volume.dir));
                    0
                });
                StoredVolume {
                    dir: volume.dir.clone(),
                    draining: volume.draining,
                    segments,
                    absent,
                }
            })
            .collect()
    }

    /// Number of segment files in `dir`.
    fn segment_files(&self, dir: &Path) -> io::Result<u64> {
        let names = self.medium.list(dir)?;
        Ok(names.iter().filter(|name| Segments::is_segment(name)).count() as u64)
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
