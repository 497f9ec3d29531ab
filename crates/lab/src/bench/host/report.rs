//! The figures of `bench host`, and their table.

use crate::bench::quantile::quantile;
use ritornello_terminal::print::{bytes, table};
use serde::Serialize;

/// The report of `bench host`.
#[derive(Serialize)]
pub struct Report {
    /// Directory, I/O mode and threads.
    pub machine: Machine,
    /// Bytes per page.
    pub page_bytes: u64,
    /// Pages per put and per get.
    pub call_pages: u32,
    /// Bytes of each measurement of put, get and memcpy.
    pub total: u64,
    /// Number of rounds.
    pub runs: u32,
    /// Copying page by page to the target memory of the gets, from private memory, which is in huge
    /// pages where the machine has them.
    pub memcpy: Row,
    /// Rates of gets from segments that the process has mapped and read before.
    pub get: Row,
    /// Rates of gets from a newly opened store: the kernel makes page tables during such a get,
    /// once per process.
    pub get_first: Row,
    /// Rates of put and flush into memory of the store that earlier puts used.
    pub put: Row,
    /// Rates of put and flush into memory that the kernel has to clear first.
    pub put_fresh: Row,
}

/// Directory, I/O mode and threads.
#[derive(Default, Serialize)]
pub struct Machine {
    pub dir: String,
    pub io: String,
    pub warnings: Vec<String>,
    /// Number of threads that share the pages of one call: of a put, of a get, and of a memcpy.
    pub threads: usize,
}

/// Figures of one kind of transfer: medians of the rounds.
#[derive(Serialize)]
pub struct Row {
    pub gib_s: f64,
    /// Processor seconds per GiB, of the whole process.
    pub cpu_s_per_gib: f64,
    /// Rate divided by the rate of memcpy in the same round.
    pub ratio: f64,
    /// `ratio` of each round.
    pub ratios: Vec<f64>,
}

impl Report {
    /// Formats the report as tables.
    #[must_use]
    pub fn show(&self) -> String {
        let mut rates =
            table(&["", "GiB/s", "CPU s/GiB", "of memcpy", "ratio, middle half of the rounds"]);
        let rows = [
            ("memcpy", &self.memcpy),
            ("get", &self.get),
            ("get, first in a process", &self.get_first),
            ("put + flush", &self.put),
            ("put + flush, memory never used", &self.put_fresh),
        ];
        for (name, row) in rows {
            let [low, high] = [0.25, 0.75].map(|share| quantile(&row.ratios, share));
            rates.add_row([
                name.to_owned(),
                format!("{:.2}", row.gib_s),
                format!("{:.3}", row.cpu_s_per_gib),
                format!("{:.2}", row.ratio),
                format!("{low:.2} to {high:.2}"),
            ]);
        }
        let machine = &self.machine;
        let mut text = format!(
            "{rates}\n{}: {}, {} per page, {} per measurement, {} thread(s) per call",
            machine.dir,
            machine.io,
            bytes(self.page_bytes),
            bytes(self.total),
            machine.threads
        );
        for warning in &machine.warnings {
            text = format!("{text}\n{warning}");
        }
        text
    }
}
