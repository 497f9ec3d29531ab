//! How owners end, and what the next owner finds.

use super::Life;
use crate::act::{Act, End};
use crate::common::{MIB, Open, open_on};
use crate::judge::{Bounds, stats};
use crate::kinds::{NAMES, Pages, SEQUENCES, deliver, keys_of, present, put};
use ritornello_format::ErrorKind;
use ritornello_store::Options;
use std::sync::Arc;

impl Life {
    /// Another owner: leases have ended, and durable retentions hold.
    pub(super) fn succeed(&mut self, open: &Open) {
        self.leased.clear();
        let durable = std::mem::take(&mut self.bounds.retained);
        self.retained.retain(|&(at, pages, _)| durable.contains(&(at, pages)));
        self.bounds.retained = durable;
        self.displaced = 0;
        let there = present(&open.store);
        self.check_what_stays(open, &there);
    }

    /// Ends the owner; `self.watched` is the next one's process.
    pub(super) fn end(&mut self, open: Open, end: End, before: &Bounds) {
        match end {
            End::Close => {
                let there = present(&open.store);
                open.close();
                // Moments before the last sync promise no more than before.
                self.look_since(before);
                self.mark_durable(there);
            }
            End::Kill => {
                self.watched.kill_now();
                drop(open);
                self.end_owner_process();
                self.watched = self.watched.another();
                self.bounds.deleted.fill(0);
            }
            End::Crash(seed) => {
                let disk = self.watched.disk().crash(seed);
                drop(open);
                self.end_all_processes();
                self.watched = self.watched.over(&disk);
                self.bounds.deleted.fill(0);
            }
        }
    }

    /// A sync fails and drops dirty pages. The poisoned owner refuses puts and flushes, and still
    /// reads. The next one keeps what was flushed, and what it flushes itself.
    pub(super) fn fail_sync(
        &mut self,
        open: Open,
        part: &str,
        (at, pages): (usize, usize),
        end: End,
        before: &Bounds,
    ) -> Open {
        self.expect_put(at, pages);
        put(&open.store, at, pages, 0).unwrap();
        self.spare(&present(&open.store));
        let seed = self.fate.next();
        self.watched.disk().fail_next_sync(part, seed);
        let answer = open.store.flush();
        // No path contains this.
        self.watched.disk().fail_next_sync("\0", 0);
        let Err(error) = answer else {
            let there = present(&open.store);
            self.look_within(before, &open);
            self.mark_durable(there);
            return open;
        };
        assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
        assert!(open.store.flush().is_err(), "a failed sync is not repeated");
        assert!(put(&open.store, 0, 1, 0).is_err(), "a poisoned store takes puts");
        let there = present(&open.store);
        self.check_least(&there, "poisoned");
        deliver(&open.store, at, there[at]);
        if end == End::Close {
            open.store.close();
            assert!(open.core.close().is_err(), "a poisoned store closes well");
            drop(open);
            self.watched = self.watched.another();
            self.bounds.deleted.fill(0);
        } else {
            self.end(open, end, before);
        }
        let open = self.open();
        self.check_least(&present(&open.store), "opened after a failed sync");
        self.look_within(before, &open);
        self.succeed(&open);
        let fresh = self.fate.below((SEQUENCES - NAMES as usize) as u64) as usize;
        self.expect_put(fresh, 4);
        put(&open.store, fresh, 4, 0).unwrap();
        open.store.flush().unwrap();
        self.look_within(before, &open);
        let there = present(&open.store);
        self.mark_durable(there);
        self.judge(seed, self.watched.disk().crash(seed));
        open
    }

    pub(super) fn reopen(&mut self, open: Open, capacity: Option<u64>, before: &Bounds) -> Open {
        let there = present(&open.store);
        open.close();
        let open = match capacity {
            None => self.open(),
            Some(mib) => {
                self.bounds.ceiling = self.bounds.ceiling.max(mib * MIB);
                let options = Options { capacity: Some(mib * MIB), ..self.options.clone() };
                open_on(Arc::new(self.watched.clone()), &options).unwrap_or_else(|error| {
                    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
                    self.open()
                })
            }
        };
        if capacity.is_none() {
            self.check_same(&open, &there, "closed and opened again");
        }
        self.look_within(before, &open);
        self.mark_durable(there);
        if !self.family.never_full {
            self.bounds.least = present(&open.store);
        }
        self.succeed(&open);
        open
    }

