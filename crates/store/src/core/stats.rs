//! Statistics of the owner: of the store, and of the allocator (padding, fragmentation, bytes
//! written).

use super::StoreCore;
use super::state::State;
use crate::stats::{
    CatalogStats, IoStats, LsmEstimate, PiecePercentiles, SpaceHealth, VolumeStats,
};
use ritornello_format::{
    Manifest, PageHash, Result, UNIT, VolumeRecord, WHOLE_PAGE_UNITS, units_of,
};
use ritornello_index::RunView;
use std::collections::BTreeMap;

/// Pages in more extents than this are counted as pages in this number of extents.
const PIECES_MAX: usize = 64;

/// Number of pages by the number of extents that hold parts of a page (its pieces).
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
    /// The owner's statistics.
    ///
    /// # Errors
    /// No error is returned at present.
    pub fn stats(&self) -> Result<CatalogStats> {
        let index = self.index.stats();
        let existing = self.segments.listable().len() as u64;
        let allocated = self.segments.allocated_bytes() + index.disk_bytes;
        let report = self.segments.report();
        let (manifest, budget) = (self.shape.manifest(), self.shape.budget());
        let admission = self.admission.stats();
        let mut health = self.health();
        let state = self.state.lock();
        let allocator = state.space.allocator();
        let space = allocator.stats();
        health.reserve_bytes = space.reserve_units * UNIT;
        health.sealed_bytes = allocator.sealed().len() as u64 * budget.segment_bytes;
        let paths = paths(&manifest, &state);
        let absent_space = state.absence.describe(&manifest, self.hidden.len() as u64);
        let mut warnings = report.advice();
        // A volume that was drained or given up is no longer tested, so it would count as avoided
        // until the store is reopened.
        let avoided = state.space.avoided_volumes().filter_map(|number| {
            manifest.volumes.get(usize::from(number)).filter(|volume| !volume.is_retired())
        });
        warnings.extend(avoided.map(|VolumeRecord { dir, .. }| {
            format!("{dir}: writes fail, so puts avoid it, and test it every 30 s: check its disk")
        }));
        let (limbo, quarantined) = (state.space.limbo_units(), state.space.quarantined_units());
        let reserved = state.reservations.units() + state.space.withheld_units();
        let markers = manifest.volumes.iter().filter(|volume| !volume.is_retired()).count();
        let counters = self.counters.snapshot().into_iter();
        let mut counters: BTreeMap<String, u64> = counters
            .chain(self.transfers.by_name())
            .chain(self.decisions.counts.by_name())
            .chain(self.queues.by_name())
            .collect();
        // Lookups in unregistered scopes are counted by the process that asks, and reported.
        for (all, part) in
            [("probes", "unregistered_probes"), ("probed_pages", "missed_unregistered")]
        {
            let part = counters.get(part).copied().unwrap_or_default();
            if let Some(count) = counters.get_mut(all) {
                *count = count.saturating_add(part);
            }
        }
        Ok(CatalogStats {
            uuid: manifest.uuid.iter().map(|byte| format!("{byte:02x}")).collect(),
            owner_epoch: manifest.owner_epoch,
            owner_pid: std::process::id(),
            durability: self.options.durability.word().to_owned(),
            index: manifest.index.clone(),
            capacity_bytes: budget.capacity,
            allocated_bytes: allocated,
            segment_bytes: budget.segment_bytes,
            segments: existing,
            segments_max: u64::from(budget.segments_max),
            files: existing + index.files + 5 + markers as u64,
            used_bytes: (allocator.total_units()
                - allocator.free_units()
                - allocator.sealed_units())
            .saturating_sub(limbo + quarantined + reserved)
                * UNIT,
            free_bytes: allocator.free_units() * UNIT,
            limbo_bytes: limbo * UNIT,
            deferred_bytes: state.leases.deferred_units() * UNIT,
            reserved_bytes: reserved * UNIT,
            quarantined_bytes: quarantined * UNIT,
            free_extents: space.free_extents.clone(),
            extents_per_run: space.extents_per_run(),
            eviction: state.residents.eviction_stats(),
            health,
            paths,
            scopes: self.scopes.len() as u64,
            largest_scopes: self.largest_scopes(&state),
            retained_bytes: state.residents.retention.units() * UNIT,
            admission,
            runs: index.runs,
            pages: index.pages,
            index_memory_bytes: index.memory_bytes,
            index_memory_max_bytes: index.memory_bytes_max,
            index_memory_percent: index.memory_percent,
            index_as_lsm: (manifest.index != "lsm")
                .then(|| LsmEstimate::of(index.runs, index.pages, budget.index_bytes)),
            index_disk_bytes: index.disk_bytes,
            index_written_bytes: index.written_bytes,
            index_tuning: self.index.tuning().map(Into::into),
            leases: state.leases.len() as u64,
            clients: state.reservations.clients() as u64,
            reservations: state.reservations.len() as u64,
            io: IoStats {
                mode: report.mode.word().to_owned(),
                direct: report.direct,
                huge_pages: report.backing.is_huge(),
                file_system: report.file_systems.join(", "),
                warnings,
            },
            poisoned: self.poisoned(),
            absent_space,
            counters,
            open_ms: self.lifecycle.opened.millis,
            dropped_at_open: self.lifecycle.opened.dropped.clone(),
        })
    }

    /// Computes the health of the space. Visits all runs of the index, without the core state's
    /// lock.
    fn health(&self) -> SpaceHealth {
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

    /// Padding of a run's pages, in bytes. Zero if the pages take fewer units than unencoded pages:
    /// only the run header, which this function does not read, has their lengths.
    fn padding(&self, view: &RunView) -> u64 {
        let Some(scope) = self.scopes.by_slot(view.scope) else { return 0 };
        if u64::from(view.place.page_units) != units_of(scope.page_bytes) {
            return 0;
        }
        let live = view.pages.iter().filter(|page| **page != PageHash::NONE).count() as u64;
        live * (u64::from(view.place.page_units) * UNIT - scope.page_bytes)
    }
}

/// Statistics of the directories that are not retired.
fn paths(manifest: &Manifest, state: &State) -> Vec<VolumeStats> {
    let allocator = state.space.allocator();
    let (segments, used) = (allocator.segments_by_volume(), allocator.used_by_volume());
    let there = (0..=u8::MAX).zip(&manifest.volumes).filter(|(_, volume)| !volume.is_retired());
    there
        .map(|(number, volume)| {
            let at = usize::from(number);
            VolumeStats {
                dir: volume.dir.clone(),
                draining: volume.draining,
                segments: segments.get(at).copied().unwrap_or(0).into(),
                used_bytes: used.get(at).copied().unwrap_or(0) * UNIT,
                absent: state.absence.why(number).map(str::to_owned),
            }
        })
        .collect()
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
    fn percentiles_weigh_each_page_once() {
        let mut histogram = Histogram([0; PIECES_MAX + 1]);
        assert_eq!(histogram.pieces(), PiecePercentiles { p50: 0, p99: 0, max: 0 });
        histogram.add(1, 98);
        histogram.add(3, 1);
        histogram.add(99, 1);
        assert_eq!(histogram.pieces(), PiecePercentiles { p50: 1, p99: 3, max: PIECES_MAX as u32 });
    }
}
