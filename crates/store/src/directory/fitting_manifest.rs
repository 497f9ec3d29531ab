//! The manifest that fits the [`Options`] of a process: the stored manifest, compared with the
//! options, or the manifest of a new store.

use super::{COPY_OF_MANIFEST, Directory, SEGMENTS, VOLUMES_MAX};
use crate::budget::Budget;
use crate::options::{IndexKind, Options, SEGMENT_BYTES};
use ritornello_format::{Error, ErrorKind, Manifest, Result, VolumeMarker, VolumeRecord};
use ritornello_volume::segments::Segments;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::{io, iter};

impl Directory {
    /// Returns the stored manifest, and logs the differences between `options` and this manifest,
    /// which prevails. Without a store, or if its creation was interrupted, returns a new manifest,
    /// which is not written yet. Makes the directory if it does not exist.
    ///
    /// # Errors
    /// Errors of [`Self::manifest`]; `Invalid` if a restore of the store was interrupted, if the
    /// stored index is unknown, if a directory that `options` list cannot be used, or if `options`
    /// do not suffice to create a store; `Retry` if the store does not exist, and the disk of a
    /// listed directory seems not to be mounted; file-system errors.
    pub fn manifest_for(&self, options: &Options) -> Result<Manifest> {
        self.manifest_as(options, Self::differences)
    }

    /// Like [`Self::manifest_for`], for an owner that will resize the store to the capacity in
    /// `options` and convert its index.
    pub(crate) fn manifest_to_resize(&self, options: &Options) -> Result<Manifest> {
        self.manifest_as(options, Self::lasting_differences)
    }

    fn manifest_as(
        &self,
        options: &Options,
        differences: impl Fn(&Self, &Options, &Manifest) -> Result<Vec<String>>,
    ) -> Result<Manifest> {
        self.check_listed(options)?;
        self.medium.create_dir(&self.path).map_err(|e| self.refused(e))?;
        let found = self.manifest().map_err(|error| match self.restoring_command(options) {
            Some(command) if error.kind() == ErrorKind::Fatal => {
                error.with("restore", format!("`{command}`"))
            }
            _ => error,
        });
        let stored = match found? {
            Some(stored) if stored.owner_epoch > 0 => stored,
            Some(begun) if begun.is_being_restored() => {
                return Err(self.interrupted_restore());
            }
            begun => return self.new_manifest(options, begun),
        };
        IndexKind::stored(&stored.index).map_err(|error| error.with("dir", self.display()))?;
        for difference in differences(self, options, &stored)? {
            tracing::warn!(dir = %self.display(), "{difference}");
        }
        Ok(stored)
    }

    /// Describes, for a process that does not own the store, the `options` that do not apply, with
    /// one sentence for each.
    fn differences(&self, options: &Options, stored: &Manifest) -> Result<Vec<String>> {
        let mut differences = self.lasting_differences(options, stored)?;
        if let Some(given) = options.capacity.filter(|given| *given != stored.capacity) {
            differences.push(format!(
                "this process was given another capacity ({given} bytes) than the store has ({} \
                 bytes), and the store keeps its capacity, which `ritornello resize` changes",
                stored.capacity
            ));
        }
        if let Some(given) = options.index.filter(|given| given.word() != stored.index) {
            differences.push(format!(
                "this process was given another index ({}) than the store has ({}), and the store \
                 keeps its index: give no index, or close the store and run `ritornello \
                 convert-index DIR --to {0}`",
                given.word(),
                stored.index
            ));
        }
        Ok(differences)
    }

    /// Like [`Self::differences`], for an owner. Omits capacity and index, because an owner applies
    /// them.
    fn lasting_differences(&self, options: &Options, stored: &Manifest) -> Result<Vec<String>> {
        let mut differences = Vec::new();
        if let Some(given) = options.segment_bytes.filter(|given| *given != stored.segment_bytes) {
            differences.push(format!(
                "this process was given another segment size ({given} bytes) than the store was \
                 made with ({} bytes), and the store keeps its segment size: give no segment size, \
                 or make a new store",
                stored.segment_bytes
            ));
        }
        if !options.paths.is_empty() && !self.has_paths(options, stored)? {
            let there: Vec<&str> =
                stored.volumes.iter().map(|volume| volume.dir.as_str()).collect();
            differences.push(format!(
                "this process was given another set of paths ({:?}) than the store has ({}), and \
                 the store keeps its paths: give no paths, or change those of the store with \
                 `ritornello paths add` and `ritornello paths drain`",
                options.paths,
                there.join(":")
            ));
        }
        Ok(differences)
    }