    /// The owner is killed within `act` and the puts that follow, with segment writes in flight.
    /// Another process opens the store: a new one, or the client `next`.
    pub(super) fn kill(
        &mut self,
        open: Open,
        act: &Act,
        after: u64,
        next: Option<usize>,
        before: &Bounds,
    ) -> Open {
        self.expect(act);
        let in_flight = self.fate.below(17) as usize;
        self.watched.kill(after, in_flight);
        let mut flushed = None;
        if let Act::Reopen { .. } = act {
            open.store.close();
            let _ = open.core.close();
            drop(open);
            let _ = open_on(Arc::new(self.watched.clone()), &self.options);
        } else {
            let done = self.attempt(&open, act).is_ok();
            if let Act::Put { .. } = act {
                self.put_more(&open, in_flight / 4);
            }
            let durable = open.store.flush().is_ok();
            let there = present(&open.store);
            drop(open);
            flushed = durable.then_some(there.clone());
            if done {
                self.forget_dropped(act);
            }
            // Flushed pages that were not evicted are present. Evictions by the dying process
            // because its disk is gone do not reach the disk.
            if !self.family.never_full {
                self.spare(&there);
            }
        }
        self.bounds.deleted.fill(0);
        self.watched.kill_now();
        self.end_owner_process();
        match next {
            None => self.watched = self.watched.another(),
            Some(who) => self.take_over(who),
        }
        let must: Vec<Pages> =
            (0..SEQUENCES).map(|at| self.bounds.must(at, self.absent.is_some())).collect();
        let open = self.open();
        let there = present(&open.store);
        if let Some(flushed) = flushed {
            self.check_same(&open, &flushed, "flushed, killed and opened again");
        }
        let evicted = stats(&open).counters["evicted_pages"] > 0;
        for (at, must) in must.iter().enumerate() {
            let spared = evicted && self.bounds.limited[at / NAMES as usize];
            assert!(must & !there[at] == 0 || spared, "a kill cost flushed pages of {at}");
        }
        self.look_within(before, &open);
        self.succeed(&open);
        open
    }

    /// Puts of other threads, so that more is in flight at a kill.
    fn put_more(&mut self, open: &Open, puts: usize) {
        for _ in 0..puts {
            // Pages that one put evicts another may put again, which the disk does not see.
            if !self.family.never_full {
                self.spare(&present(&open.store));
            }
            let at = self.fate.below((SEQUENCES - NAMES as usize) as u64) as usize;
            let pages = 1 + self.fate.below(keys_of(at).0.pages as u64) as usize;
            self.expect_put(at, pages);
            let _ = put(&open.store, at, pages, 0);
        }
    }

    pub(super) fn crash(&mut self, open: Open, seed: u64, before: &Bounds) -> Open {
        self.end(open, End::Crash(seed), before);
        let open = self.open();
        let there = present(&open.store);
        self.bounds.judge(&open, seed, self.absent.is_some());
        self.look_within(before, &open);
        self.bounds.mark_durable(there);
        if !self.family.never_full {
            self.bounds.least = present(&open.store);
        }
        self.succeed(&open);
        open
    }

    /// No page was added or removed, except by a quota.
    pub(super) fn check_same(&self, open: &Open, expected: &[Pages], what: &str) {
        let evicted = stats(open).counters["evicted_pages"] > 0;
        for (at, (there, expected)) in present(&open.store).iter().zip(expected).enumerate() {
            let fewer = evicted && self.bounds.limited[at / NAMES as usize];
            let same = there == expected || (fewer && there & !expected == 0);
            assert!(same, "{what}: pages of {at} were {expected:b} and are {there:b}");
        }
    }
}
