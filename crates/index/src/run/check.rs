//! Checks whether a run can be inserted into an index.

use super::RunIndex;
use super::runs::NO_RUN;
use super::slots::Number;
use crate::NewRun;
use ritornello_format::journal::{FRAME_BYTES_MAX, FRAME_OVERHEAD, RunImage};
use ritornello_format::{Error, PageHash, Place, Result};

/// Checks the number of pages, the hashes and the place of a run, without a lookup in the index.
pub(crate) fn check(new: &NewRun<'_>) -> Result<()> {
    if new.pages.is_empty() || new.pages.len() > usize::from(u16::MAX) {
        return Err(Error::invalid("a run has 1 to 65,535 pages: split longer runs")
            .with("pages", new.pages.len()));
    }
    if new.pages.contains(&PageHash::NONE) {
        return Err(Error::invalid("a page hash of zeroes stands for no page: leave the page out"));
    }
    if has_twins(new.pages) {
        return Err(Error::invalid("a page occurs twice in the run: insert it once"));
    }
    check_place(new.place, new.pages.len())
}

/// Checks that a place holds `pages` pages, or has no extents (in measurements without page data),
/// and that the run's image fits a journal record.
pub(crate) fn check_place(place: &Place, pages: usize) -> Result<()> {
    if !place.extents.is_empty() {
        place.check(pages as u32, u32::MAX).map_err(|error| {
            Error::invalid("the place does not hold the run's header and pages").because(error)
        })?;
    }
    if RunImage::bytes(pages, place.extents.len()) + FRAME_OVERHEAD > FRAME_BYTES_MAX {
        return Err(Error::invalid("the run has too many extents: insert shorter runs")
            .with("extents", place.extents.len()));
    }
    Ok(())
}

fn has_twins(pages: &[PageHash]) -> bool {
    if pages.len() <= 8 {
        return (1..pages.len()).any(|at| pages[..at].contains(&pages[at]));
    }
    // Compare the low 64 bits first: they sort faster than whole hashes, and the low bits of
    // different hashes are rarely equal.
    let mut halves: Vec<u64> = pages.iter().map(|page| page.low()).collect();
    halves.sort_unstable();
    if halves.windows(2).all(|pair| pair[0] != pair[1]) {
        return false;
    }
    let mut pages = pages.to_vec();
    pages.sort_unstable();
    pages.windows(2).any(|pair| pair[0] == pair[1])
}

impl RunIndex {
    /// Checks that there is memory for a run.
    ///
    /// # Errors
    /// `Retry` if the run would exceed the memory ceiling.
    pub(super) fn check_memory(&self, pages: &[PageHash], extents: usize) -> Result<()> {
        let most = self.options.tables_max();
        let tables = self.tables.read();
        let held = tables.bytes();
        // Make a coarse estimate first, because the exact estimate reads shards of the slot table.
        let plenty = held + held / 4 + 32 * pages.len() + (1 << 20);
        if plenty as u64 <= most || (held + tables.growth(pages, extents)) as u64 <= most {
            return Ok(());
        }
        drop(tables);
        Err(Error::retry(
            "the index has reached its memory ceiling: remove pages, or raise the ceiling",
        )
        .with("bytes", held)
        .with("memory_bytes_max", self.options.memory_bytes_max))
    }

    /// Checks a run against the tables. Returns the parent's run and page; [`NO_RUN`] if `new`
    /// names no parent.
    ///
    /// # Errors
    /// `Invalid` if a page exists already, or if the parent does not exist.
    pub(super) fn check_against_tables(&self, new: &NewRun<'_>) -> Result<(Number, u16)> {
        let tables = self.tables.read();
        let present = |page: &PageHash| tables.find(new.scope, *page).is_some();
        if let Some(at) = new.pages.iter().position(present) {
            return Err(Error::invalid(
                "a page is in the index already: insert only missing pages",
            )
            .with("page", at));
        }
        let Some(parent) = new.parent else { return Ok((NO_RUN, 0)) };
        tables.find(new.scope, parent).ok_or_else(|| {
            Error::invalid("the parent is not in the index: insert it first, or leave it out")
        })
    }
}
