//! The directory of a store: its files besides segments and index, and how they are replaced.
//!
//! ```text
//! MANIFEST       what the store is          replaced whole at every open
//! SCOPES         the scope registry         replaced whole at every change
//! RESERVATIONS   space clients write to     appended, cut when nothing is outstanding
//! index/         the index backend's own
//! segments/      seg-000000 ...             or in the directories of `paths`
//! ```

use crate::budget::Budget;
use crate::memory::check_memory;
use crate::options::{IndexKind, Options, SEGMENT_BYTES};
use ritornello_format::{Error, ErrorKind, Manifest, Result, ScopeRegistry, VolumeRecord};
use ritornello_medium::{Access, Medium, MediumFile};
use ritornello_volume::segments::{IoChoice, Segments, SegmentsConfig};
use std::collections::BTreeSet;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Names that may lie in a directory without making it somebody else's.
const OURS: [&str; 11] = [
    "MANIFEST",
    "MANIFEST.new",
    "SCOPES",
    "SCOPES.new",
    "RESERVATIONS",
    "RESERVATIONS.new",
    "LOCK",
    "clients",
    "index",
    "segments",
    "owner.sock",
];

/// The volume of a store without `paths`.
const SEGMENTS: &str = "segments";
/// Volumes at most, those that are no more included.
pub(crate) const VOLUMES_MAX: usize = 256;

/// The files of one store.
#[derive(Clone, Debug)]
pub struct Directory {
    medium: Arc<dyn Medium>,
    path: PathBuf,
}

impl Directory {
    /// The directory at `path`.
    #[must_use]
    pub fn new(medium: Arc<dyn Medium>, path: &Path) -> Self {
        Self { medium, path: path.to_owned() }
    }

    /// The manifest, or `None` where no store was made yet.
    ///
    /// # Errors
    /// See [`Manifest::decode`]; `Invalid` for a directory that holds other things.
    pub fn manifest(&self) -> Result<Option<Manifest>> {
        if let Some(bytes) = self.read("MANIFEST")? {
            return Manifest::decode(&bytes).map(Some).map_err(|e| e.with("dir", self.display()));
        }
        let names = self.medium.list(&self.path).map_err(|e| self.refused(e))?;
        let foreign = names
            .iter()
            .map(|name| name.to_string_lossy())
            .find(|name| !OURS.contains(&name.as_ref()) && !name.starts_with("owner.sock"));
        match foreign {
            None => Ok(None),
            Some(name) => Err(Error::invalid(
                "this directory holds something that is not a Ritornello store: \
                 name an empty or new one",
            )
            .with("dir", self.display())
            .with("found", name)),
        }
    }

    /// Makes the manifest of a new store, or checks `options` against the one that is there.
    ///
    /// # Errors
    /// `Invalid` where the options do not fit the store or are not enough to make one.
    pub fn manifest_for(&self, options: &Options) -> Result<Manifest> {
        let stored = self.manifest_to_resize(options)?;
        if let Some(given) = options.index.filter(|given| given.word() != stored.index) {
            return Err(Error::invalid(format!(
                "this store is open with another index: leave it out, or close the store and \
                 run `ritornello convert-index DIR --to {}`",
                given.word()
            ))
            .with("stored", stored.index)
            .with("given", given.word())
            .with("dir", self.display()));
        }
        match options.capacity.filter(|given| *given != stored.capacity) {
            None => Ok(stored),
            Some(given) => Err(Error::invalid(
                "this store is open with another capacity: leave it out, or resize the store",
            )
            .with("stored", stored.capacity)
            .with("given", given)
            .with("dir", self.display())),
        }
    }

