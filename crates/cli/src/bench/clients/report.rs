//! The figures, and how people see them.

use super::super::report::quantile;
use super::part::{Latencies, Latency};
use crate::print::{bytes, table};
use serde::Serialize;

/// All of them.
#[derive(Serialize)]
pub struct Report {
    /// In the owner's process.
    pub own: Latencies,
    /// Through the socket, while nobody else asks.
    pub alone: Latencies,
    /// Beside busy clients, and how many.
    pub crowded: Latencies,
    /// How many.
    pub clients: u32,
    /// Put and flush.
    pub put: Row,
    /// Get.
    pub get: Row,
    /// Bytes a page of what was put and got.
    pub page_bytes: u64,
    /// Bytes put and got each time.
    pub total: u64,
}

/// Rates of the owner's own process and of a client, and the median ratio of the rounds.
#[derive(Serialize)]
pub struct Row {
    pub own_gib_s: f64,
    pub client_gib_s: f64,
    pub ratio: f64,
    /// Of each round.
    pub ratios: Vec<f64>,
}

impl Report {
    /// As a table.
    #[must_use]
    pub fn show(&self) -> String {
        let beside = format!("beside {} busy", self.clients);
        let mut rows = table(&["p50 / p99, us", "in process", "through the socket", &beside]);
        let mut row = |name: &str, of: &dyn Fn(&Latencies) -> Latency| {
            let cells = [&self.own, &self.alone, &self.crowded].map(|latencies| {
                let Latency { p50_us, p99_us } = of(latencies);
                format!("{p50_us:.1} / {p99_us:.1}")
            });
            let [own, alone, crowded] = cells;
            rows.add_row([name.to_owned(), own, alone, crowded]);
        };
        row("probe of 256 pages", &|latencies| latencies.probe);
        row("lease on 256 pages", &|latencies| latencies.lease);
        row("probe of 4,096 pages", &|latencies| latencies.long_probe);
        let mut rates = table(&["GiB/s", "in process", "client", "ratio", "of the rounds, half"]);
        for (name, of) in [("put + flush", &self.put), ("get", &self.get)] {
            let cells = [of.own_gib_s, of.client_gib_s, of.ratio].map(|rate| format!("{rate:.2}"));
            let [own, client, ratio] = cells;
            let [low, high] = [0.25, 0.75].map(|share| quantile(&of.ratios, share));
            rates.add_row([name.to_owned(), own, client, ratio, format!("{low:.2} to {high:.2}")]);
        }
        format!("{rows}\n{rates}\n{} a page, {} a time", bytes(self.page_bytes), bytes(self.total))
    }
}
