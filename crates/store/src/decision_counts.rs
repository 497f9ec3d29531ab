//! Counts of decisions by outcome.

use crate::decision::DecisionOutcome;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of the decisions that all processes reported to the owner.
#[derive(Debug, Default)]
pub struct DecisionCounts {
    outcomes: [AtomicU64; DecisionOutcome::ALL.len()],
    dropped: AtomicU64,
}

impl DecisionCounts {
    pub(crate) fn add(&self, outcome: DecisionOutcome) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts decisions that a process could not report.
    pub(crate) fn add_dropped(&self, decisions: u64) {
        // A client may report any number, and a counter must not decrease.
        let sum = |total: u64| Some(total.saturating_add(decisions));
        let _ = self.dropped.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// All counts by name: `decisions_OUTCOME` for each outcome, and `dropped_decisions`.
    pub fn by_name(&self) -> impl Iterator<Item = (String, u64)> {
        let outcomes =
            DecisionOutcome::ALL.into_iter().zip(&self.outcomes).map(|(outcome, count)| {
                (format!("decisions_{}", outcome.word()), count.load(Ordering::Relaxed))
            });
        outcomes.chain([("dropped_decisions".to_owned(), self.dropped())])
    }
}
