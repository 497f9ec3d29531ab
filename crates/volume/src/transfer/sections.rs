//! Reading pages section by section: what a caller needs first comes first, and he is told when it is
//! there.
//!
//! A slice is the least that can be verified. It is read with the first section that needs a byte of
//! it, so none is read twice, however a run was cut when it was written.

mod disk;
mod mapped;
mod plan;

pub(super) use disk::read;
pub(super) use mapped::read as read_mapped;

use super::{Encoded, RunRead};
use crate::parked::Parked;
use ritornello_format::{Error, PAGE_BYTES_MAX, Result};
use std::time::{Duration, Instant};

/// The sections of a page that are wanted one after the other, the same of all pages of a read, and
/// how many of them have come. They are for one target: a read goes on behind those that have come.
#[derive(Debug)]
pub struct Sections {
    ends: Box<[u64]>,
    state: Parked<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    arrived: usize,
    ended: bool,
}

impl Sections {
    /// Sections that end at these bytes of a page, the last at its end.
    ///
    /// # Errors
    /// `Invalid` if the ends do not rise, or there are none.
    pub fn new(ends: Vec<u64>) -> Result<Self> {
        let rise = ends.first().is_some_and(|end| *end > 0) && ends.is_sorted_by(|a, b| a < b);
        if !rise || ends.last().is_some_and(|end| *end > PAGE_BYTES_MAX) {
            return Err(Error::invalid("sections end one behind the other, in a page")
                .with("sections", ends.len()));
        }
        Ok(Self { ends: ends.into(), state: Parked::default() })
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Leading sections that are in the target, of every page. Nothing writes to them any more.
    #[must_use]
    pub fn arrived(&self) -> usize {
        self.state.lock().arrived
    }

    /// Waits until section `number` and all before it are arrived, or will not be, because the read is
    /// ended; at most until `deadline`. Returns whether that came to pass.
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

    /// The read is ended: nobody needs to wait any more.
    pub fn end(&self) {
        self.state.lock().ended = true;
        self.state.wake_all();
    }

    /// `leading` sections are arrived.
    fn set_arrived(&self, leading: usize) {
        let mut state = self.state.lock();
        if leading > state.arrived {
            state.arrived = leading;
            drop(state);
            self.state.wake_all();
        }
    }

    /// Whether these reads can be made in sections.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_rise_and_end_with_the_page() {
        let sections = Sections::new(vec![10, 30, 31]).unwrap();
        assert_eq!([0, 9, 10, 30].map(|at| sections.section_of(at)), [0, 0, 1, 2]);
        assert_eq!(sections.page_bytes(), 31);
        for wrong in [vec![], vec![0, 5], vec![5, 5], vec![5, 4], vec![PAGE_BYTES_MAX + 1]] {
            assert!(Sections::new(wrong).is_err());
        }
    }

    #[test]
    fn a_section_is_waited_for_until_it_is_here_or_all_is_over() {
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
