//! Scrubbing: reads stored pages in the background, so that damage is found early.

use super::verify::{Unreadable, Verification};
use crate::core::StoreCore;
use ritornello_format::{Result, UNIT};
use ritornello_index::{RunId, RunView};
use std::time::{Duration, Instant};

/// Factor by which scrubbing slows down while the store is in use.
const IN_USE_FACTOR: u32 = 8;
/// Minimum bytes for which each page of a run counts towards the rate. Verification takes about 2
/// µs of CPU time per page besides the time for its bytes. At the default rate of 8 MiB per second
/// this minimum permits 256 pages per second, and thus 0.05 % of a core.
const PAGE_BYTES_MIN: u64 = 32 << 10;
/// Result of [`StoreCore::scrub_next`] when no run can be scrubbed, scrubbing is off, or the store
/// is poisoned.
const IDLE_PAUSE: Duration = Duration::from_secs(60);
/// Time after a use during which the store counts as in use.
const IN_USE_TIME: Duration = Duration::from_secs(1);

/// Progress of scrubbing.
#[derive(Debug)]
pub(crate) struct Scrub {
    /// Remaining runs of this pass; the next run is last. Sorted by descending generation, and
    /// rotated in the first pass of an owner.
    left: Vec<(u64, RunId)>,
    /// The next run is not verified before this time.
    due: Instant,
    /// The last observed value of a counter that grows with uses and puts, and the time when this
    /// value was first observed.
    seen: (u64, Instant),
}

impl Default for Scrub {
    fn default() -> Self {
        let now = Instant::now();
        Self { left: Vec::new(), due: now + IN_USE_TIME, seen: (0, now) }
    }
}

impl StoreCore {
    /// Verifies the next run, if it is due. A pass visits the runs that were stored when it began
    /// and are not in absent space, in the order of their puts. The first pass after a restart
    /// begins at a run that depends on the owner epoch. Returns the time until the next run is due,
    /// or [`IDLE_PAUSE`]; an earlier call verifies nothing.
    pub(crate) fn scrub_next(&self) -> Duration {
        let rate = self.options.scrub_rate;
        if rate == 0 || self.lifecycle.is_poisoned() {
            return IDLE_PAUSE;
        }
        let last_use = self.state.lock().residents.clock.now();
        let uses = last_use.wrapping_add(self.shape.next_number());
        let mut scrub = self.maintenance.space.scrub.lock();
        let now = Instant::now();
        if uses != scrub.seen.0 {
            scrub.seen = (uses, now);
        }
        if now < scrub.due {
            return scrub.due - now;
        }
        let busy = now - scrub.seen.1 < IN_USE_TIME;
        let Some((run, view)) = self.next_to_scrub(&mut scrub) else {
            scrub.due = now + IDLE_PAUSE;
            return IDLE_PAUSE;
        };
        let bytes = (view.place.units() * UNIT).max(view.pages.len() as u64 * PAGE_BYTES_MIN);
        let wait = Duration::from_secs_f64(bytes as f64 / rate as f64);
        scrub.due = now + if busy { wait * IN_USE_FACTOR } else { wait };
        drop(scrub);
        let mut report = Verification::default();
        self.scrub_run(run, &view, &mut report);
        self.maintenance.space.scrub.lock().due.saturating_duration_since(Instant::now())
    }

    /// Verifies, in the order of their puts, all runs that are stored when the call begins and are
    /// not in absent space, at the speed of the disks. Removes damaged pages, and keeps pages that
    /// the disk cannot read. After each run `progress` gets the result so far and the number of
    /// runs that were stored when the call began; if it returns false, the call ends early.
    ///
    /// # Errors
    /// `Closed` if the store is closed, and `Retry` if it is poisoned, also during the call.
    pub fn scrub_pass(
        &self,
        progress: &mut dyn FnMut(&Verification, u64) -> bool,
    ) -> Result<Verification> {
        self.lifecycle.check_writable()?;
        let started = Instant::now();
        let mut report = Verification::default();
        let mut left = Vec::new();
        self.index.for_each(&mut |run, view| left.push((view.place.generation, run)));
        left.sort_unstable();
        let total = left.len() as u64;
        for (_, run) in left {
            self.lifecycle.check_writable()?;
            // A close waits until this run is verified, because the verification may remove pages.
            let writing = self.disk_calls.begin_writing();
            self.lifecycle.check_writable()?;
            if let Some(view) = self.to_scrub(run) {
                self.scrub_run(run, &view, &mut report);
            }
            drop(writing);
            report.seconds = started.elapsed().as_secs_f64();
            if !progress(&report, total) {
                break;
            }
        }
        Ok(report)
    }

    /// Verifies a run, and adds the result to `report` and to the counters.
    fn scrub_run(&self, run: RunId, view: &RunView, report: &mut Verification) {
        let mut found = Verification::default();
        let control = self.maintenance.space.control();
        self.verify_run(run, view, &mut found, Unreadable::Keep, &control);
        self.counters.scrubbed_runs.add(found.runs);
        self.counters.scrubbed_bytes.add(found.bytes);
        self.counters.scrub_damaged_pages.add(found.findings.len() as u64);
        report.add(found);
    }

    /// The run, if it is stored and not in absent space.
    fn to_scrub(&self, run: RunId) -> Option<RunView> {
        let view = self.index.run(run).filter(|view| !view.place.extents.is_empty());
        view.filter(|_| !self.hidden.is_absent(run))
    }

    fn next_to_scrub(&self, scrub: &mut Scrub) -> Option<(RunId, RunView)> {
        // At the end of a pass, list the runs again, and search the list a second time.
        for _ in 0..2 {
            while let Some((_, run)) = scrub.left.pop() {
                if let Some(view) = self.to_scrub(run) {
                    return Some((run, view));
                }
            }
            let first = self.counters.scrubbed_runs.get() == 0;
            self.index.for_each(&mut |run, view| scrub.left.push((view.place.generation, run)));
            scrub.left.sort_unstable_by(|a, b| b.cmp(a));
            if first && !scrub.left.is_empty() {
                // Each owner has another epoch, so the first passes of successive owners begin at
                // different runs.
                let skip = self.shape.manifest().owner_epoch as usize * 7919 % scrub.left.len();
                scrub.left.rotate_right(skip);
            }
        }
        None
    }
}
