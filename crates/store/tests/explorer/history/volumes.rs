//! Volumes and segments that are temporarily absent.

use super::History;
use crate::checker::Bounds;
use crate::common::Open;
use crate::kinds::{Pages, SEQUENCES, check_get, check_probe, present_pages};
use crate::operation::OwnerEnd;
use std::path::Path;

impl History {
    /// The owner ends, a volume is unmounted, and the next owner opens the store without it: the
    /// volume's pages are misses.
    pub(super) fn lose_volume(
        &mut self,
        open: Open,
        dir: &'static str,
        end: OwnerEnd,
        before: &Bounds,
    ) -> Open {
        self.end(open, end, before);
        self.recording.disk().unmount(Path::new(dir)).unwrap();
        self.absent = Some(dir);
        let open = self.open();
        let present = present_pages(&open.store);
        self.bounds.deleted.fill(0);
        self.bounds.visible.clone_from(&present);
        self.check_nothing_new(&present, &open);
        self.check_mount_point();
        self.check_recorded_within(before, &open);
        self.begin_ownership(&open);
        open
    }

    /// The absent volume returns for the running owner or, with `reopen`, for the next owner: all
    /// flushed pages are present again. Does nothing if no volume is absent.
    pub(super) fn return_volume(&mut self, open: Open, reopen: bool, before: &Bounds) -> Open {
        self.check_mount_point();
        let Some(dir) = self.absent else { return open };
        let open = if reopen {
            self.end(open, OwnerEnd::Close, before);
            self.recording.disk().mount(Path::new(dir)).unwrap();
            self.open()
        } else {
            self.recording.disk().mount(Path::new(dir)).unwrap();
            open.core.run_once();
            for (at, present) in present_pages(&open.store).iter().enumerate() {
                let deleted = self.bounds.deleted[at];
                assert_eq!(
                    present & deleted,
                    0,
                    "pages of sequence {at}, deleted while their volume was absent, returned"
                );
            }
            open
        };
        self.absent = None;
        self.bounds.visible = vec![Pages::MAX; SEQUENCES];
        let present = present_pages(&open.store);
        self.check_least(&present, "the volume returned");
        self.check_nothing_new(&present, &open);
        self.check_recorded_within(before, &open);
        if reopen {
            self.begin_ownership(&open);
        }
        open
    }

    /// Makes the `nth` open of a segment by the next owner fail, if there is an `nth` open. A
    /// maintenance pass, or with `reopen` the owner after the next, then opens the segment: no page
    /// is lost.
    pub(super) fn fail_open(
        &mut self,
        open: Open,
        nth: u64,
        reopen: bool,
        before: &Bounds,
    ) -> Open {
        let stored = present_pages(&open.store);
        self.end(open, OwnerEnd::Close, before);
        self.recording.fail_open(nth);
        let mut open = self.open();
        self.recording.heal_open();
        self.check_nothing_new(&present_pages(&open.store), &open);
        open.store.flush().unwrap();
        if reopen {
            open.close();
            open = self.open();
        } else {
            open.core.run_once();
        }
        let present = present_pages(&open.store);
        assert_eq!(present, stored, "a segment that fails to open must keep its pages");
        self.check_nothing_new(&present, &open);
        self.check_recorded_within(before, &open);
        self.begin_ownership(&open);
        open
    }

    /// Checks that every page of `present` is permitted ([`Bounds::most`]) and is delivered.
    fn check_nothing_new(&self, present: &[Pages], open: &Open) {
        for (at, &pages) in present.iter().enumerate() {
            let most = self.bounds.most[at];
            assert_eq!(
                pages & !most,
                0,
                "removed pages of sequence {at} returned: permitted {most:b}, present {pages:b}"
            );
            check_probe(&open.store, at, pages);
            check_get(&open.store, at, pages);
        }
    }

    /// Checks that no file was created under the mount point of an absent volume.
    fn check_mount_point(&self) {
        let Some(dir) = self.absent else { return };
        let created = self.recording.disk().created_under(Path::new(dir));
        assert!(created.is_empty(), "files of an absent volume were created: {created:?}");
    }
}
