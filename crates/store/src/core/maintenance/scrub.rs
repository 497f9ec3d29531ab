//! Scrubbing: reads stored pages in the background, so that damage is found early.

use super::verify::{Unreadable, Verification};
use crate::core::StoreCore;
use ritornello_format::UNIT;
use ritornello_index::RunId;
use std::time::{Duration, Instant};

/// Factor by which scrubbing slows down while the store is in use.
const IN_USE_FACTOR: u32 = 8;
/// Pause when no run can be scrubbed, scrubbing is off, or the store is poisoned.
const IDLE_PAUSE: Duration = Duration::from_secs(60);
/// Time after a use during which the store counts as in use.
const IN_USE_TIME: Duration = Duration::from_secs(1);

/// Progress of scrubbing.
#[derive(Debug)]
pub(crate) struct Scrub {
    /// Remaining runs of this pass; the next run is last. Sorted by descending generation, and
    /// rotated in the first pass of an owner.
    left: Vec<(u64, RunId)>,
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
    /// Verifies the next run, if it is due. A pass visits all runs that are not in absent space, in
    /// the order of their puts. The first pass after a restart begins at a run that depends on the
    /// owner epoch. Returns the time until the next call.
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
        let bytes = view.place.units() * UNIT;
        let wait = Duration::from_secs_f64(bytes as f64 / rate as f64);
        scrub.due = now + if busy { wait * IN_USE_FACTOR } else { wait };
        drop(scrub);
        let mut report = Verification::default();
        self.verify_run(
            run,
            &view,
            &mut report,
            Unreadable::Keep,
            &self.maintenance.space.control(),
        );
        self.counters.scrubbed_runs.add(report.runs);
        self.counters.scrubbed_bytes.add(report.bytes);
        self.counters.scrub_damaged_pages.add(report.findings.len() as u64);
        self.maintenance.space.scrub.lock().due.saturating_duration_since(Instant::now())
    }

    fn next_to_scrub(&self, scrub: &mut Scrub) -> Option<(RunId, ritornello_index::RunView)> {
        // At the end of a pass, list the runs again, and search the list a second time.
        for _ in 0..2 {
            while let Some((_, run)) = scrub.left.pop() {
                let is_placed = |view: &ritornello_index::RunView| !view.place.extents.is_empty();
                let is_present = !self.hidden.is_absent(run);
                if let Some(view) = self.index.run(run).filter(is_placed).filter(|_| is_present) {
                    return Some((run, view));
                }
            }
            let first = self.counters.scrubbed_runs.get() == 0;
            self.index.for_each(&mut |run, view| scrub.left.push((view.place.generation, run)));
            scrub.left.sort_unstable_by(|a, b| b.cmp(a));
            if first && !scrub.left.is_empty() {
                // The owner epoch changes with each restart, so passes begin at different runs.
                let skip = self.shape.manifest().owner_epoch as usize * 7919 % scrub.left.len();
                scrub.left.rotate_right(skip);
            }
        }
        None
    }
}
