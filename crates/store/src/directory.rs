//! The directory of a store: its files besides segments and index, and how they are replaced.
//!
//! ```text
//! MANIFEST        the store's description     replaced as a whole, for example at open
//! MANIFEST.copy   a copy of MANIFEST          replaced before MANIFEST
//! SCOPES          the scope registry          appended or replaced, see `registry_file.rs`
//! RESERVATIONS    space clients write to      appended or replaced, see `core/reservations.rs`
//! policy.toml     permissions                 written by operators only, see `permissions.rs`
//! index/          files of the index backend
//! segments/       VOLUME, seg-000000 ...      or in the directories of `paths`, see `volumes.rs`;
//!                                             there with copies of MANIFEST and SCOPES,
//!                                             see `volume_copies.rs`
//! ```

mod fitting_manifest;

use crate::machine_memory::check_memory;
use ritornello_format::{Error, ErrorKind, Manifest, Result, ScopeRegistry, StoredRegistry};
use ritornello_medium::{Access, Medium, MediumFile, is_unreadable};
use std::error::Error as _;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Names that may exist in a store's directory, besides names that begin with `owner.sock`.
const STORE_NAMES: [&str; 15] = [
    MANIFEST,
    "MANIFEST.new",
    MANIFEST_COPY,
    "MANIFEST.copy.new",
    SCOPES,
    "SCOPES.new",
    RESERVATIONS,
    "RESERVATIONS.new",
    "LOCK",
    "clients",
    "index",
    "segments",
    "owner.sock",
    POLICY_FILE,
    LOST_AND_FOUND,
];

/// The directory that `mkfs.ext4` makes in the root of a file system.
pub(crate) const LOST_AND_FOUND: &str = "lost+found";

const MANIFEST: &str = "MANIFEST";
/// The copy is replaced before `MANIFEST`, so it is never older. An owner that must read the copy
/// therefore never reuses an owner epoch.
const MANIFEST_COPY: &str = "MANIFEST.copy";
/// The copy of the manifest in a volume's directory. A directory with a file `MANIFEST` or
/// `MANIFEST.copy` is taken for a store, so this copy has another name.
pub(crate) const COPY_OF_MANIFEST: &str = "VOLUME.manifest";

/// Name of the policy file in the store's directory.
pub const POLICY_FILE: &str = "policy.toml";
pub(crate) const SCOPES: &str = "SCOPES";
const RESERVATIONS: &str = "RESERVATIONS";

/// Name of the volume inside the store's own directory, if the store has one there.
pub(crate) const SEGMENTS: &str = "segments";
/// Maximum volumes, including retired volumes.
pub(crate) const VOLUMES_MAX: usize = 256;

/// Pause before the last attempt to read a file that the disk cannot read.
const REREAD_PAUSE: Duration = Duration::from_millis(500);

/// The result of an attempt to read a file.
enum Contents {
    Absent,
    Read(Vec<u8>),
    /// The disk cannot read the file.
    Unreadable,
}

/// The files of one store.
#[derive(Clone, Debug)]
pub struct Directory {
    pub(crate) medium: Arc<dyn Medium>,
    path: PathBuf,
}

impl Directory {
    /// The directory at `path`.
    #[must_use]
    pub fn new(medium: Arc<dyn Medium>, path: &Path) -> Self {
        Self { medium, path: path.to_owned() }
    }

