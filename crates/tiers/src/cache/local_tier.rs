//! A tier of this machine: a store in memory or on disk, which processes of the machine share.

use super::rate::RateLimiter;
use ritornello_format::residency::Tier;
use ritornello_format::{Error, Result};
use ritornello_node::{Node, Options};
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{POLICY_FILE, Store, control_group};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// Minimum number of segments of a new store, if its capacity holds this number of the smallest
/// segments.
const MIN_SEGMENTS: u64 = 16;

/// A local tier and its configured limits.
#[derive(Debug)]
pub(super) struct LocalTier {
    pub(super) kind: Tier,
    pub(super) node: Arc<Node>,
    /// Capacity in bytes from the tier list; `u64::MAX` if the list does not give a capacity.
    pub(super) capacity: u64,
    pub(super) rate: RateLimiter,
}

impl LocalTier {
    pub(super) fn store(&self) -> &Arc<Store> {
        self.node.store()
    }
}

/// Opens the store of a tier in `dir` and `further_dirs`. With `oldest_first` this process evicts
/// by LRU while it owns the store, because write-back writes the least recently used pages to the
/// tier below first.
///
/// # Errors
/// Errors of [`ritornello_node::open`]; `Invalid` if the host tier's capacity reaches the memory
/// limit of this process's control group.
pub(super) fn open(
    tier: Tier,
    dir: PathBuf,
    further_dirs: Vec<PathBuf>,
    capacity: Option<u64>,
    oldest_first: bool,
) -> Result<Arc<Node>> {
    if tier == Tier::Host {
        check_memory(capacity.unwrap_or(0))?;
    }
    // A directory whose only file is the policy file holds no store yet.
    let new = fs::read_dir(&dir)
        .map_or(true, |entries| entries.flatten().all(|entry| entry.file_name() == POLICY_FILE));
    let segment_bytes = capacity.filter(|_| new).map(|capacity| {
        let bytes = (capacity / MIN_SEGMENTS).max(ritornello_store::SEGMENT_BYTES_MIN);
        (1 << bytes.ilog2()).min(ritornello_store::SEGMENT_BYTES)
    });
    let eviction = if oldest_first { PolicyKind::Lru } else { PolicyKind::default() };
    let further_dirs = (!further_dirs.is_empty()).then_some(further_dirs);
    let options = Options { further_dirs, capacity, segment_bytes, eviction, ..Options::new(dir) };
    ritornello_node::open(&options)
}

fn check_memory(capacity: u64) -> Result<()> {
    match control_group() {
        Some(group) if capacity >= group.limit => Err(Error::invalid(
            "the host tier's capacity reaches the memory limit of this process: \
             make it smaller, or raise the limit of its control group",
        )
        .with("host", capacity)
        .with("limit", group.limit)),
        _ => Ok(()),
    }
}
