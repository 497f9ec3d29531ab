//! The figures of `bench store --steady`.

use ritornello_store::{CatalogStats, PiecePercentiles};
use ritornello_terminal::print::{bytes, table};
use serde::Serialize;
use std::collections::BTreeMap;

/// All figures of `bench store --steady`, with pages of one size and of mixed sizes.
#[derive(Serialize)]
pub struct Report {
    pub capacity_bytes: u64,
    pub segment_bytes: u64,
    pub dir: String,
    pub one_size: Figures,
    pub mixed: Figures,
    pub seconds: f64,
}

/// Figures of one mix of page sizes. Ratios are of the full store to a fresh store.
#[derive(Default, Serialize)]
pub struct Figures {
    pub page_bytes: Vec<u64>,
    pub put_gib_s: f64,
    pub put_ratio: f64,
    pub get_gib_s: f64,
    pub get_ratio: f64,
    /// Ratio of the rates of gets of whole sequences, by bytes per page.
    pub long_read_ratio: BTreeMap<u64, f64>,
    /// 99th percentile of gets of at most 16 pages, in microseconds: without puts, during puts into
    /// free space, and during puts that evict.
    pub get16_p99_us_idle: f64,
    pub get16_p99_us_writing: f64,
    pub get16_p99_us_evicting: f64,
    /// `get16_p99_us_evicting` divided by `get16_p99_us_writing`.
    pub get16_p99_ratio: f64,
    /// Number of sequences marked as used while the store was filled and overwritten, without a
    /// read of bytes. Half of these sequences were never put.
    pub gets: u64,
    /// Number of the sequences of `gets` whose first page, at least, was in the store.
    pub gets_hit: u64,
    /// Share of the segments' space that is kept free.
    pub reserve_share: f64,
    /// Share of the segments' space that pads pages to multiples of 4 KiB. Excludes encoded pages
    /// that take fewer units than an unencoded page.
    pub padding_share: f64,
    pub reserve_padding_share: f64,
    pub extents_per_run: f64,
    pub small_pages: PiecePercentiles,
    pub large_pages: PiecePercentiles,
    /// Maximum bytes of the store's allocated blocks, over `allocated_samples` samples.
    pub allocated_bytes_max: u64,
    pub allocated_samples: u64,
    /// Capacity of the store.
    pub budget_bytes: u64,
    pub files: u64,
    pub write_amplification: f64,
    pub index_written_bytes: u64,
    pub pages_evicted: u64,
}

impl Figures {
    /// Fills in the figures of the full store.
    pub fn describe(&mut self, stats: &CatalogStats) {
        let health = &stats.health;
        let space = (stats.segments_max * stats.segment_bytes).max(1) as f64;
        self.reserve_share = health.reserve_bytes as f64 / space;
        self.padding_share = health.padding_bytes as f64 / space;
        self.reserve_padding_share = self.reserve_share + self.padding_share;
        self.extents_per_run = health.extents_per_run;
        self.small_pages = health.small_pages;
        self.large_pages = health.large_pages;
        self.budget_bytes = stats.capacity_bytes;
        self.files = stats.files;
        self.write_amplification = health.write_amplification;
        self.index_written_bytes = stats.index_written_bytes;
        self.pages_evicted = stats.counters.get("evicted_pages").copied().unwrap_or(0);
    }
}

impl Report {
    /// Formats the report as a table.
    #[must_use]
    pub fn show(&self) -> String {
        let mut rows = table(&["figure of a full store", "one page size", "mixed sizes"]);
        let mut row = |name: &str, of: &dyn Fn(&Figures) -> String| {
            rows.add_row([name.to_owned(), of(&self.one_size), of(&self.mixed)]);
        };
        row("put, relative to a fresh store", &|f| {
            format!("{:.2}  ({:.2} GiB/s)", f.put_ratio, f.put_gib_s)
        });
        row("get, relative to a fresh store", &|f| {
            format!("{:.2}  ({:.2} GiB/s)", f.get_ratio, f.get_gib_s)
        });
        row("get of whole sequences, relative to a fresh store, by page size", &|f| {
            let each =
                f.long_read_ratio.iter().map(|(size, r)| format!("{}: {r:.2}", bytes(*size)));
            each.collect::<Vec<_>>().join(", ")
        });
        row("16-page get, p99: fresh store, idle", &|f| format!("{:.0} us", f.get16_p99_us_idle));
        row("  fresh store, during puts", &|f| format!("{:.0} us", f.get16_p99_us_writing));
        row("  full store, during puts that evict", &|f| {
            format!("{:.0} us  ({:.2} times)", f.get16_p99_us_evicting, f.get16_p99_ratio)
        });
        row("reserve and padding", &|f| format!("{:.1} %", 100.0 * f.reserve_padding_share));
        row("extents per run", &|f| format!("{:.2}", f.extents_per_run));
        row("pieces per page of at most 256 KiB on disk", &|f| {
            format!("p99 {}, max {}", f.small_pages.p99, f.small_pages.max)
        });
        row("pieces per page of more than 256 KiB on disk", &|f| {
            format!("p99 {}, max {}", f.large_pages.p99, f.large_pages.max)
        });
        row("maximum allocated bytes, of the capacity", &|f| {
            format!(
                "{} of {}, {} samples",
                bytes(f.allocated_bytes_max),
                bytes(f.budget_bytes),
                f.allocated_samples
            )
        });
        row("bytes written / bytes admitted", &|f| format!("{:.3}", f.write_amplification));
        format!("{rows}\n{} in {}, {:.0} s", bytes(self.capacity_bytes), self.dir, self.seconds)
    }
}