    /// Reads the manifest, or its copy if the manifest is missing, damaged, or unreadable on the
    /// disk; `None` if no store exists.
    ///
    /// # Errors
    /// `Invalid` if the format version differs, or the directory holds other files; `Fatal` if one
    /// of the two files is damaged or unreadable, and the other file is damaged, unreadable or
    /// missing; file-system errors, with advice.
    pub fn manifest(&self) -> Result<Option<Manifest>> {
        let decode = |name, bytes: io::Result<Option<Vec<u8>>>| -> Result<Option<Manifest>> {
            let bytes = bytes.map_err(|error| self.refused(error).with("file", name))?;
            let decoded = bytes.map(|bytes| Manifest::decode(&bytes)).transpose();
            decoded.map_err(|error| error.with("file", name))
        };
        let bytes = self.read_in(&self.path, MANIFEST);
        // Fail if file descriptors or memory ran out: the manifest may be intact, and the copy may
        // hold a change that never took effect.
        if bytes.as_ref().is_err_and(|error| !is_unreadable(error)) {
            return decode(MANIFEST, bytes);
        }
        match decode(MANIFEST, bytes) {
            Ok(Some(manifest)) => return Ok(Some(manifest)),
            Err(error) if error.kind() == ErrorKind::Invalid => {
                return Err(error.with("dir", self.display()));
            }
            absent_or_damaged => match (
                absent_or_damaged,
                decode(MANIFEST_COPY, self.read_in(&self.path, MANIFEST_COPY)),
            ) {
                (Ok(_), Ok(Some(copy))) => return self.manifest_behind(copy).map(Some),
                (Err(why), Ok(Some(copy))) => {
                    tracing::warn!(
                        dir = %self.display(), %why,
                        "MANIFEST is damaged: MANIFEST.copy is used"
                    );
                    return Ok(Some(copy));
                }
                (Ok(_), Ok(None)) => {}
                // Do not report the copy as damaged: it may be of another format, or could not be
                // read for lack of file descriptors.
                (_, Err(error)) if error.kind() != ErrorKind::Fatal && !was_unreadable(&error) => {
                    return Err(error.with("dir", self.display()));
                }
                (Err(error), _) | (Ok(_), Err(error)) => {
                    return Err(self.both_damaged().because(error));
                }
            },
        }
        let names = self.medium.list(&self.path).map_err(|e| self.refused(e))?;
        let foreign = names
            .iter()
            .map(|name| name.to_string_lossy())
            .find(|name| !STORE_NAMES.contains(&name.as_ref()) && !name.starts_with("owner.sock"));
        match foreign {
            None => Ok(None),
            Some(name) => Err(Error::invalid(
                "this directory holds files that are not a Ritornello store: name an empty or new \
                 directory",
            )
            .with("dir", self.display())
            .with("found", name)),
        }
    }

    /// Error for a store whose MANIFEST and MANIFEST.copy are both damaged or missing.
    fn both_damaged(&self) -> Error {
        Error::fatal(
            "MANIFEST and MANIFEST.copy are damaged or missing: restore one of them from a backup; \
             or move the directory elsewhere and, if the store has further directories, type \
             `ritornello paths restore` with the paths of this directory and of the further \
             directories, which finds the pages in the latter; or start with an empty directory",
        )
        .with("dir", self.display())
    }

    /// Whether the directory holds a store, perhaps of another format or damaged.
    #[must_use]
    pub fn holds_store(&self) -> bool {
        [MANIFEST, MANIFEST_COPY].iter().any(|name| {
            let bytes = self.read_in(&self.path, name).ok().flatten();
            bytes.is_some_and(|bytes| Manifest::recognize(&bytes))
        })
    }

    /// Chooses between MANIFEST, which was missing at the first read, and `copy`. Reads MANIFEST
    /// again, because another process may have created the store since. If MANIFEST is still
    /// missing, a copy of epoch 0 is of a creation or a restore that has not ended; a later copy
    /// means that MANIFEST was lost.
    fn manifest_behind(&self, copy: Manifest) -> Result<Manifest> {
        if let Some(bytes) = self.read(MANIFEST)? {
            let decoded = Manifest::decode(&bytes);
            return decoded
                .map_err(|error| error.with("dir", self.display()).with("file", MANIFEST));
        }
        if copy.owner_epoch > 0 {
            tracing::warn!(dir = %self.display(), "MANIFEST is missing: MANIFEST.copy is used");
        }
        Ok(copy)
    }

    /// The error of a store whose restore has begun and not ended.
    pub(crate) fn interrupted_restore(&self) -> Error {
        Error::invalid(
            "a restore of this store was interrupted: type the command `ritornello paths restore` \
             again",
        )
        .with("dir", self.display())
    }

