//! The keys of the tree.
//!
//! One tree holds all entries; the first byte of a key is its kind. Numbers are big-endian, so that
//! keys sort by their numbers, and the pages of a run are adjacent. All keys of a kind have the
//! same length, so that no key is a prefix of another key.
//!
//! | key | value |
//! |---|---|
//! | `p` scope, run, first page | a chunk: up to [`CHUNK`] page hashes of the run |
//! | `h` scope, page hash | run, and the page's number in the run |
//! | `r` run | the run's record, written last: a run without a record does not exist |
//! | `c` parent, child | the page of the parent to which the child is attached |
//! | `t` run | the end of the run's retention |
//! | `m`, a letter | numbers of the whole index: assigned run numbers, totals, the clock |

use crate::RunId;
use ritornello_format::{PageHash, ScopeSlot};

/// Maximum page hashes in the value of one key: 2 KiB.
pub(super) const CHUNK: usize = 128;

/// Key of the limit of run numbers: an open treats all numbers below the limit as assigned.
pub(super) const NUMBERS: [u8; 2] = *b"mn";
/// Key of the total numbers of runs and of pages.
pub(super) const SUM: [u8; 2] = *b"ms";
/// Key of the latest time of the store's clock.
pub(super) const CLOCK: [u8; 2] = *b"mc";

pub(super) const RUNS: &[u8] = b"r";
pub(super) const PAGES: &[u8] = b"p";
pub(super) const CHILDREN: &[u8] = b"c";
pub(super) const RETAINED: &[u8] = b"t";

pub(super) fn run(run: RunId) -> [u8; 9] {
    join(b'r', [run.0.to_be_bytes()])
}

pub(super) fn retained(run: RunId) -> [u8; 9] {
    join(b't', [run.0.to_be_bytes()])
}

pub(super) fn child(parent: RunId, child: RunId) -> [u8; 17] {
    join(b'c', [parent.0.to_be_bytes(), child.0.to_be_bytes()])
}

/// Returns the prefix of the keys of all children of a run.
pub(super) fn children(parent: RunId) -> [u8; 9] {
    join(b'c', [parent.0.to_be_bytes()])
}

/// The key of a page's hash in its scope.
pub(super) fn page(scope: ScopeSlot, page: PageHash) -> [u8; 21] {
    let mut key = [b'h'; 21];
    key[1..5].copy_from_slice(&scope.0.to_be_bytes());
    key[5..].copy_from_slice(&page.0);
    key
}

/// The key of the chunk that holds page `page` of the run.
pub(super) fn chunk(scope: ScopeSlot, run: RunId, page: usize) -> [u8; 15] {
    let mut key = [b'p'; 15];
    key[..13].copy_from_slice(&chunks(scope, run));
    let first = page - page % CHUNK;
    key[13..].copy_from_slice(&(first as u16).to_be_bytes());
    key
}

/// The prefix of all chunks of a run.
pub(super) fn chunks(scope: ScopeSlot, run: RunId) -> [u8; 13] {
    let mut key = [b'p'; 13];
    key[..5].copy_from_slice(&scoped(scope));
    key[5..].copy_from_slice(&run.0.to_be_bytes());
    key
}

/// The prefix of all chunks of a scope.
pub(super) fn scoped(scope: ScopeSlot) -> [u8; 5] {
    let mut key = [b'p'; 5];
    key[1..].copy_from_slice(&scope.0.to_be_bytes());
    key
}

/// The run at the end of a key of kind `r` or `t`, or the child at the end of a key of kind `c`.
pub(super) fn run_at_end(key: &[u8]) -> RunId {
    key.last_chunk().map_or(RunId(0), |bytes| RunId(u64::from_be_bytes(*bytes)))
}

/// The parent in a key of kind `c`.
pub(super) fn parent_of(key: &[u8]) -> RunId {
    key.get(1..)
        .and_then(|key| key.first_chunk())
        .map_or(RunId(0), |b| RunId(u64::from_be_bytes(*b)))
}

/// Scope, run and first page of a chunk's key.
pub(super) fn parse_chunk(key: &[u8]) -> Option<(ScopeSlot, RunId, usize)> {
    let scope = u32::from_be_bytes(key.get(1..5)?.try_into().ok()?);
    let run = u64::from_be_bytes(key.get(5..13)?.try_into().ok()?);
    let first = u16::from_be_bytes(key.get(13..)?.try_into().ok()?);
    Some((ScopeSlot(scope), RunId(run), usize::from(first)))
}

fn join<const N: usize, const K: usize>(kind: u8, parts: [[u8; 8]; N]) -> [u8; K] {
    let mut key = [kind; K];
    for (slot, part) in key[1..].chunks_exact_mut(8).zip(parts) {
        slot.copy_from_slice(&part);
    }
    key
}
