//! Judging recorded crash states.

use super::Life;
use crate::checker::Bounds;
use crate::common::{Open, open_on};
use crate::kinds::{Pages, present};
use ritornello_medium::SimDisk;
use std::path::Path;
use std::sync::Arc;

impl Life {
    /// Pages removed by an act need not be present after a crash. In a store that is never full
    /// only deletes and drops remove pages.
    pub(super) fn spare(&mut self, there: &[Pages]) {
        if self.family.never_full {
            self.check_least(there, "flushed pages are gone that nothing took");
        } else {
            self.bounds.least.iter_mut().zip(there).for_each(|(least, there)| *least &= there);
        }
    }

    /// All durable pages of present volumes are present.
    pub(super) fn check_least(&self, there: &[Pages], what: &str) {
        for (at, there) in there.iter().enumerate() {
            let must = self.bounds.must(at, self.absent.is_some());
            assert_eq!(must & !there, 0, "{what}: of {at} {must:b}, and there is {there:b}");
        }
    }

    /// Judges the states recorded during an act. Pages that the act removed need not be present.
    pub(super) fn look_within(&mut self, before: &Bounds, open: &Open) {
        self.spare(&present(&open.store));
        // Power may have failed after the act released retained pages.
        self.note_displaced(open);
        self.look_since(before);
    }

    /// Judges the states recorded since `before`: pages removed since may be present or not.
    pub(super) fn look_since(&mut self, before: &Bounds) {
        let most = before.most.iter().zip(&self.bounds.most).map(|(a, b)| a | b).collect();
        let visible = before.visible.iter().zip(&self.bounds.visible).map(|(a, b)| a & b).collect();
        let most = std::mem::replace(&mut self.bounds.most, most);
        let visible = std::mem::replace(&mut self.bounds.visible, visible);
        self.look();
        (self.bounds.most, self.bounds.visible) = (most, visible);
    }

    pub(super) fn look(&mut self) {
        for (seed, disk) in self.watched.taken() {
            self.judge(seed, disk);
        }
    }

    pub(super) fn judge(&mut self, seed: u64, disk: SimDisk) {
        let unmounted = ["/a", "/b"].map(Path::new).into_iter().find(|dir| disk.is_unmounted(dir));
        if let Some(dir) = unmounted.filter(|_| seed.is_multiple_of(2)) {
            disk.mount(dir).unwrap();
        }
        let away = unmounted.is_some_and(|dir| disk.is_unmounted(dir));
        let open = open_on(Arc::new(disk), &self.options).unwrap();
        self.bounds.judge(&open, seed, away);
        open.store.close();
        self.states += 1;
    }
}
