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
use crate::options::{IndexKind, Options, SEGMENT_BYTES};
use ritornello_format::{Error, ErrorKind, Manifest, Result, ScopeRegistry};
use ritornello_medium::{Access, Medium, MediumFile};
use ritornello_volume::segments::{IoChoice, Segments, SegmentsConfig};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Names that may lie in a directory without making it somebody else's.
const OURS: [&str; 10] = [
    "MANIFEST",
    "MANIFEST.new",
    "SCOPES",
    "SCOPES.new",
    "RESERVATIONS",
    "LOCK",
    "clients",
    "index",
    "segments",
    "owner.sock",
];

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
                volumes: self.volumes(options)?,
                owner: String::new(),
            };
            Budget::divide(capacity, manifest.segment_bytes)?;
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
        if let Some(given) = options.capacity.filter(|given| *given != stored.capacity) {
            return Err(fixed("capacity", &stored.capacity, given.to_string()));
        }
        if let Some(given) = options.segment_bytes.filter(|given| *given != stored.segment_bytes) {
            return Err(fixed("segment size", &stored.segment_bytes, given.to_string()));
        }
        if let Some(given) = options.index.filter(|given| given.word() != stored.index) {
            return Err(fixed("index", &stored.index, given.word().to_owned()));
        }
        if !options.paths.is_empty() && self.volumes(options)? != stored.volumes {
            let shown = stored.volumes.join(":");
            return Err(fixed("set of paths", &shown, format!("{:?}", options.paths)));
        }
        IndexKind::parse(&stored.index)?;
        Ok(stored)
    }

    fn volumes(&self, options: &Options) -> Result<Vec<String>> {
        if options.paths.is_empty() {
            return Ok(vec!["segments".to_owned()]);
        }
        if options.paths.len() > 256 {
            return Err(Error::invalid("a store spreads over at most 256 paths"));
        }
        let text = |path: &PathBuf| {
            let path = std::path::absolute(path).map_err(|e| self.refused(e))?;
            path.to_str()
                .map(str::to_owned)
                .ok_or_else(|| Error::invalid("paths must be UTF-8").with("path", path.display()))
        };
        let mut paths: Vec<String> = options.paths.iter().map(text).collect::<Result<_>>()?;
        let given = paths.len();
        paths.sort();
        paths.dedup();
        if paths.len() == given {
            Ok(paths)
        } else {
            Err(Error::invalid("the same path is named twice: name each disk once"))
        }
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
        let dirs: Vec<PathBuf> = manifest.volumes.iter().map(|v| self.path.join(v)).collect();
        for dir in &dirs {
            self.medium.create_dir(dir).map_err(|e| self.refused(e))?;
        }
        let config = SegmentsConfig {
            dirs,
            segment_bytes: manifest.segment_bytes,
            io,
            in_flight_bytes: SegmentsConfig::IN_FLIGHT_BYTES,
        };
        Segments::open(Arc::clone(&self.medium), config).map(Arc::new)
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
