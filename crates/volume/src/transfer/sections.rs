//! Sections of pages: byte ranges of pages, read in the order in which the caller needs them.
//! Threads that wait for a section wake when all pages have it.

use super::{Encoded, RunRead};
use crate::fork_safe_lock::ForkSafeLock;
use ritornello_format::{Error, PAGE_BYTES_MAX, Result};
use std::ops::Range;
use std::time::{Duration, Instant};

/// The sections of a page, which are the same for all pages of a read and in the order in which
/// they are needed, and the number of sections that have arrived. A value belongs to one target: a
/// repeated read continues after the sections that have arrived.
#[derive(Debug)]
pub struct Sections {
    ends: Box<[u64]>,
    state: ForkSafeLock<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    arrived: usize,
    ended: bool,
}

impl Sections {
    /// Sections that end at these byte offsets of a page; the last ends with the page.
    ///
    /// # Errors
    /// `Invalid` if `ends` is empty, begins with zero, does not ascend, or exceeds the longest
    /// page.
    pub fn new(ends: Vec<u64>) -> Result<Self> {
        let rise = ends.first().is_some_and(|end| *end > 0) && ends.is_sorted_by(|a, b| a < b);
        if !rise || ends.last().is_some_and(|end| *end > PAGE_BYTES_MAX) {
            return Err(Error::invalid("the ends of sections must ascend within a page")
                .with("sections", ends.len()));
        }
        Ok(Self { ends: ends.into(), state: ForkSafeLock::default() })
    }

    /// Length of a page in bytes.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Number of leading sections that have arrived: every page has them in the target, verified.
    /// No call writes to them again.
    #[must_use]
    pub fn arrived(&self) -> usize {
        self.state.lock().arrived
    }

    /// Waits until section `number` and all before it have arrived, or until the read ends early,
    /// at most until `deadline`. Returns `false` if the deadline passed first.
    #[must_use]
    pub fn wait(&self, number: usize, deadline: Option<Instant>) -> bool {
        let mut state = self.state.lock();
        while !state.ended && state.arrived <= number {
            state = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                None => self.state.wait(state),
                Some(Duration::ZERO) => return false,
                Some(left) => self.state.wait_for(state, left),
            };
        }
        true
    }

    /// Ends the read: waiters return.
    pub fn end(&self) {
        self.state.lock().ended = true;
        self.state.wake_all();
    }

    /// Records that the first `leading` sections have arrived. Wakes waiters if the number has
    /// grown.
    fn set_arrived(&self, leading: usize) {
        let mut state = self.state.lock();
        if leading > state.arrived {
            state.arrived = leading;
            drop(state);
            self.state.wake_all();
        }
    }

    /// Whether these reads are made section by section. False for as-stored reads, whose target
    /// holds encoded bytes; for a single section, which is the whole page; and for pages that are
    /// not as long as the sections together.
    pub(super) fn fit(&self, reads: &[RunRead<'_>]) -> bool {
        let fits = |read: &RunRead<'_>| {
            read.page_bytes == self.page_bytes() && !matches!(read.encoded, Encoded::AsStored)
        };
        self.ends.len() > 1 && reads.iter().all(fits)
    }

    /// The section that needs byte `at` of a page.
    fn section_of(&self, at: u64) -> usize {
        self.ends.partition_point(|end| *end <= at)
    }
}

/// Counts the parts of pages that are still to be read in one call, and records the sections that
/// have arrived. A part is a page's slices of one section, which are read together.
pub(super) struct Arrivals<'a> {
    sections: &'a Sections,
    /// Number of leading bytes of each page that earlier reads delivered to the same target.
    pub(super) arrived_bytes: u64,
    /// For each section, the number of parts that are not complete.
    pending: Vec<usize>,
    /// Sections below this number can still arrive. A missed page lowers the limit, because a
    /// section arrives only if every page has it.
    deliverable: usize,
}

impl<'a> Arrivals<'a> {
    pub(super) fn new(sections: &'a Sections) -> Self {
        let last = sections.arrived().checked_sub(1);
        Self {
            sections,
            arrived_bytes: last.map_or(0, |last| sections.ends[last]),
            pending: vec![0; sections.ends.len()],
            deliverable: 0,
        }
    }

    /// The section with which bytes `part` of a page are read: the first section that needs one of
    /// these bytes and has not arrived; `None` if all their sections have arrived.
    pub(super) fn section_of(&self, part: &Range<u64>) -> Option<usize> {
        (part.end > self.arrived_bytes)
            .then(|| self.sections.section_of(part.start.max(self.arrived_bytes)))
    }

    /// Sets the parts to wait for: `parts` yields the section of each part. If `are_all_expected`
    /// is false, a page of the call has missed already, and no section can arrive.
    pub(super) fn begin(&mut self, parts: impl Iterator<Item = usize>, are_all_expected: bool) {
        parts.for_each(|section| self.pending[section] += 1);
        self.deliverable = if are_all_expected { self.pending.len() } else { 0 };
        self.publish();
    }

    /// Records that a part of section `section` is complete: delivered, or missed.
    pub(super) fn complete(&mut self, section: usize, is_delivered: bool) {
        if !is_delivered {
            self.deliverable = self.deliverable.min(section);
        }
        self.pending[section] -= 1;
        self.publish();
    }

    fn publish(&self) {
        let complete = self.pending.iter().take_while(|parts| **parts == 0).count();
        self.sections.set_arrived(complete.min(self.deliverable));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_must_ascend_within_the_page() {
        let sections = Sections::new(vec![10, 30, 31]).unwrap();
        assert_eq!([0, 9, 10, 30].map(|at| sections.section_of(at)), [0, 0, 1, 2]);
        assert_eq!(sections.page_bytes(), 31);
        for wrong in [vec![], vec![0, 5], vec![5, 5], vec![5, 4], vec![PAGE_BYTES_MAX + 1]] {
            assert!(Sections::new(wrong).is_err());
        }
    }

    #[test]
    fn wait_ends_with_arrival_deadline_or_end() {
        let sections = Sections::new(vec![1, 2, 3]).unwrap();
        let now = Some(Instant::now());
        assert!(!sections.wait(0, now));
        sections.set_arrived(2);
        sections.set_arrived(1);
        assert_eq!(sections.arrived(), 2);
        assert!(sections.wait(1, None) && !sections.wait(2, now));
        std::thread::scope(|threads| {
            let waiting = threads.spawn(|| sections.wait(2, None));
            sections.end();
            assert!(waiting.join().unwrap());
        });
        assert_eq!(sections.arrived(), 2);
    }
}