    /// Checks that the volumes of a store on tmpfs have room for their shares of `bytes` further
    /// bytes.
    pub(crate) fn check_memory(&self, manifest: &Manifest, bytes: u64) -> Result<()> {
        let dirs = manifest.directories(&self.path);
        let share = bytes / (dirs.len() as u64).max(1);
        for dir in dirs {
            // A directory that does not exist yet will be on the file system of its parent.
            let room = dir.ancestors().find_map(|dir| self.medium.room(dir).ok());
            let fits = room.map_or(Ok(()), |room| check_memory(&room, share));
            fits.map_err(|error| error.with("dir", dir.display()))?;
        }
        Ok(())
    }

    /// Returns the path of the directory that a volume's name in the manifest denotes. Resolves
    /// `..`, and symbolic links in the part of the path that exists, so that two names of one
    /// directory give equal paths.
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

    /// The name in the manifest of the volume in the directory `path`.
    pub(crate) fn volume_name(&self, path: &Path) -> Result<String> {
        let path = std::path::absolute(path).map_err(|e| self.refused(e))?;
        // `Path::components` drops a trailing slash and `.`, so that one directory has one name.
        let path: PathBuf = path.components().collect();
        if path == self.path.join(SEGMENTS) {
            return Ok(SEGMENTS.to_owned());
        }
        path.to_str().map(str::to_owned).ok_or_else(|| {
            Error::invalid("a path of the store is not UTF-8: name another path")
                .with("path", path.display())
        })
    }

    /// Replaces both copies of the manifest, durably.
    ///
    /// # Errors
    /// File-system errors, with advice: the old manifest remains valid. `Fatal` if the next opening
    /// may read either manifest.
    pub fn write_manifest(&self, manifest: &Manifest) -> Result<()> {
        let bytes = manifest.encode();
        self.replace(MANIFEST_COPY, &bytes)?;
        let Err(error) = self.replace(MANIFEST, &bytes) else { return Ok(()) };
        // If the change failed for lack of space or file descriptors, restore the copy, because it
        // must not stay newer than MANIFEST.
        let restored = error.kind() != ErrorKind::Fatal
            && self
                .read(MANIFEST)
                .is_ok_and(|old| old.is_some_and(|old| self.replace(MANIFEST_COPY, &old).is_ok()));
        Err(if restored { error } else { self.uncertain_error(MANIFEST).because(error) })
    }

    /// Reads the scope registry. A missing registry is returned as empty, with
    /// [`StoredRegistry::is_whole`] unset. `None` if the registry is damaged, the disk cannot read
    /// it, or its scopes have ids of a different version.
    ///
    /// # Errors
    /// File-system errors except `EIO`; `Invalid` if the format version differs.
    pub fn registry(&self) -> Result<Option<StoredRegistry>> {
        match self.read_unless_unreadable(SCOPES)? {
            Contents::Absent => Ok(Some(StoredRegistry::default())),
            Contents::Unreadable => {
                tracing::warn!(
                    dir = %self.display(),
                    "the disk cannot read SCOPES: the store starts without any scope or page"
                );
                Ok(None)
            }
            Contents::Read(bytes) => match ScopeRegistry::decode(&bytes) {
                Ok(registry) => Ok(Some(registry)),
                Err(error) if error.kind() == ErrorKind::Invalid => Err(error),
                Err(why) => {
                    tracing::warn!(
                        dir = %self.display(), %why,
                        "SCOPES cannot be used: the store starts without any scope or page"
                    );
                    Ok(None)
                }
            },
        }
    }

    /// Replaces the scope registry by the file `bytes`, durably. Returns the new file, for
    /// appending.
    ///
    /// # Errors
    /// File-system errors, with advice: the old registry remains valid. `Fatal` if the next opening
    /// may read either registry.
    pub fn write_registry(&self, bytes: &[u8]) -> Result<Arc<dyn MediumFile>> {
        self.replace(SCOPES, bytes)
    }

    /// Reads the reservation log; `None` if the disk cannot read it.
    ///
    /// # Errors
    /// File-system errors except `EIO`, with advice.
    pub fn reservation_log(&self) -> Result<Option<Vec<u8>>> {
        Ok(match self.read_unless_unreadable(RESERVATIONS)? {
            Contents::Absent => Some(Vec::new()),
            Contents::Read(log) => Some(log),
            Contents::Unreadable => None,
        })
    }

