//! Verifies single pages as they are stored, window by window: a page of 512 MiB takes the memory of
//! one window. Copies of long pages use the same windows and checks.

use super::check::{SliceSums, has_valid_length, total};
use super::verify_run::StalledVolume;
use super::{Control, MissReason, PageOutcome};
use crate::segments::Segments;
use ritornello_format::{Place, Result, RunHeader, Slice, UNIT, units_of};

/// Maximum bytes of a page that are read at a time.
pub(super) const WINDOW: u64 = 4 << 20;

/// The windows of a page of `page_units`: the first unit of each, and its length in units.
pub(super) fn windows(page_units: u32) -> impl Iterator<Item = (u32, u32)> {
    let window = units_of(WINDOW) as u32;
    (0..page_units)
        .step_by(window as usize)
        .map(move |first| (first, window.min(page_units - first)))
}

/// The check of one page as stored, whose bytes arrive in order.
pub(super) struct StoredPageCheck<'h> {
    slices: &'h [Slice],
    sums: SliceSums<'h>,
    /// Number of leading slices whose checksums matched.
    matched: usize,
}

impl<'h> StoredPageCheck<'h> {
    /// Begins the check of page `page` of the run. `None` if the header lists no slices for it.
    pub(super) fn new(header: &'h RunHeader, generation: u64, page: usize) -> Option<Self> {
        let (key, slices) = (header.keys.get(page)?, header.slices_of(page));
        let sums = SliceSums::new(key, generation, 0, slices.first()?.bytes);
        Some(Self { slices, sums, matched: 0 })
    }

    /// Adds the next bytes of the page. Bytes after the last slice are ignored.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        let Self { slices, sums, matched } = self;
        sums.update(bytes, |number, sum| {
            let number = usize::from(number);
            if number == *matched && slices[number].checksum == sum {
                *matched += 1;
            }
            slices.get(number + 1).map(|next| next.bytes)
        });
    }

    /// Whether all slices of the page were added, and match their checksums.
    pub(super) fn is_intact(&self) -> bool {
        self.matched == self.slices.len()
    }
}

impl Segments {
    /// Reads one page of a run and verifies it, without decoding.
    ///
    /// # Errors
    /// As [`Segments::verify_run`].
    pub fn verify_page(&self, place: &Place, page: u32, control: &Control) -> Result<PageOutcome> {
        let (header, count) = self.header_and_pages(place)?;
        if page as usize >= count {
            return Ok(PageOutcome::Missed(MissReason::Header));
        }
        Ok(self.verify_stored_page(place, &header, page, control))
    }

    /// Reads a page of the run with this header and verifies it, without decoding. The caller has
    /// checked that place and header have the page.
    pub(super) fn verify_stored_page(
        &self,
        place: &Place,
        header: &RunHeader,
        page: u32,
        control: &Control,
    ) -> PageOutcome {
        let slices = header.slices_of(page as usize);
        let bytes = u64::from(place.page_units) * UNIT;
        let fits = total(slices) <= header.page_bytes.min(bytes)
            && (0..).zip(slices).all(|(number, slice)| has_valid_length(header, number, slice));
        let check = StoredPageCheck::new(header, place.generation, page as usize);
        let Some(mut check) = check.filter(|_| fits) else {
            return PageOutcome::Missed(MissReason::Header);
        };
        let Some(mut memory) = control.stage(&self.staging, bytes.min(WINDOW) as usize) else {
            return PageOutcome::Missed(control.stop().unwrap_or(MissReason::Staging));
        };
        for (first, units) in windows(place.page_units) {
            if let Some(reason) = control.stop() {
                return PageOutcome::Missed(reason);
            }
            let window = &mut memory.bytes_mut()[..units as usize * UNIT as usize];
            if let Err(error) = self.read_extents(&place.page_part(page, first, units), window) {
                let has_stalled = StalledVolume::caused(&error);
                tracing::debug!(%error, page, generation = place.generation, "a read failed");
                let reason = if has_stalled { MissReason::Stalled } else { MissReason::Io };
                return PageOutcome::Missed(reason);
            }
            check.add(window);
        }
        if check.is_intact() {
            PageOutcome::Verified
        } else {
            PageOutcome::Missed(MissReason::Checksum)
        }
    }
}
