//! Ends of owners, and checks of the store that the next owner opens.

use super::History;
use crate::checker::{Bounds, stats};
use crate::common::{MIB, Open, open_on};
use crate::kinds::{Pages, SEQUENCES, SEQUENCES_PER_KIND, check_get, keys_of, present_pages, put};
use crate::operation::{Operation, OwnerEnd};
use ritornello_format::ErrorKind;
use ritornello_store::Options;
use std::sync::Arc;

impl History {
    /// Updates the expectations for a new owner: leases have ended, and only durable retentions
    /// hold.
    pub(super) fn begin_ownership(&mut self, open: &Open) {
        self.leased.clear();
        let durable = std::mem::take(&mut self.bounds.retained);
        self.retained.retain(|&(at, pages, _)| durable.contains(&(at, pages)));
        self.bounds.retained = durable;
        self.displaced = 0;
        let present = present_pages(&open.store);
        self.check_protected(open, &present);
    }

    /// Ends the owner. Afterwards `self.recording` is the process of the next owner.
    pub(super) fn end(&mut self, open: Open, end: OwnerEnd, before: &Bounds) {
        match end {
            OwnerEnd::Close => {
                let present = present_pages(&open.store);
                open.close();
                // If power fails before the last sync of the close, the store must keep the pages
                // that were durable before the close.
                self.check_recorded_since(before);
                self.mark_durable(present);
            }
            OwnerEnd::Kill => {
                self.recording.kill_now();
                drop(open);
                self.end_owner_process();
                self.recording = self.recording.new_process();
                self.bounds.deleted.fill(0);
            }
            OwnerEnd::Crash(seed) => {
                let disk = self.recording.disk().crash(seed);
                drop(open);
                self.end_all_processes();
                self.recording = self.recording.on_disk(&disk);
                self.bounds.deleted.fill(0);
            }
        }
    }

    /// The next sync of a file whose path contains `part` fails, and drops dirty pages of the page
    /// cache. The poisoned owner refuses puts and flushes, but still reads. The next owner keeps
    /// all flushed pages, and the pages that it flushes.
    pub(super) fn fail_sync(
        &mut self,
        open: Open,
        part: &str,
        (at, pages): (usize, usize),
        end: OwnerEnd,
        before: &Bounds,
    ) -> Open {
        self.expect_put(at, pages);
        put(&open.store, at, pages, 0).unwrap();
        self.allow_evictions(&present_pages(&open.store));
        let seed = self.extra_rng.next();
        self.recording.disk().fail_next_sync(part, seed);
        let result = open.store.flush();
        // Disarm the failure if it has not happened: no path contains "\0", so it never matches.
        self.recording.disk().fail_next_sync("\0", 0);
        let Err(error) = result else {
            let present = present_pages(&open.store);
            self.check_recorded_within(before, &open);
            self.mark_durable(present);
            return open;
        };
        assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
        assert!(open.store.flush().is_err(), "a flush must fail after a failed sync");
        assert!(put(&open.store, 0, 1, 0).is_err(), "a poisoned store must refuse puts");
        let present = present_pages(&open.store);
        self.check_least(&present, "the store is poisoned");
        check_get(&open.store, at, present[at]);
        if end == OwnerEnd::Close {
            open.store.close();
            assert!(open.core.close().is_err(), "the close of a poisoned store must fail");
            drop(open);
            self.recording = self.recording.new_process();
            self.bounds.deleted.fill(0);
        } else {
            self.end(open, end, before);
        }
        let open = self.open();
        self.check_least(&present_pages(&open.store), "opened after a failed sync");
        self.check_recorded_within(before, &open);
        self.begin_ownership(&open);
        let fresh = self.extra_rng.below((SEQUENCES - SEQUENCES_PER_KIND as usize) as u64) as usize;
        let pages = keys_of(fresh).0.pages.min(4);
        self.expect_put(fresh, pages);
        put(&open.store, fresh, pages, 0).unwrap();
        open.store.flush().unwrap();
        self.check_recorded_within(before, &open);
        let present = present_pages(&open.store);
        self.mark_durable(present);
        self.check_state(seed, self.recording.disk().crash(seed));
        open
    }

    pub(super) fn reopen(&mut self, open: Open, capacity: Option<u64>, before: &Bounds) -> Open {
        let present = present_pages(&open.store);
        open.close();
        let open = match capacity {
            None => self.open(),
            Some(mib) => {
                self.bounds.ceiling = self.bounds.ceiling.max(mib * MIB);
                let options = Options { capacity: Some(mib * MIB), ..self.options.clone() };
                open_on(Arc::new(self.recording.medium()), &options).unwrap_or_else(|error| {
                    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
                    self.open()
                })
            }
        };
        if capacity.is_none() {
            self.check_same(&open, &present, "closed and opened again");
        }
        self.check_recorded_within(before, &open);
        self.mark_durable(present);
        if !self.workload.never_full {
            self.bounds.least = present_pages(&open.store);
        }
        self.begin_ownership(&open);
        open
    }

