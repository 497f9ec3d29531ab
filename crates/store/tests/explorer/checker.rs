//! Checks that a store holds all required pages, and only permitted pages, after a power loss.

use crate::common::{MIB, Open, get, put, sequence};
use crate::kinds::{
    KINDS, Pages, SEQUENCES, SEQUENCES_PER_KIND, check_get, check_probe, keys_of, kinds,
    present_pages,
};
use ritornello_store::CatalogStats;

/// Bounds on the pages that a store may have after a crash.
#[derive(Clone)]
pub struct Bounds {
    /// By sequence, the pages that must be present.
    pub least: Vec<Pages>,
    /// By sequence, the pages that may be present.
    pub most: Vec<Pages>,
    /// By sequence, the pages that lookups may find while a volume is absent; all pages if no
    /// volume is absent.
    pub visible: Vec<Pages>,
    /// By sequence, the pages that were deleted while a volume was absent, if no flush followed.
    pub deleted: Vec<Pages>,
    /// By kind, whether the scope may have a quota: opening the store evicts pages above the quota,
    /// possibly not the pages that the previous owner would have evicted.
    pub limited: [bool; KINDS],
    /// Flushed pages that must not be evicted, each as a sequence and its retained pages.
    pub retained: Vec<(usize, Pages)>,
    /// Maximum allocated bytes.
    pub ceiling: u64,
    /// Whether every put must find space, unless a change of capacity is incomplete or a volume is
    /// absent.
    pub has_room: bool,
}

impl Bounds {
    /// Records that the pages `present` are durable and, unless a volume is absent, that no other
    /// pages are. While a volume is absent, the earlier bounds of other pages stay, except that
    /// deleted pages are no longer permitted.
    pub fn mark_durable(&mut self, present: Vec<Pages>) {
        if !self.has_absent_volume() {
            self.least.clone_from(&present);
            self.most = present;
            return;
        }
        for (at, &present) in present.iter().enumerate() {
            self.least[at] |= present;
            self.most[at] = (self.most[at] & !self.deleted[at]) | present;
            self.deleted[at] = 0;
        }
        self.visible = present;
    }

    pub fn has_absent_volume(&self) -> bool {
        self.visible.iter().any(|visible| *visible != Pages::MAX)
    }

    /// Returns the pages of sequence `at` that must be present. `absent` says whether a volume is
    /// absent.
    pub fn must(&self, at: usize, absent: bool) -> Pages {
        if absent { self.least[at] & self.visible[at] } else { self.least[at] }
    }

    /// Checks a store that was opened after a crash. `absent` says whether a volume is absent;
    /// `seed` selects the sequences to read, and whether to verify all pages and to complete a
    /// change of capacity.
    pub fn check_state(&self, open: &Open, seed: u64, absent: bool) {
        let present = present_pages(&open.store);
        let found = stats(open);
        let evicted = found.counters["evicted_pages"] > 0;
        for (at, &pages) in present.iter().enumerate() {
            let (kind, _) = keys_of(at);
            let (least, most) = (self.must(at, absent), self.most[at]);
            if !(evicted && self.limited[at / SEQUENCES_PER_KIND as usize]) {
                assert_eq!(
                    least & !pages,
                    0,
                    "flushed pages of sequence {at} were lost: {least:b} required, {pages:b} left"
                );
            }
            assert_eq!(
                pages & !most,
                0,
                "removed pages of sequence {at} returned: permitted {most:b}, present {pages:b}"
            );
            if absent {
                check_probe(&open.store, at, pages);
            }
            // A tail may be present without its head if the head is on the absent volume.
            if kind.scope.chained && !absent {
                assert_eq!(
                    pages & (pages + 1),
                    0,
                    "sequence {at} has a tail without its head: {pages:b}"
                );
            }
        }
        assert!(
            found.allocated_bytes <= self.ceiling,
            "{} bytes are allocated, more than the permitted {} bytes",
            found.allocated_bytes,
            self.ceiling
        );
        self.check_retained(open);
        for turn in 0..4 {
            let at = (seed.rotate_left(turn * 16) % SEQUENCES as u64) as usize;
            check_get(&open.store, at, present[at]);
        }
        if seed.is_multiple_of(16) && !absent {
            let found = open.core.verify(false, &mut |_, _| {}).unwrap();
            assert!(found.findings.is_empty(), "damaged pages: {:?}", found.findings);
        }
        if seed.is_multiple_of(3) {
            self.complete_change(open);
        }
        let scope = &kinds()[0].scope;
        let fresh = sequence(1 << 40, 2);
        let outcome = put(&open.store, scope, &fresh, None);
        let stored = outcome.pages;
        if stored < 2 {
            // Sealed segments count towards the capacity until they are removed.
            let now = stats(open);
            // An earlier check may have put these pages on the volume that is absent now: this put
            // is then refused with the reason `absent_space`.
            let absent = absent && outcome.reason == "absent_space";
            let refused = !self.has_room || !is_change_complete(&now) || absent;
            assert!(refused, "a put found no space ({}): {now:?}", outcome.reason);
        }
        open.store.flush().unwrap();
        assert_eq!(get(&open.store, scope, &fresh).pages, stored);
        open.store.delete(scope, &[&fresh[0]]).unwrap();
    }

    /// Continues a change of capacity that a power loss interrupted.
    fn complete_change(&self, open: &Open) {
        open.core.run_once();
        self.check_retained(open);
        let found = stats(open);
        if is_change_complete(&found) {
            assert!(found.allocated_bytes <= found.capacity_bytes, "{found:?}");
            assert!(found.segments <= found.segments_max, "{found:?}");
        }
        let present = present_pages(&open.store);
        for (at, &pages) in present.iter().enumerate() {
            assert_eq!(pages & !self.most[at], 0, "a move restored removed pages of sequence {at}");
            if found.counters["runs_moved"] > 0 {
                check_get(&open.store, at, pages);
            }
        }
    }

    fn check_retained(&self, open: &Open) {
        if stats(open).counters["retentions_displaced"] > 0 {
            return;
        }
        let present = present_pages(&open.store);
        for &(at, pages) in &self.retained {
            assert_eq!(pages & !present[at], 0, "retained pages of sequence {at} were lost");
        }
    }
}

pub fn stats(open: &Open) -> CatalogStats {
    open.core.stats().unwrap()
}

/// Whether no change of capacity is pending.
pub fn is_change_complete(found: &CatalogStats) -> bool {
    found.health.sealed_bytes == 0
        && found.paths.iter().all(|path| !path.draining)
        && found.index_disk_bytes <= (found.capacity_bytes / 32).max(MIB)
}
