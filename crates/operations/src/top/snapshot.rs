//! The statistics that `ritornello top` shows, taken at one moment.

use crate::savings::Savings;
use crate::stat::{REOPENS, eviction};
use ritornello_format::Result;
use ritornello_store::CatalogStats;
use ritornello_store::eviction::EvictionStats;
use ritornello_terminal::print::{bytes, count, percent};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Statistics of the store, and the time at which they were taken.
pub struct Sample {
    taken: Instant,
    dir: PathBuf,
    stats: CatalogStats,
}

impl Sample {
    /// Asks the owner of the store in `dir`; returns `None` if no process owns it.
    ///
    /// # Errors
    /// Errors of [`ritornello_node::owner_stats`]; `Retry` if the path of `dir` cannot be resolved.
    pub fn of(dir: &Path) -> Result<Option<Self>> {
        let Some(stats) = ritornello_node::owner_stats(dir)? else { return Ok(None) };
        Ok(Some(Self::new(std::fs::canonicalize(dir)?, stats)))
    }

    /// Returns a sample with the figures in `stats` and the current time.
    pub fn new(dir: PathBuf, stats: CatalogStats) -> Self {
        Self { taken: Instant::now(), dir, stats }
    }

    fn counter(&self, name: &str) -> u64 {
        self.stats.counters.get(name).copied().unwrap_or(0)
    }
}

/// The statistics of a store that `ritornello top` shows, taken at one moment. The first snapshot
/// has no rates, because they need an earlier sample. A hit rate is null while no page was probed.
#[derive(Serialize)]
pub struct Snapshot {
    dir: PathBuf,
    owner_pid: u32,
    /// Pages hit per page probed, since the store was opened.
    hit_rate: Option<f64>,
    tiers: Vec<Tier>,
    space: Space,
    writes: Writes,
    eviction: EvictionStats,
    leases: u64,
    reservations: u64,
    clients: u64,
    /// Null if the owner's build does not count savings.
    savings: Option<Savings>,
    poisoned: Option<String>,
    unavailable: Vec<String>,
    rates: Option<Rates>,
}

#[derive(Serialize)]
struct Tier {
    tier: &'static str,
    pages: u64,
    runs: u64,
    used_bytes: u64,
    capacity_bytes: u64,
}

#[derive(Serialize)]
struct Space {
    allocated_bytes: u64,
    free_bytes: u64,
    /// Bytes of space whose release is not durable yet.
    limbo_bytes: u64,
    /// Bytes of pages removed while leased; their space is freed when the lease ends.
    deferred_bytes: u64,
    reserved_bytes: u64,
    quarantined_bytes: u64,
}

#[derive(Serialize)]
struct Writes {
    pages_stored: u64,
    pages_evicted: u64,
    pages_refused: u64,
    /// Bytes written to segments since the store was opened: pages, headers, padding, and moved
    /// runs.
    written_bytes: u64,
    admitted_bytes: u64,
    write_amplification: f64,
    index_written_bytes: u64,
}

/// Rates over the time since the previous sample.
#[derive(Serialize)]
struct Rates {
    seconds: f64,
    hit_rate: Option<f64>,
    pages_probed_per_second: f64,
    pages_hit_per_second: f64,
    pages_stored_per_second: f64,
    pages_evicted_per_second: f64,
    index_bytes_per_second: f64,
}

impl Snapshot {
    /// Returns the statistics of `now`, with rates over the time since `before`.
    #[must_use]
    pub fn between(before: Option<&Sample>, now: &Sample) -> Self {
        let s = &now.stats;
        Self {
            dir: now.dir.clone(),
            owner_pid: s.owner_pid,
            hit_rate: share(now.counter("hit_pages"), now.counter("probed_pages")),
            tiers: vec![Tier {
                tier: s.tier(),
                pages: s.pages,
                runs: s.runs,
                used_bytes: s.used_bytes,
                capacity_bytes: s.capacity_bytes,
            }],
            space: Space {
                allocated_bytes: s.allocated_bytes,
                free_bytes: s.free_bytes,
                limbo_bytes: s.limbo_bytes,
                deferred_bytes: s.deferred_bytes,
                reserved_bytes: s.reserved_bytes,
                quarantined_bytes: s.quarantined_bytes,
            },
            writes: Writes {
                pages_stored: now.counter("stored_pages"),
                pages_evicted: now.counter("evicted_pages"),
                pages_refused: now.counter("refused_pages"),
                written_bytes: s.health.written_bytes,
                admitted_bytes: s.health.admitted_bytes,
                write_amplification: s.health.write_amplification,
                index_written_bytes: s.index_written_bytes,
            },
            eviction: s.eviction.clone(),
            leases: s.leases,
            reservations: s.reservations,
            clients: s.clients,
            savings: Savings::of(&s.counters, None),
            poisoned: s.poisoned.clone(),
            unavailable: s.absent_space.reasons.clone(),
            rates: before.map(|before| Rates::between(before, now)),
        }
    }

