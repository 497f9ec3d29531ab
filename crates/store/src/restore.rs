//! Restores a store whose own directory is lost, with the pages in its other directories, from the
//! copies of the manifest and the scope registry in these directories.
//!
//! A restored store begins as a manifest with owner epoch 0, which only a restore opens. The last
//! step of the restore writes a manifest with an owner epoch above 0. Until then a restore that was
//! interrupted is begun again, and the copies are not changed.

use crate::core::{StoreCore, Verification};
use crate::directory::{COPY_OF_MANIFEST, Directory, SEGMENTS, VOLUMES_MAX};
use crate::options::{IndexKind, Options};
use crate::volume_copies::COPY_OF_SCOPES;
use ritornello_format::{
    Error, ErrorKind, Manifest, Result, ScopeRegistry, VolumeMarker, VolumeRecord,
};
use ritornello_index::Backend;
use ritornello_medium::Medium;
use serde::Serialize;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A restored store skips this number of owner epochs and of upper halves of generations: owners
/// that the newest copy does not know, and runs in absent directories, may have used some of them.
const OWNERS_SKIPPED: u32 = 1 << 16;

/// A restore whose directories were checked.
#[derive(Debug)]
pub struct Restore {
    directory: Directory,
    /// The manifest to begin with, of owner epoch 0.
    manifest: Manifest,
    scopes: ScopeRegistry,
    /// The owner epoch of the restored store.
    owner_epoch: u32,
}

/// The result of [`Restore::run`].
#[derive(Debug, Serialize)]
pub struct Restored {
    /// The result of the search for runs in the segments of the other directories.
    #[serde(flatten)]
    pub verification: Verification,
    /// Number of scopes in the restored store's registry.
    pub scopes: u64,
    /// Absent directories of the store, which the restore did not use.
    pub absent: Vec<String>,
}

/// A remaining directory of the store to restore: what its marker and its copies say.
struct Survivor {
    /// The directory's name in the manifest.
    name: String,
    store: [u8; 16],
    volume: u8,
    manifest: Option<Manifest>,
    scopes: Option<ScopeRegistry>,
}

impl Restore {
    /// Reads the copies in `others`, directories of the store whose own directory is lost, to
    /// restore the store in `dir`. Changes nothing.
    ///
    /// # Errors
    /// `Invalid` if `dir` holds a store, `index`, `segments` or a file that no store has, unless a
    /// restore of this store was interrupted there; if `others` are not directories of one store,
    /// or one is inside another; if none has an intact copy; if a copy is of another format
    /// version; if the store's index is `memory` or not compiled in. File-system errors.
    pub fn plan(medium: &Arc<dyn Medium>, dir: &Path, others: &[PathBuf]) -> Result<Self> {
        let directory = Directory::new(Arc::clone(medium), dir);
        let further_dirs = Some(others.to_vec());
        directory.check_listed(&Options { further_dirs, ..Options::new(dir) })?;
        let survivors = others.iter().map(|other| Survivor::read(&directory, other));
        let survivors = survivors.collect::<Result<Vec<_>>>()?;
        let stores: BTreeSet<[u8; 16]> = survivors.iter().map(|other| other.store).collect();
        let numbers: BTreeSet<u8> = survivors.iter().map(|other| other.volume).collect();
        if stores.len() > 1 || numbers.len() < survivors.len() {
            return Err(Error::invalid(
                "the directories are of different stores, or two hold the same volume: name the \
                 directories of one store",
            )
            .with("stores", stores.len()));
        }
        let manifests = survivors.iter().filter_map(|other| other.manifest.as_ref());
        let newest = manifests.max_by_key(|copy| age(copy));
        let (Some(newest), Some(scopes)) = (newest, merge_scopes(&survivors)) else {
            return Err(Error::invalid(
                "no directory has an intact copy of the manifest and the scopes, so the store \
                 cannot be restored: empty the directories to create a new store",
            )
            .with("files", [COPY_OF_MANIFEST, COPY_OF_SCOPES].join(", ")));
        };
        directory.check_restorable(newest.uuid)?;
        if IndexKind::stored(&newest.index)? == IndexKind::Memory {
            return Err(Error::invalid(
                "the store's index `memory` keeps no page of an earlier process: empty the \
                 directories to create a new store",
            ));
        }
        let manifest = begun(newest, &survivors, dir)?;
        let owner_epoch = newest.owner_epoch.saturating_add(OWNERS_SKIPPED);
        Ok(Self { directory, manifest, scopes, owner_epoch })
    }