    /// Names of the lock files of clients; none if no client ever used the store.
    ///
    /// # Errors
    /// File-system errors.
    pub(crate) fn client_names(&self) -> io::Result<Vec<String>> {
        match self.medium.list(&self.path.join("clients")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            names => Ok(names?.iter().map(|name| name.to_string_lossy().into_owned()).collect()),
        }
    }

    /// Replaces the reservation log by `log`. Returns the new file for appending. The file is not
    /// opened again by its name: if that failed, the caller would append to the old file, which no
    /// later owner reads. The directory is not synced: a power loss can undo the rename, but ends
    /// the clients too.
    ///
    /// # Errors
    /// File-system errors, with advice: the old log remains in place.
    pub fn replace_reservation_log(&self, log: &[u8]) -> Result<Arc<dyn MediumFile>> {
        let replaced = self.rename_over(&self.path, RESERVATIONS, log);
        replaced.map_err(|error| self.refused(error).with("file", RESERVATIONS))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of the index's files.
    #[must_use]
    pub fn index(&self) -> PathBuf {
        self.path.join("index")
    }

    pub(crate) fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.read_in(&self.path, name).map_err(|error| self.refused(error).with("file", name))
    }

    /// Reads a file. If the disk cannot read the file, tries again, at last after
    /// [`REREAD_PAUSE`], because the fault may be temporary.
    fn read_unless_unreadable(&self, name: &str) -> Result<Contents> {
        for pause in [Duration::ZERO, Duration::ZERO, REREAD_PAUSE] {
            std::thread::sleep(pause);
            match self.read(name) {
                Err(error) if was_unreadable(&error) => {}
                read => return Ok(read?.map_or(Contents::Absent, Contents::Read)),
            }
        }
        Ok(Contents::Unreadable)
    }

    /// Reads a file of `dir`, at most its first GiB; `None` if it does not exist.
    pub(crate) fn read_in(&self, dir: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
        let file = match self.medium.open(&dir.join(name), Access::default()) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let length = usize::try_from(file.length()?).unwrap_or(usize::MAX);
        let mut bytes = vec![0; length.min(1 << 30)];
        let read = file.read_at(&mut bytes, 0)?;
        bytes.truncate(read);
        Ok(Some(bytes))
    }

    /// Writes a new file, syncs it, renames it over the old file and syncs the directory. Returns
    /// the new file.
    fn replace(&self, name: &str, bytes: &[u8]) -> Result<Arc<dyn MediumFile>> {
        let replaced = self.rename_over(&self.path, name, bytes);
        let file = replaced.map_err(|error| self.refused(error).with("file", name))?;
        self.medium
            .sync_dir(&self.path)
            .map_err(|error| self.uncertain_error(name).because(error))?;
        Ok(file)
    }

    /// Like [`Self::replace`], in the directory of a volume.
    pub(crate) fn replace_in(&self, dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.rename_over(dir, name, bytes)?;
        self.medium.sync_dir(dir)
    }

    /// Writes a new file, syncs it and renames it over the old file. Returns the new file.
    fn rename_over(&self, dir: &Path, name: &str, bytes: &[u8]) -> io::Result<Arc<dyn MediumFile>> {
        let new = dir.join(format!("{name}.new"));
        let file = self.medium.open(&new, Access { write: true, create: true, direct: false })?;
        file.set_len(0)?;
        file.write_at(bytes, 0)?;
        file.sync_data()?;
        self.medium.rename(&new, &dir.join(name))?;
        Ok(file)
    }

    /// Returns the error of a change that failed, although the next opening may find the change.
    pub(crate) fn uncertain_error(&self, name: &str) -> Error {
        Error::fatal(
            "a change of the store's directory failed half-way: close the store, check the disk, \
             open it again",
        )
        .with("dir", self.display())
        .with("file", name)
    }

    pub(crate) fn refused(&self, error: io::Error) -> Error {
        let advice = match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "the directory cannot be written: run as its user, or name another directory"
            }
            io::ErrorKind::StorageFull => "the disk is full: free some space and open again",
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                "the path names a file, not a directory: name a directory"
            }
            _ => {
                return Error::retry(
                    "a file operation in the store's directory failed: try again, or check the \
                     disk",
                )
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

/// Whether `error` means that the disk cannot return a file's contents.
fn was_unreadable(error: &Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(is_unreadable)
}
