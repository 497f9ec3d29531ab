//! Restoring a store whose own directory is lost.

use crate::exclusive::with_exclusive_store;
use crate::mounts;
use crate::node_directory::unusable;
use ritornello_format::{Error, Result};
use ritornello_medium::{Host, Medium};
use ritornello_store::{Restore, Restored};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Restores into `dir` the store whose other directories are `others`, with the pages in these
/// directories: see [`Restore`]. `dir` must be new or empty, or hold an interrupted restore of this
/// store. `progress` receives the number of bytes searched and the total.
///
/// # Errors
/// `Invalid` if another process is seen to use `others`, if a process owns the store in `dir`, or
/// if this process has it open; errors of creating and locking `dir`; any error of
/// [`Restore::plan`] and [`Restore::run`].
pub fn restore(
    dir: &Path,
    others: &[PathBuf],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Restored> {
    let medium: Arc<dyn Medium> = Arc::new(Host);
    let name = std::path::absolute(dir).map_err(|error| unusable(dir, error))?;
    let path = match fs::canonicalize(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            mounts::check_creation(&name)?;
            name
        }
        found => found.map_err(|error| unusable(dir, error))?,
    };
    // Check that the store can be restored before creating the directory and its lock file.
    Restore::plan(&medium, &path, others)?;
    if let Some(process) = user_of(others) {
        return Err(Error::invalid(
            "a process has files of the store open: stop all processes that use the store",
        )
        .with("pid", process));
    }
    medium.create_dir(&path).map_err(|error| unusable(dir, error))?;
    let path = fs::canonicalize(&path).map_err(|error| unusable(dir, error))?;
    with_exclusive_store(&path, |path| Restore::plan(&medium, path, others)?.run(progress))
}

/// Another process that has a file in `dirs` open; `None` if none is seen. The locks of the store's
/// processes were in the lost directory, so the processes cannot be found by their locks. Processes
/// of other users and in other containers may not be seen.
fn user_of(dirs: &[PathBuf]) -> Option<u32> {
    let dirs: Vec<PathBuf> = dirs.iter().filter_map(|dir| fs::canonicalize(dir).ok()).collect();
    let is_open_in = |process: u32| {
        let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        let mut files = open.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
        files.any(|file| dirs.iter().any(|dir| file.starts_with(dir)))
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes.find(|process| *process != std::process::id() && is_open_in(*process))
}
