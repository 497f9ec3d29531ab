//! A backend over a mounted file system shared by several machines: NFS, pNFS, 3FS, or any other.
//!
//! A value is written to a temporary name and renamed, because a rename is atomic on these file
//! systems. Pages reveal prompts: files are created with mode 0600 and directories with 0700,
//! unless the remote is shared with a group.

use super::backend::{Backend, Listed};
use ritornello_format::{Error, ErrorKind as Kind, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::hash_map::RandomState;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

/// Prefix of the file names of unfinished files; no file of an object has this prefix. A listing
/// includes unfinished files, so that the files of killed writers can be removed.
pub(super) const UNFINISHED: &str = ".new-";

/// A directory that holds values as files.
#[derive(Debug)]
pub struct DirectoryBackend {
    root: PathBuf,
    /// Part of the names of unfinished files that is unique to this process.
    writer: String,
    /// Whether the directory's group may also read and write.
    shared: bool,
    next: AtomicU64,
}

impl DirectoryBackend {
    /// Stores values in `root`; while `root` does not exist, every call fails. `writer` must be
    /// unique among all processes that write to `root`, such as host name and process id.
    #[must_use]
    pub fn new(root: &Path, writer: &str) -> Self {
        Self {
            root: root.to_owned(),
            writer: writer.to_owned(),
            shared: false,
            next: AtomicU64::new(0),
        }
    }

    /// Lets the directory's group read and write files and directories that this backend creates,
    /// regardless of the umask: directories get mode 0770, files 0660. Existing directories keep
    /// their mode.
    #[must_use]
    pub fn shared(self) -> Self {
        Self { shared: true, ..self }
    }

    /// Creates the missing directories of an object.
    fn make_dirs(&self, dir: &Path) -> io::Result<()> {
        if dir.is_dir() {
            return Ok(());
        }
        if let Some(parent) = dir.parent() {
            self.make_dirs(parent)?;
        }
        match DirBuilder::new().mode(if self.shared { 0o770 } else { 0o700 }).create(dir) {
            Ok(()) if self.shared => {
                // A member of the group may have replaced the new directory by a link.
                let flags = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits().cast_signed();
                let made = OpenOptions::new().read(true).custom_flags(flags).open(dir)?;
                // The set-group-ID bit is inherited from the parent, and gives new entries the
                // directory's group.
                let inherited = made.metadata()?.mode() & 0o2000;
                made.set_permissions(Permissions::from_mode(0o770 | inherited))
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        let mode = if self.shared { 0o660 } else { 0o600 };
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
        if self.shared {
            file.set_permissions(Permissions::from_mode(mode))?;
        }
        Ok(file)
    }

    /// Returns `None` for a missing value only if the remote's directory exists: a file system that
    /// is not mounted must not look empty.
    fn not_found_if_mounted<T>(&self, result: io::Result<Option<T>>) -> Result<Option<T>> {
        match result {
            Ok(Some(value)) => Ok(Some(value)),
            other => self.check().and(other.map_err(failed)),
        }
    }

    fn check(&self) -> Result<()> {
        match fs::metadata(&self.root) {
            Ok(metadata) if metadata.is_dir() => Ok(()),
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(error)),
            _ => {
                let why = "the remote's directory does not exist: mount or make it";
                Err(Error::new(Kind::Fatal, why).with("dir", self.root.display()))
            }
        }
    }

    fn write(&self, name: &str, value: &[u8]) -> io::Result<()> {
        let path = self.root.join(name);
        let parent = path.parent().unwrap_or(&self.root);
        self.make_dirs(parent)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // Without the random part another writer could guess the name, and create a file or a link
        // of this name first: the write would then fail.
        let random = RandomState::new().build_hasher().finish();
        let unfinished = parent.join(format!("{UNFINISHED}{}-{number}-{random:016x}", self.writer));
        let mut file = self.create(&unfinished)?;
        let written = (|| {
            file.write_all(value)?;
            // A full or lost server may report the errors of earlier writes only when the file is
            // synced.
            file.sync_all()?;
            fs::rename(&unfinished, &path)
        })();
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written
    }
}

/// Returns `None` if the name does not exist, or is a symbolic link that the call must not or
/// cannot follow (the error is `ELOOP` in both cases).
fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) if is_errno(&error, Errno::LOOP) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_errno(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Opens a value. Returns `None` if the name does not exist or is not a regular file: a pipe would
/// block the call until its other end is open, and a link may lead out of the remote.
fn open(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(flags.bits() as i32).open(path);
    let file = match opened {
        // The name belongs to a socket, or to a device without a driver.
        Err(error) if is_errno(&error, Errno::NXIO) => None,
        opened => found(opened)?,
    };
    match file {
        Some(file) if file.metadata()?.is_file() => Ok(Some(file)),
        _ => Ok(None),
    }
}

fn failed(error: io::Error) -> Error {
    let kind = error.kind();
    let error = Error::retry("the remote's directory cannot be used").because(error);
    match kind {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            error.with(
                "advice",
                "give this user the right to read and write the directory; several users share a remote by a group and \
                 ?mode=shared",
            )
        }
        _ => error,
    }
}

fn read(mut file: File, range: Option<Range<u64>>) -> io::Result<Vec<u8>> {
    let mut value = Vec::new();
    match range {
        None => file.read_to_end(&mut value)?,
        Some(range) => {
            file.seek(SeekFrom::Start(range.start))?;
            file.take(range.end.saturating_sub(range.start)).read_to_end(&mut value)?
        }
    };
    Ok(value)
}

impl Backend for DirectoryBackend {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        let file = self.not_found_if_mounted(open(&self.root.join(name)))?;
        file.map(|file| read(file, range)).transpose().map_err(failed)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        let metadata =
            self.not_found_if_mounted(found(fs::symlink_metadata(self.root.join(name))))?;
        Ok(metadata.is_some_and(|metadata| metadata.is_file()))
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        // Create missing directories of the object, but not the root: if the file system is not
        // mounted yet, the mount would hide the new root.
        self.check()?;
        self.write(name, value).map_err(failed)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.not_found_if_mounted(found(fs::remove_file(self.root.join(name)))).map(drop)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        self.check()?;
        let (begin, _) = prefix.rsplit_once('/').unwrap_or_default();
        let begin = self.root.join(begin);
        let (mut left, mut warned) = (vec![begin.clone()], false);
        // Directories that this user may not read, and names longer than the limit of a path, are
        // skipped, unless the listed directory itself cannot be read.
        let mut skip_or_fail = |error: io::Error, dir: &Path| {
            let skipped =
                error.kind() == ErrorKind::PermissionDenied || is_errno(&error, Errno::NAMETOOLONG);
            if !skipped || dir == begin {
                return Err(failed(error));
            }
            if !std::mem::replace(&mut warned, true) {
                tracing::warn!(
                    dir = %dir.display(),
                    %error,
                    "a directory of the remote cannot be read and is not listed; further such \
                     directories are not logged"
                );
            }
            Ok(())
        };
        while let Some(dir) = left.pop() {
            let entries = found(fs::read_dir(&dir))
                .or_else(|error| skip_or_fail(error, &dir).map(|()| None))?;
            for entry in entries.into_iter().flatten() {
                let entry = entry.map_err(failed)?;
                let path = entry.path();
                let metadata = found(entry.metadata())
                    .or_else(|error| skip_or_fail(error, &dir).map(|()| None))?;
                let Some(metadata) = metadata else { continue };
                if metadata.is_dir() {
                    left.push(path);
                    continue;
                }
                let Some(name) = path.strip_prefix(&self.root).ok().and_then(Path::to_str) else {
                    continue;
                };
                if name.starts_with(prefix) {
                    let written = metadata.modified().ok();
                    let written = written.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
                    each(Listed {
                        name: name.to_owned(),
                        bytes: metadata.len(),
                        written: written.map_or(0, |since| since.as_secs()),
                    });
                }
            }
        }
        Ok(())
    }
}