    /// Likewise, for an owner that will resize the store to the capacity that `options` name, and
    /// convert its index.
    pub(crate) fn manifest_to_resize(&self, options: &Options) -> Result<Manifest> {
        self.medium.create_dir(&self.path).map_err(|e| self.refused(e))?;
        let Some(stored) = self.manifest()? else {
            let capacity = options.capacity.ok_or_else(|| {
                Error::invalid("there is no store here yet: give a capacity to make one")
                    .with("dir", self.display())
            })?;
            let manifest = Manifest {
                uuid: random_bytes()?,
                epoch: 0,
                segment_bytes: options.segment_bytes.unwrap_or(SEGMENT_BYTES),
                capacity,
                index: options.index.unwrap_or_default().word().to_owned(),
                volumes: self.new_volumes(options)?,
                owner: String::new(),
            };
            Budget::divide(capacity, manifest.segment_bytes)?;
            self.check_memory(&manifest, capacity)?;
            return Ok(manifest);
        };
        let fixed = |what: &'static str, stored: &dyn std::fmt::Display, given: String| {
            Error::invalid(format!(
                "this store was made with another {what}, and it cannot be changed: \
                 leave it out, or make a new store"
            ))
            .with("stored", stored)
            .with("given", given)
            .with("dir", self.display())
        };
        if let Some(given) = options.capacity {
            Budget::divide(given, stored.segment_bytes)?;
        }
        if let Some(given) = options.segment_bytes.filter(|given| *given != stored.segment_bytes) {
            return Err(fixed("segment size", &stored.segment_bytes, given.to_string()));
        }
        if !options.paths.is_empty() {
            self.check_paths(options, &stored)?;
        }
        IndexKind::stored(&stored.index).map_err(|error| error.with("dir", self.display()))?;
        Ok(stored)
    }

    /// Whether `bytes` more fit into the volumes of a store as far as those are in memory: each has
    /// its share of them.
    pub(crate) fn check_memory(&self, manifest: &Manifest, bytes: u64) -> Result<()> {
        let dirs = manifest.directories(&self.path);
        let share = bytes / (dirs.len() as u64).max(1);
        for dir in dirs {
            // One that is not made yet will be where its parent is.
            let room = dir.ancestors().find_map(|dir| self.medium.room(dir).ok());
            let fits = room.map_or(Ok(()), |room| check_memory(&room, share));
            fits.map_err(|error| error.with("dir", dir.display()))?;
        }
        Ok(())
    }

    fn volumes(&self, options: &Options) -> Result<Vec<VolumeRecord>> {
        if options.paths.is_empty() {
            return Ok(vec![VolumeRecord::new(SEGMENTS)]);
        }
        if options.paths.len() > VOLUMES_MAX {
            return Err(Error::invalid("a store spreads over at most 256 paths"));
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

    /// Those of a store that is to be made: none may hold segments, which were somebody else's.
    fn new_volumes(&self, options: &Options) -> Result<Vec<VolumeRecord>> {
        let volumes = self.volumes(options)?;
        for dir in volumes.iter().map(|volume| self.path.join(&volume.dir)) {
            let names = match self.medium.list(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                names => names.map_err(|e| self.refused(e).with("path", dir.display()))?,
            };
            let found = names.iter().find(|name| Segments::is_segment(name));
            if let Some(found) = found.filter(|_| !options.paths.is_empty()) {
                return Err(Error::invalid(
                    "the directory holds another store's segments, or those of one that is gone: \
                     name an empty or new one",
                )
                .with("dir", dir.display())
                .with("found", found.to_string_lossy()));
            }
        }
        Ok(volumes)
    }

    /// The directory that a volume's name leads to, links and `..` resolved as far as it exists: two
    /// names of one directory come to the same.
    pub(crate) fn real(&self, name: &str) -> PathBuf {
        let path = self.path.join(name);
        let there =
            path.ancestors().find_map(|part| Some((part, std::fs::canonicalize(part).ok()?)));
        let Some((part, real)) = there else { return path };
        let mut resolved = real;
        for piece in path.strip_prefix(part).unwrap_or(Path::new("")).components() {
            match piece {
                Component::ParentDir => drop(resolved.pop()),
                piece => resolved.push(piece),
            }
        }
        resolved
    }

    /// What the manifest calls the volume in the directory `path`.
    pub(crate) fn volume_name(&self, path: &Path) -> Result<String> {
        let path = std::path::absolute(path).map_err(|e| self.refused(e))?;
        // Components: without what a trailing slash or a dot adds.
        let path: PathBuf = path.components().collect();
        if path == self.path.join(SEGMENTS) {
            return Ok(SEGMENTS.to_owned());
        }
        path.to_str()
            .map(str::to_owned)
            .ok_or_else(|| Error::invalid("paths must be UTF-8").with("path", path.display()))
    }

    /// Those that are being drained may be named or not.
    fn check_paths(&self, options: &Options, stored: &Manifest) -> Result<()> {
        let given: BTreeSet<PathBuf> =
            self.volumes(options)?.iter().map(|volume| self.real(&volume.dir)).collect();
        let there = stored.volumes.iter().filter(|volume| !volume.is_gone());
        let has: BTreeSet<PathBuf> = there.map(|volume| self.real(&volume.dir)).collect();
        let mut active = stored.volumes.iter().filter(|volume| volume.is_active());
        if given.is_subset(&has) && active.all(|volume| given.contains(&self.real(&volume.dir))) {
            return Ok(());
        }
        let there: Vec<&str> = stored.volumes.iter().map(|volume| volume.dir.as_str()).collect();
        Err(Error::invalid(
            "this store has another set of paths: leave it out, or change it with `ritornello \
             paths add` and `ritornello paths drain`",
        )
        .with("stored", there.join(":"))
        .with("given", format!("{:?}", options.paths))
        .with("dir", self.display()))
    }

    /// Replaces the manifest, durably.
    ///
    /// # Errors
    /// Those of the file system, with advice.
    pub fn write_manifest(&self, manifest: &Manifest) -> Result<()> {
        self.replace("MANIFEST", &manifest.encode())
    }

    /// The scope registry; an absent one is empty, a damaged one `None`.
    ///
    /// # Errors
    /// Those of the file system, and `Invalid` for another format.
    pub fn registry(&self) -> Result<Option<ScopeRegistry>> {
        match self.read("SCOPES")? {
            None => Ok(Some(ScopeRegistry::default())),
            Some(bytes) => match ScopeRegistry::decode(&bytes) {
                Ok(registry) => Ok(Some(registry)),
                Err(error) if error.kind() == ErrorKind::Invalid => Err(error),
                Err(_) => Ok(None),
            },
        }
    }

    /// Replaces the scope registry, durably.
    ///
    /// # Errors
    /// Those of the file system, with advice.
    pub fn write_registry(&self, registry: &ScopeRegistry) -> Result<()> {
        self.replace("SCOPES", &registry.encode())
    }

    /// The bytes of the reservation log.
    ///
    /// # Errors
    /// Those of the file system, with advice.
    pub fn reservation_log(&self) -> Result<Vec<u8>> {
        Ok(self.read("RESERVATIONS")?.unwrap_or_default())
    }

    /// Replaces the reservation log by `records` and opens it for appending.
    ///
    /// # Errors
    /// Those of the file system, with advice.
    pub fn replace_reservation_log(&self, records: &[u8]) -> Result<Arc<dyn MediumFile>> {
        self.replace("RESERVATIONS", records)?;
        let access = Access { write: true, create: false, direct: false };
        self.medium.open(&self.path.join("RESERVATIONS"), access).map_err(|e| self.refused(e))
    }

    /// The directory itself.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where the index keeps its files.
    #[must_use]
    pub fn index(&self) -> PathBuf {
        self.path.join("index")
    }

    /// The segment files of the store that `manifest` describes.
    ///
    /// # Errors
    /// Those of [`Segments::open`].
    pub fn segments(&self, manifest: &Manifest, io: IoChoice) -> Result<Arc<Segments>> {
        for dir in manifest.directories(&self.path) {
            self.medium.create_dir(&dir).map_err(|e| self.refused(e))?;
        }
        let dirs = manifest.paths(&self.path);
        let config = SegmentsConfig {
            dirs,
            segment_bytes: manifest.segment_bytes,
            io,
            in_flight_bytes: SegmentsConfig::IN_FLIGHT_BYTES,
        };
        let segments = Segments::open(Arc::clone(&self.medium), config)?;
        let this = self.clone();
        segments.discover_with(Box::new(move || {
            Ok(this.manifest()?.map_or_else(Vec::new, |manifest| manifest.paths(&this.path)))
        }));
        Ok(Arc::new(segments))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path.join(name);
        let file = match self.medium.open(&path, Access::default()) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.refused(error).with("file", name)),
        };
        let length = file.length().map_err(|e| self.refused(e))?;
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX).min(1 << 30)];
        let read = file.read_at(&mut bytes, 0).map_err(|e| self.refused(e))?;
        bytes.truncate(read);
        Ok(Some(bytes))
    }

    /// New file, its bytes durable, renamed over the old one, the rename durable.
    fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (path, new) = (self.path.join(name), self.path.join(format!("{name}.new")));
        let access = Access { write: true, create: true, direct: false };
        (|| {
            let file = self.medium.open(&new, access)?;
            file.set_len(0)?;
            file.write_at(bytes, 0)?;
            file.sync_data()?;
            self.medium.rename(&new, &path)?;
            self.medium.sync_dir(&self.path)
        })()
        .map_err(|e: io::Error| self.refused(e).with("file", name))
    }

    fn refused(&self, error: io::Error) -> Error {
        let advice = match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "the directory cannot be written: run as its owner, or name another one"
            }
            io::ErrorKind::StorageFull => "the disk is full: free some space and open again",
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                "this is a file, not a directory: name a directory"
            }
            _ => {
                return Error::retry("the store's directory failed")
                    .with("dir", self.display())
                    .because(error);
            }
        };
        Error::invalid(advice).with("dir", self.display()).because(error)
    }

    fn display(&self) -> std::path::Display<'_> {
        self.path.display()
    }
}

/// What a process that does not own the store needs to move bytes: its manifest and segments.
///
/// # Errors
/// `Invalid` where there is no store; those of [`Segments::open`].
pub fn open_segments(
    medium: Arc<dyn Medium>,
    dir: &Path,
    io: IoChoice,
) -> Result<(Manifest, Arc<Segments>)> {
    let directory = Directory::new(medium, dir);
    let manifest = directory
        .manifest()?
        .ok_or_else(|| Error::retry("there is no store here yet").with("dir", dir.display()))?;
    let segments = directory.segments(&manifest, io)?;
    Ok((manifest, segments))
}

fn random_bytes() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::retry("the kernel gave no random bytes").because(io::Error::from(e)))?;
    Ok(bytes)
}