    /// Kills the owner after `after` changes of the disk, or at the latest when `operation` and the
    /// calls after it have ended: further puts if `operation` is a put, and a flush unless
    /// `operation` is a reopening. Segment writes may be in flight. The next owner is client number
    /// `next`, or a new process if `next` is `None`.
    pub(super) fn kill(
        &mut self,
        open: Open,
        operation: &Operation,
        after: u64,
        next: Option<usize>,
        before: &Bounds,
    ) -> Open {
        self.expect(operation);
        let in_flight = self.extra_rng.below(17) as usize;
        self.recording.kill(after, in_flight);
        let mut flushed = None;
        if let Operation::Reopen { .. } = operation {
            open.store.close();
            let _ = open.core.close();
            drop(open);
            let _ = open_on(Arc::new(self.recording.medium()), &self.options);
        } else {
            let done = self.attempt(&open, operation).is_ok();
            if let Operation::Put { .. } = operation {
                self.put_more(&open, in_flight / 4);
            }
            let durable = open.store.flush().is_ok();
            let present = present_pages(&open.store);
            drop(open);
            flushed = durable.then_some(present.clone());
            if done {
                self.expect_dropped(operation);
            }
            // Expect only the flushed pages that are still present. The killed process may have
            // evicted the missing pages, and the eviction may be durable or not.
            if !self.workload.never_full {
                self.allow_evictions(&present);
            }
        }
        self.bounds.deleted.fill(0);
        self.recording.kill_now();
        self.end_owner_process();
        match next {
            None => self.recording = self.recording.new_process(),
            Some(client_number) => self.make_owner(client_number),
        }
        let must: Vec<Pages> =
            (0..SEQUENCES).map(|at| self.bounds.must(at, self.absent.is_some())).collect();
        let open = self.open();
        let present = present_pages(&open.store);
        if let Some(flushed) = flushed {
            self.check_same(&open, &flushed, "flushed, killed and opened again");
        }
        let evicted = stats(&open).counters["evicted_pages"] > 0;
        for (at, must) in must.iter().enumerate() {
            let spared = evicted && self.bounds.limited[at / SEQUENCES_PER_KIND as usize];
            assert!(
                must & !present[at] == 0 || spared,
                "a kill removed flushed pages of sequence {at}"
            );
        }
        self.check_recorded_within(before, &open);
        self.begin_ownership(&open);
        open
    }

    /// Puts further sequences, so that more writes are in flight at a kill.
    fn put_more(&mut self, open: &Open, puts: usize) {
        for _ in 0..puts {
            // Expect no page that an earlier put evicted, although the next put may store it again:
            // after a crash the page is missing if the disk has the eviction and lacks the later
            // put.
            if !self.workload.never_full {
                self.allow_evictions(&present_pages(&open.store));
            }
            let at =
                self.extra_rng.below((SEQUENCES - SEQUENCES_PER_KIND as usize) as u64) as usize;
            let pages = 1 + self.extra_rng.below(keys_of(at).0.pages as u64) as usize;
            self.expect_put(at, pages);
            let _ = put(&open.store, at, pages, 0);
        }
    }

    pub(super) fn crash(&mut self, open: Open, seed: u64, before: &Bounds) -> Open {
        self.end(open, OwnerEnd::Crash(seed), before);
        let open = self.open();
        let present = present_pages(&open.store);
        self.bounds.check_state(&open, seed, self.absent.is_some());
        self.check_recorded_within(before, &open);
        self.bounds.mark_durable(present);
        if !self.workload.never_full {
            self.bounds.least = present_pages(&open.store);
        }
        self.begin_ownership(&open);
        open
    }

    /// Checks that no page was added, and that only a quota removed pages.
    pub(super) fn check_same(&self, open: &Open, expected: &[Pages], what: &str) {
        let evicted = stats(open).counters["evicted_pages"] > 0;
        for (at, (present, expected)) in present_pages(&open.store).iter().zip(expected).enumerate()
        {
            let fewer = evicted && self.bounds.limited[at / SEQUENCES_PER_KIND as usize];
            let same = present == expected || (fewer && present & !expected == 0);
            assert!(same, "{what}: sequence {at} had the pages {expected:b}, and has {present:b}");
        }
    }
}
