//! The index of a store, and its conversion to another backend.
//!
//! The manifest names the index in use. The new index is built completely and durably next to the
//! old index; then the manifest is replaced by one that names the new index, and the old index's
//! files are removed. An interruption at any point leaves one index in use, and perhaps unused
//! files, which the next owner removes.

use crate::budget::Budget;
use crate::directory::Directory;
use crate::machine_memory;
use crate::options::IndexKind;
use crate::volumes::VolumeState;
use ritornello_format::{Error, ErrorKind, Manifest, Result};
use ritornello_index::{Backend, Copied, MemoryIndex, PrefixIndex, RunIndex, RunOptions, copy};
use ritornello_medium::Medium;
use ritornello_volume::segments::IoChoice;
use serde::Serialize;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// By default the index `run` may use 1/`MEMORY_SHARE` of the memory available to the process.
const MEMORY_SHARE: u64 = 4;

/// The result of [`convert_index`]. All numbers are zero if the store had the new index already.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Conversion {
    /// The old index.
    pub from: String,
    /// The new index.
    pub to: String,
    /// Runs copied.
    pub runs: u64,
    /// Pages of the copied runs.
    pub pages: u64,
    /// Runs that were not copied, because they are inconsistent or follow an inconsistent run.
    pub runs_dropped: u64,
    /// Bytes of the old index's files.
    pub disk_bytes_before: u64,
    /// Bytes of the new index's files.
    pub disk_bytes: u64,
    /// Memory of the new index after the conversion.
    pub memory_bytes: u64,
    /// Duration of the conversion in seconds.
    pub seconds: f64,
}

