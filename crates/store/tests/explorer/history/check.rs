//! Checks of recorded crash states.

use super::{DIRS, History};
use crate::checker::Bounds;
use crate::common::{Open, open_on};
use crate::kinds::{Pages, present_pages};
use ritornello_medium::SimDisk;
use std::path::Path;
use std::sync::Arc;

impl History {
    /// Stops expecting flushed pages that are no longer present, because an operation may have
    /// evicted them. In a store that is never full, checks instead that all flushed pages are
    /// present.
    pub(super) fn allow_evictions(&mut self, present: &[Pages]) {
        if self.workload.never_full {
            self.check_least(present, "flushed pages were lost");
        } else {
            self.bounds
                .least
                .iter_mut()
                .zip(present)
                .for_each(|(least, present)| *least &= present);
        }
    }

    pub(super) fn check_least(&self, present: &[Pages], what: &str) {
        for (at, present) in present.iter().enumerate() {
            let must = self.bounds.must(at, self.absent.is_some());
            assert_eq!(
                must & !present,
                0,
                "{what}: sequence {at} must have the pages {must:b}, and has {present:b}"
            );
        }
    }

    /// Checks the states recorded during an operation. Pages that the operation removed may be
    /// missing.
    pub(super) fn check_recorded_within(&mut self, before: &Bounds, open: &Open) {
        self.allow_evictions(&present_pages(&open.store));
        // If the operation released retentions early, expect no retention: power may have failed
        // after the release.
        self.note_displaced(open);
        self.check_recorded_since(before);
    }

    /// Checks all crash states that are not checked yet. `before`: the bounds when the operation
    /// began. A state may contain any page that `before` or the current bounds permit. While a
    /// volume is absent, a page must be present only if it is visible by both bounds.
    pub(super) fn check_recorded_since(&mut self, before: &Bounds) {
        let most = before.most.iter().zip(&self.bounds.most).map(|(a, b)| a | b).collect();
        let visible = before.visible.iter().zip(&self.bounds.visible).map(|(a, b)| a & b).collect();
        let most = std::mem::replace(&mut self.bounds.most, most);
        let visible = std::mem::replace(&mut self.bounds.visible, visible);
        self.check_recorded();
        (self.bounds.most, self.bounds.visible) = (most, visible);
    }

    pub(super) fn check_recorded(&mut self) {
        for (seed, disk) in self.recording.take_states() {
            self.check_state(seed, disk);
        }
    }

    pub(super) fn check_state(&mut self, seed: u64, disk: SimDisk) {
        let unmounted = DIRS.map(Path::new).into_iter().find(|dir| disk.is_unmounted(dir));
        if let Some(dir) = unmounted.filter(|_| seed.is_multiple_of(2)) {
            disk.mount(dir).unwrap();
        }
        let absent = unmounted.is_some_and(|dir| disk.is_unmounted(dir));
        let open = open_on(Arc::new(disk), &self.options).unwrap();
        self.bounds.check_state(&open, seed, absent);
        open.store.close();
        self.states += 1;
    }
}