    /// The manifest of a new store. An interrupted creation starts again under the same UUID,
    /// because directories may be marked with it. `begun`, the manifest of the interrupted
    /// creation, supplies what `options` leave out.
    fn new_manifest(&self, options: &Options, begun: Option<Manifest>) -> Result<Manifest> {
        self.check_new(options)?;
        let begun = begun.as_ref();
        let capacity = options.capacity.or(begun.map(|begun| begun.capacity)).ok_or_else(|| {
            Error::invalid("there is no store here yet: give a capacity to create one")
                .with("dir", self.display())
        })?;
        let uuid = begun.map_or_else(random_bytes, |begun| Ok(begun.uuid))?;
        let volumes = match begun {
            Some(begun) if options.paths.is_empty() && options.further_dirs.is_none() => {
                begun.volumes.clone()
            }
            _ => self.new_volumes(options, uuid)?,
        };
        let index = match (options.index, begun) {
            (None, Some(begun)) => begun.index.clone(),
            (given, _) => given.unwrap_or_default().word().to_owned(),
        };
        let segment_bytes = options.segment_bytes.or(begun.map(|begun| begun.segment_bytes));
        let manifest = Manifest {
            uuid,
            owner_epoch: 0,
            generations: 0,
            clean: true,
            segment_bytes: segment_bytes.unwrap_or(SEGMENT_BYTES),
            capacity,
            index,
            volumes,
            owner: String::new(),
        };
        Budget::divide(capacity, manifest.segment_bytes)?;
        self.check_memory(&manifest, capacity)?;
        Ok(manifest)
    }

    fn volumes(&self, options: &Options) -> Result<Vec<VolumeRecord>> {
        if options.paths.is_empty() {
            let further = options.further().iter().map(|path| self.volume_name(path));
            let names = iter::once(Ok(SEGMENTS.to_owned())).chain(further);
            return names.map(|name| name.map(VolumeRecord::new)).collect();
        }
        if options.paths.len() > VOLUMES_MAX {
            return Err(Error::invalid("a store spreads over at most 256 paths: name fewer"));
        }
        let names: BTreeSet<String> =
            options.paths.iter().map(|path| self.volume_name(path)).collect::<Result<_>>()?;
        let real: BTreeSet<PathBuf> = names.iter().map(|name| self.real(name)).collect();
        if real.len() == options.paths.len() {
            return Ok(names.into_iter().map(VolumeRecord::new).collect());
        }
        Err(Error::invalid(
            "the same directory is named twice, maybe by another name: name each disk once",
        )
        .with("paths", format!("{:?}", options.paths)))
    }

    /// Returns the volumes of a new store. The directories that `options` name must hold no
    /// segments and no marker of another store. The directory `segments` in the store's directory,
    /// which is used if `paths` is empty, may hold segments and a marker.
    fn new_volumes(&self, options: &Options, uuid: [u8; 16]) -> Result<Vec<VolumeRecord>> {
        let volumes = self.volumes(options)?;
        for volume in &volumes {
            let dir = self.path.join(&volume.dir);
            let named = volume.dir != SEGMENTS || !options.paths.is_empty();
            self.check_owner(&dir)?;
            let names = match self.medium.list(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                names => names.map_err(|e| self.refused(e).with("path", dir.display()))?,
            };
            let is_volume = |name: &&std::ffi::OsString| {
                Segments::is_segment(name)
                    || (name.as_os_str() == VolumeMarker::FILE && !self.is_marked_by(&dir, uuid))
            };
            let found = names.iter().find(is_volume);
            if let Some(found) = found.filter(|_| named) {
                let mut advice = "the directory holds a volume of another store: name an empty or \
                                  new directory; if the volume is this store's, the store's own \
                                  directory is wrong: mount or name the right one"
                    .to_owned();
                if let Some(command) = self.restoring_command(options) {
                    advice += &format!(
                        ", or if its disk is lost, stop all processes of the store and type `{command}`"
                    );
                }
                return Err(Error::invalid(advice)
                    .with("dir", dir.display())
                    .with("found", found.to_string_lossy()));
            }
        }
        Ok(volumes)
    }

    /// Returns the command that restores the store with the pages in the listed directories; `None`
    /// if no listed directory has a copy of the manifest.
    fn restoring_command(&self, options: &Options) -> Option<String> {
        let has_copy = |dir: &&PathBuf| {
            let found = self.read_in(dir, COPY_OF_MANIFEST).ok().flatten();
            found.is_some_and(|bytes| Manifest::recognize(&bytes))
        };
        let others: Vec<String> = options
            .further()
            .iter()
            .filter(has_copy)
            .map(|dir| dir.display().to_string())
            .collect();
        let command = format!("ritornello paths restore {} {}", self.display(), others.join(" "));
        (!others.is_empty()).then_some(command)
    }

    /// Whether the paths in `options` are the store's paths. The options may name or omit a path
    /// that is being drained.
    fn has_paths(&self, options: &Options, stored: &Manifest) -> Result<bool> {
        let given: BTreeSet<PathBuf> =
            self.volumes(options)?.iter().map(|volume| self.real(&volume.dir)).collect();
        let there = stored.volumes.iter().filter(|volume| !volume.is_retired());
        let has: BTreeSet<PathBuf> = there.map(|volume| self.real(&volume.dir)).collect();
        let mut active = stored.volumes.iter().filter(|volume| volume.is_active());
        Ok(given.is_subset(&has) && active.all(|volume| given.contains(&self.real(&volume.dir))))
    }
}

fn random_bytes() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::retry("the kernel gave no random bytes").because(io::Error::from(e)))?;
    Ok(bytes)
}
