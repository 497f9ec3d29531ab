//! A store with an index and no payload: many sequences of 256 pages.

use crate::bench::content::{KEY_BYTES, PageName};
use crate::bench::disk::capacity_for;
use ritornello_format::{PageHash, Place, Scope, ScopeId, ScopeRegistry, ScopeSlot};
use ritornello_index::{NewRun, PrefixIndex, RunIndex, RunOptions};
use ritornello_medium::{Host, Medium};
use ritornello_store::{Budget, Directory, Options};
use ritornello_terminal::exit::Failure;
use std::path::Path;
use std::sync::Arc;

/// Pages per sequence, and per probe.
pub const PROBE_PAGES: u32 = 256;
/// Number of the set of the store's sequences; sequences of other sets have other keys.
pub const SET: u32 = 4;
/// Runs between two syncs.
const RUNS_A_SYNC: u32 = 1 << 14;
/// Segment size in the store's settings; the store never creates a segment.
const SEGMENT_BYTES: u64 = 1 << 20;

/// Slot of the scope.
pub const SLOT: ScopeSlot = ScopeSlot(0);

/// Returns the scope of all pages.
#[must_use]
pub fn scope() -> Scope {
    Scope::opaque("ritornello bench index", 4096, true)
}

/// Returns the number of whole sequences in `entries` pages, at least one.
#[must_use]
pub fn sequences(entries: u64) -> u32 {
    u32::try_from((entries / u64::from(PROBE_PAGES)).max(1)).unwrap_or(u32::MAX)
}

/// Creates a store in `dir` whose index has `entries` pages in runs of `run_pages`, and returns the
/// index.
///
/// # Errors
/// File system errors and index errors.
pub fn fill(dir: &Path, entries: u64, run_pages: u32) -> Result<RunIndex, Failure> {
    let run_pages = run_pages.clamp(1, PROBE_PAGES);
    let directory = Directory::new(Arc::new(Host), dir);
    let mut options = Options::new(dir);
    options.capacity = Some(capacity(entries, run_pages)?);
    options.segment_bytes = Some(SEGMENT_BYTES);
    directory.write_manifest(&directory.manifest_for(&options)?)?;
    let registry = ScopeRegistry {
        next: 1,
        scopes: [(SLOT, scope().into())].into(),
        ..ScopeRegistry::default()
    };
    directory.write_registry(&registry.encode())?;
    let index = index(dir, entries, run_pages)?;
    let scope = scope().id();
    let mut hashes: Vec<PageHash> = Vec::with_capacity(PROBE_PAGES as usize);
    let (mut left, mut generation) = (entries, 0u32);
    let mut sequence = 0;
    while left > 0 {
        let pages = left.min(u64::from(PROBE_PAGES)) as u32;
        hashes.clear();
        hashes.extend((0..pages).map(|page| hash(&scope, sequence, page)));
        let mut parent = None;
        for pages in hashes.chunks(run_pages as usize) {
            generation += 1;
            insert(&index, parent, pages, generation)?;
            parent = pages.last().copied();
            if generation.is_multiple_of(RUNS_A_SYNC) {
                index.sync()?;
            }
        }
        sequence += 1;
        left -= u64::from(pages);
    }
    index.sync()?;
    Ok(index)
}

/// Opens the index of a store that [`fill`] created with the same `entries` and `run_pages`. No
/// other process may have the store open.
///
/// # Errors
/// File system errors and index errors.
pub fn index(dir: &Path, entries: u64, run_pages: u32) -> Result<RunIndex, Failure> {
    let medium: Arc<dyn Medium> = Arc::new(Host);
    let budget = Budget::divide(capacity(entries, run_pages)?, SEGMENT_BYTES)?;
    let options = RunOptions { metadata_bytes_max: budget.index_bytes, ..RunOptions::default() };
    let directory = Directory::new(Arc::clone(&medium), dir);
    Ok(RunIndex::open(medium, &directory.index(), options)?)
}

/// Returns a capacity with the space for a journal and two checkpoints that a changing store needs.
fn capacity(entries: u64, run_pages: u32) -> Result<u64, Failure> {
    let runs = entries.div_ceil(u64::from(run_pages)) + 1;
    let index_bytes = RunOptions::metadata_bytes_for(runs, run_pages, 1) * 3 / 2;
    capacity_for(2, SEGMENT_BYTES, index_bytes)
}

fn insert(
    index: &RunIndex,
    parent: Option<PageHash>,
    pages: &[PageHash],
    generation: u32,
) -> Result<(), Failure> {
    let place = Place { generation: u64::from(generation), ..Place::default() };
    let recency = u64::from(generation);
    index.insert(&NewRun { scope: SLOT, chained: true, parent, pages, place: &place, recency })?;
    Ok(())
}

fn hash(scope: &ScopeId, sequence: u32, page: u32) -> PageHash {
    let key: [u8; KEY_BYTES] = PageName { set: SET, sequence, page }.key();
    PageHash::of(scope, &key)
}