    /// Restores the store. The caller holds the lock of its directory. `progress` receives the
    /// number of bytes searched and the total.
    ///
    /// # Errors
    /// Errors of opening a store; file-system errors. The restore can be repeated.
    pub fn run(self, progress: &mut dyn FnMut(u64, u64)) -> Result<Restored> {
        let Self { directory, manifest, scopes, owner_epoch } = self;
        directory.medium.create_dir(directory.path()).map_err(|e| directory.refused(e))?;
        directory.remove_begun().map_err(|error| directory.refused(error))?;
        directory.write_registry(&scopes.encode())?;
        directory.write_manifest(&manifest)?;
        let options = Options { background_threads: false, ..Options::new(directory.path()) };
        let core = StoreCore::open_as(&directory, manifest, &options, Arc::new(|_| false))?;
        let verification = core.verify(true, progress)?;
        let stats = core.stats()?;
        core.close()?;
        let mut manifest = directory.manifest()?.ok_or_else(|| {
            Error::fatal("the manifest disappeared during the restore: restore again")
        })?;
        let found = (verification.generation_max >> 32) as u32;
        manifest.generations = manifest.generations.max(found).saturating_add(OWNERS_SKIPPED);
        manifest.owner_epoch = owner_epoch;
        directory.write_manifest(&manifest)?;
        directory.claim_volumes(&manifest);
        let absent = stats.paths.into_iter().filter(|path| path.absent.is_some());
        let absent = absent.map(|path| path.dir).collect();
        Ok(Restored { verification, scopes: stats.scopes, absent })
    }
}

impl Survivor {
    fn read(directory: &Directory, path: &Path) -> Result<Self> {
        let name = directory.volume_name(path)?;
        let dir = Path::new(&name);
        let here = |error: Error| error.with("dir", path.display());
        let marker = directory.marker_in(dir).map_err(|error| here(error.into()))?;
        let Some(marker) = marker.transpose().map_err(here)? else {
            return Err(here(Error::invalid(
                "the directory has no marker VOLUME: mount its disk, or leave the directory out",
            )));
        };
        let read = |name| directory.read_in(dir, name).map_err(|error| here(error.into()));
        let manifest = intact(read(COPY_OF_MANIFEST)?, Manifest::decode).map_err(here)?;
        let scopes = intact(read(COPY_OF_SCOPES)?, ScopeRegistry::decode).map_err(here)?;
        if manifest.as_ref().is_some_and(|manifest| manifest.uuid != marker.store) {
            return Err(here(Error::invalid(
                "the directory has the marker of one store and the manifest of another: leave the \
                 directory out",
            )));
        }
        Ok(Self {
            name,
            store: marker.store,
            volume: marker.volume,
            manifest,
            scopes: scopes.map(|stored| stored.registry),
        })
    }
}

/// Decodes a copy; `None` if it is missing or damaged.
fn intact<T>(bytes: Option<Vec<u8>>, decode: impl Fn(&[u8]) -> Result<T>) -> Result<Option<T>> {
    match bytes.map(|bytes| decode(&bytes)).transpose() {
        Err(error) if error.kind() != ErrorKind::Invalid => {
            tracing::warn!(%error, "a copy of manifest or scopes cannot be read and is not used");
            Ok(None)
        }
        decoded => decoded,
    }
}

/// Merges the copies that the last owner wrote; `None` if there are none.
///
/// If a copy has no scope under a slot below the copy's next slot, the scope of this slot was
/// dropped. The copies of earlier owners are left out: after an earlier restore their slots may
/// name other scopes.
fn merge_scopes(survivors: &[Survivor]) -> Option<ScopeRegistry> {
    let epoch_of = |other: &Survivor| {
        let manifest = other.manifest.as_ref().filter(|_| other.scopes.is_some());
        manifest.map(|manifest| manifest.owner_epoch)
    };
    let last = survivors.iter().filter_map(epoch_of).max()?;
    let newest = survivors.iter().filter(|other| epoch_of(other) == Some(last));
    let newest: Vec<&ScopeRegistry> = newest.filter_map(|other| other.scopes.as_ref()).collect();
    let mut merged = (*newest.iter().max_by_key(|copy| copy.next)?).clone();
    merged.scopes.retain(|slot, _| {
        newest.iter().all(|copy| slot.0 >= copy.next || copy.scopes.contains_key(slot))
    });
    let live = &merged.scopes;
    merged.settings.retain(|slot, _| live.contains_key(slot));
    Some(merged)
}

/// Returns a key that orders copies of the manifest, oldest first: by owner epoch and generations.
/// Copies of one owner have equal epochs, and almost always equal generations, so the key continues
/// with the number of volumes and the number of retired volumes, which both never decrease, and
/// with the sum of the volumes' first segment numbers, which decreases only when a volume is
/// retired.
fn age(copy: &Manifest) -> (u32, u32, usize, usize, u64) {
    let volumes = &copy.volumes;
    let retired = volumes.iter().filter(|volume| volume.is_retired()).count();
    let numbers = volumes.iter().map(|volume| u64::from(volume.first_segment)).sum();
    (copy.owner_epoch, copy.generations, volumes.len(), retired, numbers)
}

