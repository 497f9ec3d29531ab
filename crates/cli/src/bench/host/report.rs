//! The figures, and how people see them.

use super::super::report::quantile;
use crate::print::{bytes, table};
use serde::Serialize;

/// All of them.
#[derive(Serialize)]
pub struct Report {
    /// Where, and how bytes moved.
    pub machine: Machine,
    /// Bytes a page.
    pub page_bytes: u64,
    /// Pages of one put and of one get.
    pub call_pages: u32,
    /// Bytes put, got and copied each time.
    pub total: u64,
    /// Rounds.
    pub runs: u32,
    /// Page by page, from private memory in huge pages to the memory that gets go to.
    pub memcpy: Row,
    /// From segments that the process has mapped and read before.
    pub get: Row,
    /// From a store that was opened anew: the kernel makes page tables on the way, once a process.
    pub get_first: Row,
    /// Put and flush over memory that was used before.
    pub put: Row,
    /// Put and flush into memory that the kernel has to clear first.
    pub put_fresh: Row,
}

/// Where, and how bytes moved.
#[derive(Default, Serialize)]
pub struct Machine {
    pub dir: String,
    pub io: String,
    pub warnings: Vec<String>,
    /// Threads that a call shares its pages among; memcpy has as many.
    pub threads: usize,
}

/// The median of all rounds.
#[derive(Serialize)]
pub struct Row {
    pub gib_s: f64,
    /// Processor seconds of the whole process.
    pub cpu_s_per_gib: f64,
    /// Over memcpy of the same round.
    pub ratio: f64,
    /// Of each round.
    pub ratios: Vec<f64>,
}

impl Report {
    /// As tables.
    #[must_use]
    pub fn show(&self) -> String {
        let mut rates = table(&["", "GiB/s", "CPU s/GiB", "of memcpy", "of the rounds, half"]);
        let rows = [
            ("memcpy", &self.memcpy),
            ("get", &self.get),
            ("get, first of a process", &self.get_first),
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
            "{rates}\n{}: {}, {} a page, {} a time, {} thread(s) a call",
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
