//! Charts of the figures of `bench index`, over the number of pages.

use super::report::{Row, Sync};
use ritornello_terminal::plot::{Join, Line, Panel, Scale};

type Figure = fn(&Row) -> Option<f64>;

const FIGURES: [(&str, Figure); 6] = [
    ("pages put per second", |row| Some(row.ingest_per_s)),
    ("probe of a sequence, p50, µs", |row| Some(row.probe_p50_us)),
    ("pages removed per second", |row| Some(row.removes_per_s)),
    ("bytes written to storage / (40 bytes per page put)", |row| row.write_amplification),
    ("opening after SIGKILL, ms", |row| row.recovery_killed_ms),
    ("resident bytes per page", |row| Some(row.memory_bytes_per_entry)),
];

/// Returns a panel for each figure, with a line for each backend, from the rows of [`Sync::Group`].
#[must_use]
pub fn panels(rows: &[Row]) -> Vec<Panel> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.sync == Sync::Group).collect();
    let mut backends: Vec<&str> = rows.iter().map(|row| row.backend.as_str()).collect();
    backends.sort_unstable();
    backends.dedup();
    let line = |backend: &str, figure: Figure| {
        let own = rows.iter().filter(|row| row.backend == backend);
        let mut points: Vec<(f64, f64)> = own
            .filter_map(|row| Some((row.entries as f64, figure(row)?)))
            // The axes are logarithmic, so they have no zero.
            .filter(|(_, value)| *value > 0.0)
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Line { name: backend.to_owned(), points, join: Join::Points }
    };
    let panels = FIGURES.iter().map(|(title, figure)| Panel {
        title: (*title).to_owned(),
        across: "pages".to_owned(),
        scale: Scale::Logarithmic,
        lines: backends.iter().map(|backend| line(backend, *figure)).collect(),
        marks: Vec::new(),
    });
    panels.collect()
}
