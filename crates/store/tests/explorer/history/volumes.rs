//! Volumes and segments that are away temporarily.

use super::Life;
use crate::checker::Bounds;
use crate::common::Open;
use crate::kinds::{Pages, SEQUENCES, check_probe, deliver, present};
use crate::operation::End;
use std::path::Path;

impl Life {
    /// The owner ends, a volume is unmounted, and the next owner opens the store without it: its
    /// pages are misses.
    pub(super) fn leave(
        &mut self,
        open: Open,
        dir: &'static str,
        end: End,
        before: &Bounds,
    ) -> Open {
        self.end(open, end, before);
        self.watched.disk().unmount(Path::new(dir)).unwrap();
        self.absent = Some(dir);
        let open = self.open();
        let there = present(&open.store);
        self.bounds.deleted.fill(0);
        self.bounds.visible.clone_from(&there);
        self.check_nothing_new(&there, &open);
        self.check_mount_point();
        self.look_within(before, &open);
        self.succeed(&open);
        open
    }

    /// The volume returns: all flushed pages are present again.
    pub(super) fn come_back(&mut self, open: Open, reopen: bool, before: &Bounds) -> Open {
        self.check_mount_point();
        let Some(dir) = self.absent else { return open };
        let open = if reopen {
            self.end(open, End::Close, before);
            self.watched.disk().mount(Path::new(dir)).unwrap();
            self.open()
        } else {
            self.watched.disk().mount(Path::new(dir)).unwrap();
            open.core.run_once();
            for (at, there) in present(&open.store).iter().enumerate() {
                let deleted = self.bounds.deleted[at];
                assert_eq!(there & deleted, 0, "pages of {at} were deleted while away, and return");
            }
            open
        };
        self.absent = None;
        self.bounds.visible = vec![Pages::MAX; SEQUENCES];
        let there = present(&open.store);
        self.check_least(&there, "back from where they were");
        self.check_nothing_new(&there, &open);
        self.look_within(before, &open);
        if reopen {
            self.succeed(&open);
        }
        open
    }

    /// The next owner cannot open one of its segments at once: nothing is lost.
    pub(super) fn fail_open(
        &mut self,
        open: Open,
        nth: u64,
        reopen: bool,
        before: &Bounds,
    ) -> Open {
        let stored = present(&open.store);
        self.end(open, End::Close, before);
        self.watched.fail_open(nth);
        let mut open = self.open();
        self.watched.heal_open();
        self.check_nothing_new(&present(&open.store), &open);
        open.store.flush().unwrap();
        if reopen {
            open.close();
            open = self.open();
        } else {
            open.core.run_once();
        }
        let there = present(&open.store);
        assert_eq!(there, stored, "a segment could not be opened once");
        self.check_nothing_new(&there, &open);
        self.look_within(before, &open);
        self.succeed(&open);
        open
    }

    /// Promised pages are delivered, and were stored before.
    fn check_nothing_new(&self, there: &[Pages], open: &Open) {
        for (at, &pages) in there.iter().enumerate() {
            let most = self.bounds.most[at];
            assert_eq!(pages & !most, 0, "pages of {at} are back: {most:b}, {pages:b}");
            check_probe(&open.store, at, pages);
            deliver(&open.store, at, pages);
        }
    }

    /// Nothing was created under the mount point of an absent volume.
    fn check_mount_point(&self) {
        let Some(dir) = self.absent else { return };
        let created = self.watched.disk().created_under(Path::new(dir));
        assert!(created.is_empty(), "created under a mount point: {created:?}");
    }
}