    /// Returns the share of the store's capacity that is in use, from 0 to 1: by runs, and by
    /// removed runs whose leases have not ended.
    #[must_use]
    pub fn fullness(&self) -> f64 {
        let (used, all) = self
            .tiers
            .iter()
            .fold((0, 0), |(used, all), tier| (used + tier.used_bytes, all + tier.capacity_bytes));
        share(used, all).unwrap_or(0.0).min(1.0)
    }

    /// Returns pages hit per page probed: since the previous sample, or, if no page was probed
    /// since then, since the store was opened. `None` if no page was probed.
    #[must_use]
    pub fn hits(&self) -> Option<f64> {
        self.rates.as_ref().and_then(|rates| rates.hit_rate).or(self.hit_rate)
    }

    /// Returns all statistics, each as a label and a text.
    #[must_use]
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        let mut line = |name, value: String| lines.push((name, value));
        line("store", format!("{}, owned by process {}", self.dir.display(), self.owner_pid));
        let lately = self.rates.as_ref().and_then(|rates| rates.hit_rate);
        line(
            "hit rate",
            match (self.hit_rate, lately) {
                (None, _) => "no page probed yet".to_owned(),
                (Some(all), None) => format!("{} since opened", percent(all)),
                (Some(all), Some(now)) => {
                    format!("{} now, {} since opened", percent(now), percent(all))
                }
            },
        );
        for tier in &self.tiers {
            line(
                tier.tier,
                format!(
                    "{} of {} in use: {} pages in {} runs",
                    bytes(tier.used_bytes),
                    bytes(tier.capacity_bytes),
                    count(tier.pages),
                    count(tier.runs)
                ),
            );
        }
        let space = &self.space;
        line(
            "space",
            format!(
                "{} allocated: {} free, {} becoming free, {} removed but leased, {} being written, \
                 {} quarantined",
                bytes(space.allocated_bytes),
                bytes(space.free_bytes),
                bytes(space.limbo_bytes),
                bytes(space.deferred_bytes),
                bytes(space.reserved_bytes),
                bytes(space.quarantined_bytes)
            ),
        );
        let writes = &self.writes;
        line(
            "pages",
            format!(
                "{} stored, {} evicted, {} refused",
                count(writes.pages_stored),
                count(writes.pages_evicted),
                count(writes.pages_refused)
            ),
        );
        line("eviction", eviction(&self.eviction));
        line(
            "written",
            format!(
                "{} to segments for pages of {} ({:.3} times), {} by the index",
                bytes(writes.written_bytes),
                bytes(writes.admitted_bytes),
                writes.write_amplification,
                bytes(writes.index_written_bytes)
            ),
        );
        line(
            "held",
            format!(
                "{} leases, {} reservations, {} clients",
                self.leases, self.reservations, self.clients
            ),
        );
        if let Some(savings) = &self.savings {
            line("savings", savings.line());
        }
        if let Some(rates) = &self.rates {
            line(
                "per second",
                format!(
                    "{:.0} pages probed, {:.0} hit, {:.0} stored, {:.0} evicted, index {}",
                    rates.pages_probed_per_second,
                    rates.pages_hit_per_second,
                    rates.pages_stored_per_second,
                    rates.pages_evicted_per_second,
                    bytes(rates.index_bytes_per_second as u64)
                ),
            );
        }
        if let Some(cause) = &self.poisoned {
            line("POISONED", format!("{cause}: {}", REOPENS));
        }
        for reason in &self.unavailable {
            line("DEGRADED", reason.clone());
        }
        lines
    }
}

impl Rates {
    fn between(before: &Sample, now: &Sample) -> Self {
        let seconds = now.taken.duration_since(before.taken).as_secs_f64().max(1e-3);
        // The counters of a new owner begin at zero, so a counter may be lower in `now` than in
        // `before`.
        let grown = |name| now.counter(name).saturating_sub(before.counter(name));
        let rate = |name| grown(name) as f64 / seconds;
        let (old, new) = (&before.stats, &now.stats);
        let index = new.index_written_bytes.saturating_sub(old.index_written_bytes);
        Self {
            seconds,
            hit_rate: share(grown("hit_pages"), grown("probed_pages")),
            pages_probed_per_second: rate("probed_pages"),
            pages_hit_per_second: rate("hit_pages"),
            pages_stored_per_second: rate("stored_pages"),
            pages_evicted_per_second: rate("evicted_pages"),
            index_bytes_per_second: index as f64 / seconds,
        }
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_store::IoStats;

    #[test]
    fn store_in_memory_is_the_host_tier() {
        for (mode, tier) in [("mapped", "host"), ("uring", "disk"), ("buffered", "disk")] {
            let io = IoStats { mode: mode.to_owned(), ..IoStats::default() };
            let stats = CatalogStats { io, ..CatalogStats::default() };
            let snapshot = Snapshot::between(None, &Sample::new("/kv".into(), stats));
            assert_eq!(snapshot.tiers[0].tier, tier, "{mode}");
            let named = snapshot.lines().into_iter().filter(|(name, _)| *name == tier);
            assert_eq!(named.count(), 1, "{mode}");
        }
    }
}