/// The manifest with which the restore of a store in `dir` begins: volumes in the lost directory or
/// in `dir` are retired, `survivors` get the paths at which they are now, and the segments of the
/// other volumes must be searched for runs when these volumes return. A volume in `dir` is added if
/// a retired volume took runs, or if no other volume takes runs.
fn begun(newest: &Manifest, survivors: &[Survivor], dir: &Path) -> Result<Manifest> {
    let mut volumes = newest.volumes.clone();
    let mut took_runs = false;
    for volume in &mut volumes {
        if Path::new(&volume.dir).is_relative() || Path::new(&volume.dir).starts_with(dir) {
            took_runs |= volume.is_active();
            *volume = VolumeRecord::default();
        }
    }
    for volume in volumes.iter_mut().filter(|volume| !volume.is_retired()) {
        volume.unsearched = true;
    }
    for survivor in survivors {
        let at = usize::from(survivor.volume);
        if volumes.len() <= at {
            volumes.resize(at + 1, VolumeRecord::default());
        }
        survivor.name.clone_into(&mut volumes[at].dir);
        volumes[at].marked = true;
        volumes[at].unsearched = false;
    }
    if took_runs || !volumes.iter().any(VolumeRecord::is_active) {
        if volumes.len() >= VOLUMES_MAX {
            return Err(Error::invalid(
                "a store has at most 256 directories, including removed ones: make a new store",
            ));
        }
        volumes.push(VolumeRecord::new(SEGMENTS));
    }
    Ok(Manifest {
        owner_epoch: 0,
        generations: newest.generations.max(1),
        clean: false,
        owner: String::new(),
        volumes,
        ..newest.clone()
    })
}

impl Directory {
    /// Refuses the former directory of a store that was restored in another directory: the restored
    /// store uses the `volumes` now. Two owners would overwrite each other's pages.
    ///
    /// # Errors
    /// `Invalid` if a volume has a copy of a manifest of the restored store.
    pub fn check_not_restored(&self, manifest: &Manifest, volumes: &[PathBuf]) -> Result<()> {
        if manifest.is_being_restored() {
            return Ok(());
        }
        // A copy is never later than the manifest, and a restored store skips `OWNERS_SKIPPED`
        // owners after the newest copy, which may be older than the manifest. A copy that is more
        // than half of `OWNERS_SKIPPED` owners ahead of the manifest is therefore of the restored
        // store.
        let last = manifest.owner_epoch.saturating_add(OWNERS_SKIPPED / 2);
        let is_restored = |dir: &&PathBuf| {
            let copy = self.copied_manifest(dir, manifest.uuid);
            copy.is_some_and(|copy| copy.owner_epoch > last)
        };
        volumes.iter().find(is_restored).map_or(Ok(()), |dir| {
            Err(Error::invalid(
                "this store was restored in another directory, which uses its volumes now: name \
                 that directory, and remove this one (to give up the restored store instead, \
                 remove the files VOLUME.manifest)",
            )
            .with("dir", self.path().display())
            .with("volume", dir.display()))
        })
    }

    /// Replaces the copies in the volumes outside a restored store, so that a further restore, and
    /// an owner of the former directory, find the restored store's owner epoch there. Copies that
    /// cannot be written now are written by the next owner.
    fn claim_volumes(&self, manifest: &Manifest) {
        let Ok(Some(scopes)) = self.registry() else { return };
        let (files, owner) = ([manifest.encode(), scopes.registry.encode()], manifest.owner_epoch);
        for (number, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
            let dir = Path::new(&volume.dir);
            let marker = VolumeMarker { store: manifest.uuid, volume: number };
            if dir.is_absolute()
                && let Err(error) = self.write_copies(dir, marker, owner, &files[0], &files[1])
            {
                tracing::debug!(%error, dir = volume.dir, "the copies could not be written");
            }
        }
    }

    /// Refuses a directory that holds a store, except an interrupted restore of `store`, or that
    /// holds `index` or `segments` without a manifest.
    fn check_restorable(&self, store: [u8; 16]) -> Result<()> {
        let names = match self.medium.list(self.path()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            names => names.map_err(|error| self.refused(error))?,
        };
        let is_free = match self.manifest()? {
            Some(found) => found.is_being_restored() && found.uuid == store,
            None => !names.iter().any(|name| name == "index" || name == SEGMENTS),
        };
        if is_free {
            return Ok(());
        }
        Err(Error::invalid("the directory is not empty: name an empty or new directory")
            .with("dir", self.path().display()))
    }

    /// Removes the files of an interrupted restore that the next restore would misread.
    fn remove_begun(&self) -> io::Result<()> {
        for index in [Backend::Run, Backend::Lsm] {
            index.remove(self.medium.as_ref(), &self.index())?;
        }
        // Remove the marker, because the volume may have another number in this restore.
        let segments = self.path().join(SEGMENTS);
        match self.medium.list(&segments) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(_) => self.unmark(&segments),
        }
    }
}
