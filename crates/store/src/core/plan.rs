//! Groups the missing pages of a put into runs.

use crate::catalog::{ReserveRequest, ScopeRef};
use ritornello_format::{Error, KEY_BYTES_MAX, Result, RunHeader, UNIT, units_of};
use std::ops::Range;

/// Maximum payload of a run, which keeps eviction and reads fine-grained.
const RUN_BYTES_MAX: u64 = 64 << 20;
/// Pages of different length on disk share a run if padding is at most 1/`PADDING_SHARE` of the
/// run, or at most [`PADDING_UNITS`].
const PADDING_SHARE: u64 = 32;
/// Maximum units of padding in a short run; another run would cost a header, and an operation per
/// reader.
const PADDING_UNITS: u64 = 8;

/// Returns the missing pages as (position, count). Each run's header holds its keys and slices, its
/// payload is bounded, and padding is small where pages differ in length on disk.
pub(super) fn missing_runs(
    scope: ScopeRef,
    keys: &[&[u8]],
    present: &[bool],
    request: &ReserveRequest,
    segment_bytes: u64,
) -> Vec<(usize, usize)> {
    let most = RUN_BYTES_MAX.min(segment_bytes / 2) / UNIT;
    let mut runs = Vec::new();
    let mut at: usize = 0;
    while at < keys.len() {
        if present[at] {
            at += 1;
            continue;
        }
        let gap = present[at..].iter().take_while(|present| !**present).count();
        let lengths = keys[at..at + gap].iter().map(|key| key.len());
        let fit = RunHeader::pages_that_fit(lengths, request.slices_per_page.max(1)).max(1);
        let pages = pages_alike(scope, request, at..at + gap.min(fit), most);
        runs.push((at, pages));
        at += pages;
    }
    runs
}

/// Units of the header and of each page of a run.
pub(super) fn run_lengths(
    scope: ScopeRef,
    keys: &[&[u8]],
    pages: Range<usize>,
    request: &ReserveRequest,
) -> (u32, u32) {
    let lengths = keys[pages.clone()].iter().map(|key| key.len());
    let header_units = RunHeader::units(lengths, request.slices_per_page.max(1));
    let longest = pages.map(|page| length_of(scope, request, page)).max();
    (header_units, longest.unwrap_or(1))
}

/// Units of page `page` on disk.
fn length_of(scope: ScopeRef, request: &ReserveRequest, page: usize) -> u32 {
    let raw = units_of(scope.page_bytes) as u32;
    request.page_units.get(page).copied().unwrap_or(raw)
}

/// Returns how many of the leading `pages` share a run of at most `most` units: either pages stored
/// unencoded, which are read in place, or shorter pages of similar length.
fn pages_alike(scope: ScopeRef, request: &ReserveRequest, pages: Range<usize>, most: u64) -> usize {
    let raw = units_of(scope.page_bytes);
    let (mut longest, mut sum, mut count) = (0, 0, 0);
    for page in pages {
        let units = u64::from(length_of(scope, request, page));
        let padded = longest.max(units) * (count + 1);
        let padding = padded - sum - units;
        let is_alike = (longest == raw) == (units == raw)
            && padding <= (padded / PADDING_SHARE).max(PADDING_UNITS);
        if count > 0 && (padded > most || !is_alike) {
            break;
        }
        longest = longest.max(units);
        sum += units;
        count += 1;
    }
    count as usize
}

/// Checks the page lengths and slices of a request.
///
/// # Errors
/// `Invalid` for impossible lengths, or more slices than a header holds.
pub(super) fn check_lengths(scope: ScopeRef, pages: usize, request: &ReserveRequest) -> Result<()> {
    let lengths = &request.page_units;
    let raw = units_of(scope.page_bytes);
    let fits = |units: &u32| (1..=raw).contains(&u64::from(*units));
    if (lengths.is_empty() || lengths.len() == pages) && lengths.iter().all(fits) {
        let slices = request.slices_per_page.max(1);
        if RunHeader::pages_that_fit([KEY_BYTES_MAX], slices) > 0 {
            return Ok(());
        }
    }
    Err(Error::invalid("a put's pages are at least a unit and no longer encoded than as they came")
        .with("pages", pages)
        .with("lengths", lengths.len())
        .with("slices", request.slices_per_page))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::{ScopeId, ScopeSlot};

    fn alike(lengths: &[u32], most: u64) -> usize {
        let scope = ScopeRef {
            id: ScopeId([1; 16]),
            slot: ScopeSlot(1),
            page_bytes: 100 * UNIT,
            chained: true,
            codec: 1,
        };
        let request = ReserveRequest { page_units: lengths.to_vec(), ..ReserveRequest::default() };
        assert!(check_lengths(scope, lengths.len(), &request).is_ok());
        assert!(check_lengths(scope, lengths.len() + 1, &request).is_err());
        pages_alike(scope, &request, 0..lengths.len(), most)
    }

    #[test]
    fn pages_of_similar_length_share_a_run() {
        assert_eq!(alike(&[75, 74, 76, 75], 1000), 4);
        assert_eq!(alike(&[75, 74, 76, 75], 230), 3, "a run is no longer than it may be");
        assert_eq!(alike(&[75, 10, 10], 1000), 1, "padding is dear");
        assert_eq!(alike(&[10, 75], 1000), 1);
        assert_eq!(alike(&[2, 1, 2, 1, 2, 1], 1000), 6, "but another run is dearer");
        assert_eq!(alike(&[5], 1), 1, "a page is never left out");
    }

    #[test]
    fn raw_pages_share_no_run_with_encoded_ones() {
        assert_eq!(alike(&[100, 100, 99], 1000), 2);
        assert_eq!(alike(&[99, 100], 1000), 1);
    }

    #[test]
    fn impossible_lengths_are_refused() {
        let scope = ScopeRef {
            id: ScopeId([1; 16]),
            slot: ScopeSlot(1),
            page_bytes: 100 * UNIT,
            chained: true,
            codec: 1,
        };
        for (page_units, slices_per_page) in [(vec![0], 1), (vec![101], 1), (vec![50], 2000)] {
            let request =
                ReserveRequest { page_units, slices_per_page, ..ReserveRequest::default() };
            assert!(check_lengths(scope, 1, &request).is_err());
        }
    }
}
