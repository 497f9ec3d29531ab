//! The memory ceiling of the index: at the ceiling puts are refused, and eviction frees memory.

use crate::core::StoreCore;
use crate::core::eviction_cause::EvictionCause;
use crate::core::step::STEP_UNITS;
use parking_lot::MutexGuard;
use ritornello_format::PageHash;
use std::time::{Duration, Instant};

/// Minimum interval between log lines about the memory ceiling.
const LOG_INTERVAL: Duration = Duration::from_secs(3600);
/// One pass of [`StoreCore::maintain_index_memory`] evicts 1/`EVICTED_SHARE` of the index, by
/// memory.
const EVICTED_SHARE: u64 = 16;

/// Refusals of the index at its memory ceiling.
#[derive(Debug, Default)]
pub(crate) struct IndexMemory {
    /// Whether the index refused a run, and no eviction has followed.
    is_full: bool,
    logged_at: Option<Instant>,
}

impl IndexMemory {
    /// Records a refusal. Returns whether it is to be logged.
    fn note_refusal(&mut self) -> bool {
        self.is_full = true;
        let log = self.logged_at.is_none_or(|at| at.elapsed() >= LOG_INTERVAL);
        if log {
            self.logged_at = Some(Instant::now());
        }
        log
    }
}

impl StoreCore {
    /// Returns whether the index has memory for a run of `pages`. If not, schedules an eviction.
    pub(crate) fn index_takes(&self, pages: &[PageHash]) -> bool {
        if self.index.has_memory_for(pages) {
            return true;
        }
        let log = self.state.lock().index_memory.note_refusal();
        if log {
            let index = self.index.stats();
            tracing::warn!(
                dir = %self.options.dir.display(),
                ceiling_bytes = index.memory_bytes_max,
                pages = index.pages,
                runs = index.runs,
                "the index has reached its memory ceiling: puts are skipped until eviction has \
                 made room. Raise the ceiling (index=\"run:8GiB\"), give the store less capacity \
                 (`ritornello resize`), or keep the index on disk (`ritornello convert-index DIR \
                 --to lsm`)"
            );
        }
        self.maintenance.wake_periodic();
        false
    }

    /// Evicts 1/[`EVICTED_SHARE`] of the index if the index refused a run since the last call.
    pub(crate) fn maintain_index_memory(&self) {
        let mut state = self.state.lock();
        if !std::mem::take(&mut state.index_memory.is_full) {
            return;
        }
        // Weigh by memory: a page takes a quarter of the memory of a run record.
        let weight = || {
            let index = self.index.stats();
            index.pages + 4 * index.runs
        };
        let enough = weight() / EVICTED_SHARE * (EVICTED_SHARE - 1);
        let allocator = state.space.allocator();
        let held = allocator.total_units() - allocator.free_units();
        // A step frees about a quarter of the space that the whole pass frees, at most
        // `STEP_UNITS`.
        let step = (held / (4 * EVICTED_SHARE)).clamp(1, STEP_UNITS);
        while weight() > enough && self.evict(&mut state, step, EvictionCause::Index).is_some() {
            MutexGuard::bump(&mut state);
        }
    }
}
