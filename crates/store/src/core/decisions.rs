//! Decisions of processes about the pages of prompts: the newest decisions, in memory.

use crate::decision::{Decision, DecisionMemory};
use crate::decision_counts::DecisionCounts;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Maximum bytes of the remembered decisions.
const BYTES_MAX: usize = 8 << 20;

/// The newest decisions since the store was opened, at most [`BYTES_MAX`] bytes. A thread that
/// holds the lock of `ring` takes no other lock, and only adds, copies or removes pointers to
/// decisions, or compares their ids.
#[derive(Debug, Default)]
pub(in crate::core) struct Decisions {
    pub(in crate::core) counts: DecisionCounts,
    ring: Mutex<Ring>,
}

#[derive(Debug)]
struct Ring {
    /// Each decision with the time of its arrival; the newest last.
    decisions: VecDeque<(Instant, Arc<Decision>)>,
    bytes: usize,
    forgotten: u64,
    /// When the store was opened, or when the newest forgotten decision arrived.
    since: Instant,
}

impl Default for Ring {
    fn default() -> Self {
        Self { decisions: VecDeque::new(), bytes: 0, forgotten: 0, since: Instant::now() }
    }
}

impl Ring {
    /// Forgets the oldest decisions until at most `bytes_max` bytes are left, and returns them.
    fn shrink(&mut self, bytes_max: usize) -> Vec<Arc<Decision>> {
        let mut forgotten = Vec::new();
        while self.bytes > bytes_max
            && let Some((arrived, decision)) = self.decisions.pop_front()
        {
            self.bytes -= decision.bytes();
            self.since = arrived;
            self.forgotten += 1;
            forgotten.push(decision);
        }
        forgotten
    }
}

impl Decisions {
    /// Adds decisions that a process reports, and the number of decisions that it could not report.
    pub(in crate::core) fn add(&self, decisions: &[Decision], dropped: u64) {
        self.counts.add_dropped(dropped);
        for decision in decisions {
            self.counts.add(decision.outcome);
            let decision = Arc::new(decision.clone().bounded());
            let mut ring = self.ring.lock();
            ring.bytes += decision.bytes();
            ring.decisions.push_back((Instant::now(), decision));
            let forgotten = ring.shrink(BYTES_MAX);
            drop(ring);
            // Freed without the lock.
            drop(forgotten);
        }
    }

    /// The newest decisions that match `filter`, at most `limit`, the newest first.
    pub(in crate::core) fn newest(
        &self,
        limit: usize,
        filter: impl Fn(&Decision) -> bool,
    ) -> Vec<Arc<Decision>> {
        let ring = self.ring.lock();
        let newest = ring.decisions.iter().rev().map(|(_, decision)| decision);
        newest.filter(|decision| filter(decision)).take(limit).cloned().collect()
    }

    /// Returns how long decisions are remembered, and how many were forgotten or not received.
    pub(in crate::core) fn memory(&self) -> DecisionMemory {
        let ring = self.ring.lock();
        DecisionMemory {
            remembered_seconds: ring.since.elapsed().as_secs(),
            forgotten: ring.forgotten,
            dropped: self.counts.dropped(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::DecisionOutcome;
    use ritornello_format::ScopeId;
    use std::collections::BTreeMap;

    fn decision(request: &str, pages: u8) -> Decision {
        let keys: Vec<[u8; 32]> = (0..pages).map(|page| [page; 32]).collect();
        let keys: Vec<&[u8]> = keys.iter().map(<[u8; 32]>::as_slice).collect();
        Decision::now(request, ScopeId([1; 16]), DecisionOutcome::Loaded).with_pages(&keys)
    }

    #[test]
    fn newest_decisions_come_first() {
        let decisions = Decisions::default();
        decisions.add(&[decision("a", 2), decision("b", 2)], 3);
        decisions.add(&[decision("a", 3)], 0);
        let found = |limit, id: &str| -> Vec<u32> {
            let newest = decisions.newest(limit, |decision| decision.request == id);
            newest.iter().map(|decision| decision.pages).collect()
        };
        assert_eq!((found(9, "a"), found(1, "a"), found(9, "c")), (vec![3, 2], vec![3], vec![]));
        assert_eq!(decisions.newest(2, |_| true).len(), 2);
        let memory = decisions.memory();
        assert_eq!((memory.forgotten, memory.dropped), (0, 3));
        let counts: BTreeMap<String, u64> = decisions.counts.by_name().collect();
        assert_eq!((counts["decisions_loaded"], counts["decisions_missed"]), (3, 0));
        assert_eq!(counts["dropped_decisions"], 3);
    }

    #[test]
    fn oldest_decisions_are_forgotten_at_the_limit() {
        let decisions = Decisions::default();
        let each = decision("0000000", 255);
        let kept = BYTES_MAX / each.bytes();
        for number in 0..kept {
            decisions.add(&[Decision { request: format!("{number:07}"), ..each.clone() }], 0);
        }
        assert_eq!(decisions.memory().forgotten, 0);
        assert_eq!(decisions.newest(usize::MAX, |_| true).len(), kept);
        for number in kept..kept + 5 {
            decisions.add(&[Decision { request: format!("{number:07}"), ..each.clone() }], 0);
        }
        assert_eq!(decisions.memory().forgotten, 5);
        let left = decisions.newest(usize::MAX, |_| true);
        assert_eq!((left.len(), &*left[kept - 1].request), (kept, "0000005"));
        assert!(decisions.ring.lock().bytes <= BYTES_MAX);
    }

    #[test]
    fn malformed_decision_is_kept_without_keys() {
        let decisions = Decisions::default();
        let short: &[u8] = &[1; 3];
        let request = "r".repeat(500);
        let made = Decision::now(&request, ScopeId::default(), DecisionOutcome::Missed);
        decisions.add(&[made.with_pages(&[short; 4])], u64::MAX);
        let found = decisions.newest(1, |_| true);
        assert_eq!((found[0].request.len(), found[0].pages, found[0].keys.len()), (128, 4, 0));
        decisions.add(&[], 2);
        assert_eq!(decisions.memory().dropped, u64::MAX);
    }
}