/// Converts the store in `dir` to the index `to`; `index_memory` as in
/// [`Options`](crate::Options::index_memory). The caller holds the directory's lock. `progress`
/// receives the number of runs copied and the total.
///
/// # Errors
/// `Invalid` if the directory has no store, if the index is not compiled in or not persistent, if a
/// volume is absent, or if the runs do not fit the new index; `Retry` if a volume's directory
/// cannot be used now; `Fatal` if the new index does not hold exactly the copied runs; errors of
/// the indexes and of the file system. After an error the store keeps its old index, except that an
/// error during or after the replacement of the manifest may leave the new index in use.
pub fn convert_index(
    medium: Arc<dyn Medium>,
    dir: &Path,
    to: IndexKind,
    index_memory: Option<u64>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Conversion> {
    let directory = Directory::new(Arc::clone(&medium), dir);
    let mut manifest = directory.manifest()?.ok_or_else(|| {
        Error::invalid("there is no store here: nothing was converted").with("dir", dir.display())
    })?;
    convert(&medium, &directory, &mut manifest, to, index_memory, progress)
}

/// Like [`convert_index`], for a store whose `manifest` the caller has read. Updates `manifest`.
pub(crate) fn convert(
    medium: &Arc<dyn Medium>,
    directory: &Directory,
    manifest: &mut Manifest,
    to: IndexKind,
    index_memory: Option<u64>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Conversion> {
    let started = Instant::now();
    let from = IndexKind::stored(&manifest.index)?;
    if to == IndexKind::Memory && from != to {
        return Err(Error::invalid(
            "a store cannot be converted to the index `memory`, which has no files: keep the \
             current index, or make another store",
        )
        .with("stored", from.word()));
    }
    let (index, budget) =
        (directory.index(), Budget::divide(manifest.capacity, manifest.segment_bytes)?);
    // An interrupted conversion may have changed a single copy of the manifest. Both copies must
    // name the index in use before files of other indexes are removed.
    directory.write_manifest(manifest)?;
    remove_leftovers(medium.as_ref(), directory, from)?;
    let mut done = Conversion {
        from: from.word().to_owned(),
        to: to.word().to_owned(),
        ..Conversion::default()
    };
    if from == to {
        return Ok(done);
    }
    // Sync the segments first: the new index will be durable and name their data, and a former
    // owner may have died before this data was durable.
    let found = directory.volume_states(manifest);
    if let Some(why) = found.iter().find_map(VolumeState::absence) {
        return Err(Error::invalid(
            "the index cannot be converted while a volume is absent: mount the volume, or give it \
             up with `ritornello paths forget`",
        )
        .with("why", why));
    }
    directory.repair_markers(manifest, &found);
    let segments = directory.open_segments(manifest, &found, IoChoice::Auto)?;
    if let Some((_, why)) = segments.unusable_dirs().pop() {
        return Err(Error::retry(
            "a volume of the store cannot be used now: check its disk, and convert again",
        )
        .with("why", why));
    }
    segments.sync(&segments.existing()?)?;
    let made = (|| {
        let old = open_index(medium, &index, from, &budget, None, manifest.clean)?;
        let new = open_index(medium, &index, to, &budget, index_memory, true)?;
        copy_all(old.as_ref(), new.as_ref(), &budget, &mut done, progress)
    })();
    let refused = |error: io::Error| {
        Error::retry("a directory could not be synced after the new index was written: try again")
            .because(error)
    };
    if let Err(error) = made {
        // If the removal fails, the next owner removes the files.
        let _ = backend(to).remove(medium.as_ref(), &index);
        return Err(error.with("from", from.word()).with("to", to.word()));
    }
    medium.sync_dir(&index).map_err(refused)?;
    medium.sync_dir(directory.path()).map_err(refused)?;
    to.word().clone_into(&mut manifest.index);
    directory.write_manifest(manifest)?;
    remove_leftovers(medium.as_ref(), directory, to)?;
    done.seconds = started.elapsed().as_secs_f64();
    tracing::warn!(
        dir = %directory.path().display(),
        from = done.from,
        to = done.to,
        runs = done.runs,
        pages = done.pages,
        seconds = done.seconds,
        "the store's index was converted"
    );
    Ok(done)
}

/// Copies all consistent runs, and checks that each run was either copied or dropped as
/// inconsistent.
fn copy_all(
    old: &dyn PrefixIndex,
    new: &dyn PrefixIndex,
    budget: &Budget,
    done: &mut Conversion,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let before = old.stats();
    // The old index fits its budget; the new index may exceed the budget temporarily.
    new.set_budget(u64::MAX);
    progress(0, before.runs);
    let copied = copy(old, new, &|| Ok(()), &mut |runs| progress(runs, before.runs));
    let Copied { runs, pages, dropped } = copied.map_err(|error| match error.kind() {
        ErrorKind::Retry if new.stats().memory_percent > 0 => Error::invalid(
            "the index does not fit the memory ceiling of `run`: raise the ceiling (`--to \
             run:8GiB`, or index=\"run:8GiB\")",
        )
        .because(error),
        _ => error,
    })?;
    let after = new.stats();
    if (after.runs, after.pages) != (runs, pages) || before.runs != runs + dropped {
        return Err(Error::fatal(
            "the new index differs from the old index, which the store keeps: report this",
        )
        .with("runs", before.runs)
        .with("copied", after.runs)
        .with("dropped", dropped));
    }
    new.set_budget(budget.index_bytes);
    new.maintain()?;
    let after = new.stats();
    (done.runs, done.pages, done.runs_dropped) = (runs, pages, dropped);
    (done.disk_bytes_before, done.disk_bytes) = (before.disk_bytes, after.disk_bytes);
    done.memory_bytes = after.memory_bytes;
    Ok(())
}

/// Removes the files of every index except `kept`: of the old index after a conversion, or the
/// files that an interrupted conversion left.
pub(crate) fn remove_leftovers(
    medium: &dyn Medium,
    directory: &Directory,
    kept: IndexKind,
) -> Result<()> {
    for other in [Backend::Run, Backend::Lsm].into_iter().filter(|other| *other != backend(kept)) {
        let removed = other.remove(medium, &directory.index()).map_err(|error| {
            Error::retry(
                "the files of an index that the manifest does not name could not be removed: try again",
            )
            .with("dir", directory.index().display())
            .because(error)
        })?;
        if removed {
            tracing::info!(
                index = other.name(),
                "files of an index that the manifest does not name were removed"
            );
        }
    }
    Ok(())
}

/// Opens the index in `dir`. `clean` is true if the last owner closed the store cleanly; otherwise
/// the files' contents may be in the page cache only.
pub(crate) fn open_index(
    medium: &Arc<dyn Medium>,
    dir: &Path,
    kind: IndexKind,
    budget: &Budget,
    index_memory: Option<u64>,
    clean: bool,
) -> Result<Arc<dyn PrefixIndex>> {
    Ok(match kind {
        IndexKind::Run => {
            let most = index_memory.unwrap_or_else(|| machine_memory::available() / MEMORY_SHARE);
            let options = RunOptions {
                metadata_bytes_max: budget.index_bytes,
                memory_bytes_max: most,
                clean,
                ..RunOptions::default()
            };
            Arc::new(RunIndex::open(Arc::clone(medium), dir, options)?)
        }
        IndexKind::Memory => Arc::new(MemoryIndex::new()),
        // RocksDB does its I/O without the medium.
        #[cfg(feature = "lsm")]
        IndexKind::Lsm => {
            let options = ritornello_index::LsmOptions::within(budget.index_bytes);
            Arc::new(ritornello_index::LsmIndex::open(&medium.host_path(dir), &options)?)
        }
    })
}

fn backend(kind: IndexKind) -> Backend {
    match kind {
        IndexKind::Run => Backend::Run,
        IndexKind::Memory => Backend::Memory,
        #[cfg(feature = "lsm")]
        IndexKind::Lsm => Backend::Lsm,
    }
}
