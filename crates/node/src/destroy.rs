//! Removing a store: its own files in all its directories, and the directories that are empty then.

use crate::exclusive::with_exclusive_store;
use crate::node_directory::{CLIENTS, unusable};
use crate::presence::is_name;
use ritornello_format::{Error, Result, VolumeMarker};
use ritornello_medium::Host;
use ritornello_store::{Directory, POLICY_FILE, is_volume_copy};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, result};

/// Files in the store's directory that are removed before the manifest and the lock. The policy
/// file is among them, although operators write it: its permissions are for this store, and must
/// not apply to a store that is created here later.
const FILES: [&str; 7] = [
    "SCOPES",
    "SCOPES.new",
    "RESERVATIONS",
    "RESERVATIONS.new",
    "MANIFEST.new",
    "MANIFEST.copy.new",
    POLICY_FILE,
];

/// Removes the store in `path`: its files in all its directories, and directories that are empty
/// afterwards. Other files stay. The directory of an absent volume keeps all files. The directory
/// `segments` in `path` loses its segments even without a marker of the store, unless it has a
/// marker of another store or format version. The manifest and then the lock file are removed last,
/// so that an interrupted removal can be repeated.
///
/// # Errors
/// `Invalid` if there is no store, another process owns it, this process has it open, or the store
/// was restored in another directory, which has its volumes now; `Fatal` if neither copy of the
/// manifest in `path` is intact and one is damaged, because the directories of the volumes are then
/// unknown; `Retry` if the file system refuses, or if other threads of this process open or close
/// the store for a minute.
pub fn destroy(path: &Path) -> Result<()> {
    let path = fs::canonicalize(path).map_err(|error| unusable(path, error))?;
    let directory = Directory::new(Arc::new(Host), &path);
    let manifest = directory.manifest()?.ok_or_else(|| {
        Error::invalid("there is no store here: nothing was removed").with("dir", path.display())
    })?;
    let mut volumes = directory.present_volumes(&manifest);
    // Empty the default volume's directory too, which the manifest does not list after a drain.
    let drained = path.join("segments");
    if !directory.is_foreign(&drained, &manifest) {
        volumes.push(drained);
    }
    directory.check_not_restored(&manifest, &volumes)?;
    with_exclusive_store(&path, |path| remove_all(path, &volumes))?;
    // The removal fails, and keeps the directory, if the directory is not empty.
    let _ = fs::remove_dir(&path);
    Ok(())
}

fn remove_all(path: &Path, volumes: &[PathBuf]) -> Result<()> {
    let removed = (|| {
        for volume in volumes {
            remove_files(volume, |name| is_segment(name) || is_volume_copy(name))?;
            // Remove the marker after the segments, because a repeated removal recognises the
            // directory by its marker.
            remove_where(volume, is_marker)?;
        }
        for database in ["lsm", "lsm.new", "lsm.old"] {
            remove_where(&path.join("index").join(database), is_rocksdb)?;
        }
        remove_where(&path.join("index"), is_index)?;
        remove_where(&path.join(CLIENTS), is_name)?;
        remove_files(path, |name| FILES.contains(&name) || name.starts_with("owner.sock"))?;
        remove(&path.join("MANIFEST.copy"))?;
        remove(&path.join("MANIFEST"))?;
        remove(&path.join("LOCK"))
    })();
    removed.map_err(|error| {
        Error::retry("the store could not be removed: try again")
            .with("dir", path.display())
            .because(error)
    })
}

fn is_segment(name: &str) -> bool {
    let number = name.strip_prefix("seg-");
    number.is_some_and(|number| number.len() >= 6 && number.bytes().all(|b| b.is_ascii_digit()))
        || name.starts_with(".selftest-")
}

fn is_marker(name: &str) -> bool {
    name.strip_prefix(VolumeMarker::FILE).is_some_and(|ending| ["", ".new"].contains(&ending))
}

fn is_index(name: &str) -> bool {
    name.starts_with("checkpoint-")
        || name.starts_with("journal-")
        || ["lsm.damaged", "lsm.seal"].contains(&name)
}

/// Whether `name` is a file of RocksDB, of any version.
fn is_rocksdb(name: &str) -> bool {
    let numbered = name.split_once('.').is_some_and(|(number, ending)| {
        number.bytes().all(|b| b.is_ascii_digit()) && ["sst", "log", "dbtmp"].contains(&ending)
    });
    numbered
        || ["CURRENT", "IDENTITY", "LOCK", "LOG"].contains(&name)
        || ["LOG.old.", "MANIFEST-", "OPTIONS-"].iter().any(|start| name.starts_with(start))
}

/// Removes the files that `which` selects, and the directory if it is empty afterwards.
fn remove_where(dir: &Path, which: impl Fn(&str) -> bool) -> io::Result<()> {
    remove_files(dir, which)?;
    let _ = fs::remove_dir(dir);
    Ok(())
}

fn remove_files(dir: &Path, which: impl Fn(&str) -> bool) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries.collect::<result::Result<Vec<_>, _>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        if entry.file_name().to_str().is_some_and(&which) && !entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
