//! Conversion of a store to another index.

use crate::exclusive::with_exclusive_store;
use crate::node_directory::unusable;
use ritornello_format::Result;
use ritornello_medium::Host;
use ritornello_store::{Conversion, Directory, IndexKind};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Converts the index of the store in `path`, which no process may own, to `to`. If the conversion
/// is interrupted at any point, the store has either the complete old index or the complete new
/// index. `index_memory` is as in [`Options`](ritornello_store::Options::index_memory). `progress`
/// receives the number of runs copied and the total.
///
/// # Errors
/// `Invalid` if a process owns the store or this process has it open; `Retry` if threads of this
/// process open or close it, or ask its owner, for a minute; errors of the directory and its lock;
/// any error of [`ritornello_store::convert_index`].
pub fn convert_index(
    path: &Path,
    to: IndexKind,
    index_memory: Option<u64>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Conversion> {
    let path = fs::canonicalize(path).map_err(|error| unusable(path, error))?;
    let convert = |path: &Path, progress: &mut dyn FnMut(u64, u64)| {
        ritornello_store::convert_index(Arc::new(Host), path, to, index_memory, progress)
    };
    // A directory without a store gets no lock file.
    if Directory::new(Arc::new(Host), &path).manifest()?.is_none() {
        return convert(&path, progress);
    }
    with_exclusive_store(&path, |path| convert(path, progress))
}
