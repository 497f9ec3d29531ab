//! The figures of `bench clients`, and their tables.

use super::client::{Latencies, Latency};
use crate::bench::quantile::quantile;
use ritornello_terminal::print::{bytes, table};
use serde::Serialize;

/// The report of `bench clients`.
#[derive(Serialize)]
pub struct Report {
    /// Latencies in the owner's process.
    pub own: Latencies,
    /// Latencies through the socket, with one client.
    pub alone: Latencies,
    /// Latencies through the socket while other clients are busy.
    pub crowded: Latencies,
    /// Number of busy clients.
    pub clients: u32,
    /// Rates of put and flush.
    pub put: Row,
    /// Rates of get.
    pub get: Row,
    /// Bytes per page of the data put and read.
    pub page_bytes: u64,
    /// Bytes put, and bytes read, in one measurement.
    pub total: u64,
}

/// Median rates in the owner's process and in a client, and the median over the rounds of the
/// client's rate divided by the owner's.
#[derive(Serialize)]
pub struct Row {
    pub own_gib_s: f64,
    pub client_gib_s: f64,
    pub ratio: f64,
    /// The client's rate divided by the owner's, in each round.
    pub ratios: Vec<f64>,
}

impl Report {
    /// Formats the report as a table.
    #[must_use]
    pub fn show(&self) -> String {
        let beside = format!("with {} busy clients", self.clients);
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
        let mut rates =
            table(&["GiB/s", "in process", "client", "ratio", "ratio, middle half of the rounds"]);
        for (name, of) in [("put + flush", &self.put), ("get", &self.get)] {
            let cells = [of.own_gib_s, of.client_gib_s, of.ratio].map(|rate| format!("{rate:.2}"));
            let [own, client, ratio] = cells;
            let [low, high] = [0.25, 0.75].map(|share| quantile(&of.ratios, share));
            rates.add_row([name.to_owned(), own, client, ratio, format!("{low:.2} to {high:.2}")]);
        }
        format!(
            "{rows}\n{rates}\n{} per page, {} per measurement",
            bytes(self.page_bytes),
            bytes(self.total)
        )
    }
}
