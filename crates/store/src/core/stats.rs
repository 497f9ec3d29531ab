//! Statistics of the allocator: padding, fragmentation, bytes written.

use super::StoreCore;
use crate::stats::{PiecePercentiles, SpaceHealth};
use ritornello_format::{PageHash, UNIT, WHOLE_PAGE_UNITS, units_of};
use ritornello_index::RunView;

/// Highest number of pieces per page that is counted separately.
const PIECES_MAX: usize = 64;

/// Number of pages by pieces per page.
#[derive(Clone, Copy)]
struct Histogram([u64; PIECES_MAX + 1]);

impl Histogram {
    fn add(&mut self, pieces: usize, pages: u64) {
        self.0[pieces.min(PIECES_MAX)] += pages;
    }

    fn quantile(&self, q: f64) -> u32 {
        let all: u64 = self.0.iter().sum();
        let rank = (all as f64 * q).ceil().max(1.0) as u64;
        let mut seen = 0;
        let at = self.0.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        at.unwrap_or(0) as u32
    }

    fn pieces(&self) -> PiecePercentiles {
        let max = self.0.iter().rposition(|count| *count > 0).unwrap_or(0);
        PiecePercentiles { p50: self.quantile(0.5), p99: self.quantile(0.99), max: max as u32 }
    }
}

impl StoreCore {
    /// Visits every run one by one, without holding a lock for longer than one run.
    pub(super) fn health(&self) -> SpaceHealth {
        let mut health = SpaceHealth::default();
        let (mut runs, mut extents) = (0u64, 0u64);
        let mut small = Histogram([0; PIECES_MAX + 1]);
        let mut large = small;
        self.index.for_each(&mut |_, view| {
            if view.place.extents.is_empty() {
                return;
            }
            runs += 1;
            extents += view.place.extents.len() as u64;
            health.header_bytes += u64::from(view.place.header_units) * UNIT;
            health.padding_bytes += self.padding(&view);
            let whole = view.place.page_units <= WHOLE_PAGE_UNITS;
            let histogram = if whole { &mut small } else { &mut large };
            count_pieces(&view, histogram);
        });
        health.extents_per_run = if runs == 0 { 1.0 } else { extents as f64 / runs as f64 };
        (health.small_pages, health.large_pages) = (small.pieces(), large.pieces());
        let counters = &self.counters;
        health.written_bytes = counters.bytes_written.get() + counters.bytes_moved.get();
        health.admitted_bytes = counters.bytes_admitted.get();
        health.write_amplification =
            health.written_bytes as f64 / health.admitted_bytes.max(1) as f64;
        health
    }

    /// Padding of a run's pages, in bytes. Zero for encoded pages, because only the run header has
    /// their lengths; their padding is less than a unit beyond the longest page of the run.
    fn padding(&self, view: &RunView) -> u64 {
        let Some(scope) = self.scopes.by_slot(view.scope) else { return 0 };
        if u64::from(view.place.page_units) != units_of(scope.page_bytes) {
            return 0;
        }
        let live = view.pages.iter().filter(|page| **page != PageHash::NONE).count() as u64;
        live * (u64::from(view.place.page_units) * UNIT - scope.page_bytes)
    }
}

fn count_pieces(view: &RunView, histogram: &mut Histogram) {
    let live = (0u32..).zip(&view.pages).filter(|(_, hash)| **hash != PageHash::NONE);
    if view.place.extents.len() == 1 {
        histogram.add(1, live.count() as u64);
        return;
    }
    live.for_each(|(page, _)| histogram.add(view.place.page(page).len(), 1));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_count_pages() {
        let mut histogram = Histogram([0; PIECES_MAX + 1]);
        assert_eq!(histogram.pieces(), PiecePercentiles { p50: 0, p99: 0, max: 0 });
        histogram.add(1, 98);
        histogram.add(3, 1);
        histogram.add(99, 1);
        assert_eq!(histogram.pieces(), PiecePercentiles { p50: 1, p99: 3, max: PIECES_MAX as u32 });
    }
}
