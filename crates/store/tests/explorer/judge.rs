//! What a store must and may hold after a power loss.

use crate::common::{MIB, Open, get, put, sequence};
use crate::kinds::{KINDS, NAMES, Pages, SEQUENCES, check_probe, deliver, keys_of, kinds, present};
use ritornello_store::CatalogStats;

/// Lower and upper bounds of what a crash leaves.
#[derive(Clone)]
pub struct Bounds {
    pub least: Vec<Pages>,
    pub most: Vec<Pages>,
    /// While a volume is away: pages reachable without it. Otherwise all pages.
    pub visible: Vec<Pages>,
    /// Deleted while a volume was away, and not flushed since.
    pub deleted: Vec<Pages>,
    /// Scopes that may have a quota: opening evicts what exceeds it, and the order of use is less
    /// exact after opening.
    pub limited: [bool; KINDS],
    /// Flushed and not to be evicted: sequences and their retained pages.
    pub retained: Vec<(usize, Pages)>,
    /// Maximum allocated bytes.
    pub ceiling: u64,
    /// Whether the disk always has room for the store.
    pub roomy: bool,
}

impl Bounds {
    /// Everything `present` is durable, and nothing else except on an absent volume.
    pub fn mark_durable(&mut self, present: Vec<Pages>) {
        if !self.is_away() {
            self.least.clone_from(&present);
            self.most = present;
            return;
        }
        for (at, &there) in present.iter().enumerate() {
            self.least[at] |= there;
            self.most[at] = (self.most[at] & !self.deleted[at]) | there;
            self.deleted[at] = 0;
        }
        self.visible = present;
    }

    /// Whether a volume is away.
    pub fn is_away(&self) -> bool {
        self.visible.iter().any(|visible| *visible != Pages::MAX)
    }

    /// Pages of sequence `at` that must be present, if the volume is `away` or not.
    pub fn must(&self, at: usize, away: bool) -> Pages {
        if away { self.least[at] & self.visible[at] } else { self.least[at] }
    }

    /// Judges a store opened after a crash, with a volume `away` or not; `seed` selects the
    /// sequences to read.
    pub fn judge(&self, open: &Open, seed: u64, away: bool) {
        let there = present(&open.store);
        let found = stats(open);
        let evicted = found.counters["evicted_pages"] > 0;
        for (at, &pages) in there.iter().enumerate() {
            let (kind, _) = keys_of(at);
            let (least, most) = (self.must(at, away), self.most[at]);
            if !(evicted && self.limited[at / NAMES as usize]) {
                assert_eq!(
                    least & !pages,
                    0,
                    "flushed pages of {at} are gone: {least:b}, {pages:b}"
                );
            }
            assert_eq!(pages & !most, 0, "pages of {at} are back: {most:b}, {pages:b}");
            if away {
                check_probe(&open.store, at, pages);
            }
            // The head of a tail may lie on the absent volume.
            if kind.scope.chained && !away {
                assert_eq!(pages & (pages + 1), 0, "{at} has a tail without its head: {pages:b}");
            }
        }
        assert!(
            found.allocated_bytes <= self.ceiling,
            "{} of {}",
            found.allocated_bytes,
            self.ceiling
        );
        self.check_retained(open);
        for turn in 0..4 {
            let at = (seed.rotate_left(turn * 16) % SEQUENCES as u64) as usize;
            deliver(&open.store, at, there[at]);
        }
        if seed.is_multiple_of(16) && !away {
            let found = open.core.verify(false, &mut |_, _| {}).unwrap();
            assert!(found.findings.is_empty(), "promised and not believed: {:?}", found.findings);
        }
        if seed.is_multiple_of(3) {
            self.go_on(open);
        }
        let scope = &kinds()[0].scope;
        let fresh = sequence(1 << 40, 2);
        let outcome = put(&open.store, scope, &fresh, None);
        let stored = outcome.pages;
        if stored < 2 {
            // Closed segments count until they are removed.
            let now = stats(open);
            // A put by an earlier judge may lie on the absent volume.
            let away = away && outcome.reason == "absent_space";
            let refused = !self.roomy || !in_shape(&now) || away;
            assert!(refused, "not taken ({}): {now:?}", outcome.reason);
        }
        open.store.flush().unwrap();
        assert_eq!(get(&open.store, scope, &fresh).pages, stored);
        open.store.delete(scope, &[&fresh[0]]).unwrap();
    }

    /// A store that was being changed at the power loss completes the change.
    fn go_on(&self, open: &Open) {
        open.core.run_once();
        self.check_retained(open);
        let found = stats(open);
        if in_shape(&found) {
            assert!(found.allocated_bytes <= found.capacity_bytes, "{found:?}");
            assert!(found.segments <= found.segments_max, "{found:?}");
        }
        let there = present(&open.store);
        for (at, &pages) in there.iter().enumerate() {
            assert_eq!(pages & !self.most[at], 0, "moving brought pages of {at} back");
            if found.counters["runs_moved"] > 0 {
                deliver(&open.store, at, pages);
            }
        }
    }

    fn check_retained(&self, open: &Open) {
        if stats(open).counters["retentions_displaced"] > 0 {
            return;
        }
        let there = present(&open.store);
        for &(at, pages) in &self.retained {
            assert_eq!(pages & !there[at], 0, "retained pages of {at} are gone");
        }
    }
}

pub fn stats(open: &Open) -> CatalogStats {
    open.core.stats().unwrap()
}

/// Whether no change of the space is pending.
pub fn in_shape(found: &CatalogStats) -> bool {
    found.health.sealed_bytes == 0
        && found.paths.iter().all(|path| !path.draining)
        && found.index_disk_bytes <= (found.capacity_bytes / 32).max(MIB)
}
