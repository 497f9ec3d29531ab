//! The rows as a picture: SVG, a panel for each figure, over the number of pages.

use super::report::{Row, Sync};
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;
use std::error::Error;

/// Colours that the colour-blind can tell apart (Okabe and Ito, "Color Universal Design", 2008).
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 0, 0), RGBColor(0, 114, 178), RGBColor(230, 159, 0), RGBColor(0, 158, 115)];
/// Of a panel, in pixels.
const PANEL: (u32, u32) = (380, 280);
/// Panels side by side, and rows of them.
const ACROSS: usize = 3;
const DOWN: usize = 2;
/// The line that says which colour is whose.
const LEGEND: u32 = 34;

type Figure = fn(&Row) -> Option<f64>;

const FIGURES: [(&str, Figure); ACROSS * DOWN] = [
    ("pages put a second", |row| Some(row.ingest_per_s)),
    ("probe of 256 pages, p50, µs", |row| Some(row.probe_p50_us)),
    ("pages removed a second", |row| Some(row.removes_per_s)),
    ("bytes to storage, over 40 a page put", |row| row.write_amplification),
    ("opening after SIGKILL, ms", |row| row.recovery_killed_ms),
    ("resident bytes a page", |row| Some(row.memory_bytes_per_entry)),
];

/// Draws the rows that were synced in groups.
///
/// # Errors
/// What the drawing library cannot do.
pub fn chart(rows: &[Row]) -> Result<String, Box<dyn Error>> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.sync == Sync::Group).collect();
    let mut backends: Vec<&str> = rows.iter().map(|row| row.backend.as_str()).collect();
    backends.sort_unstable();
    backends.dedup();
    let mut svg = String::new();
    {
        let size = (PANEL.0 * ACROSS as u32, PANEL.1 * DOWN as u32 + LEGEND);
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE)?;
        let (panels, legend) = area.split_vertically(PANEL.1 * DOWN as u32);
        for (panel, (title, figure)) in panels.split_evenly((DOWN, ACROSS)).iter().zip(FIGURES) {
            let points = |backend: &str| -> Vec<(f64, f64)> {
                let own = rows.iter().filter(|row| row.backend == backend);
                let mut points: Vec<(f64, f64)> = own
                    .filter_map(|row| Some((row.entries as f64, figure(row)?)))
                    .filter(|(_, value)| *value > 0.0)
                    .collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                points
            };
            let lines: Vec<_> = backends.iter().map(|backend| points(backend)).collect();
            draw(panel, title, &lines)?;
        }
        for (at, backend) in backends.iter().enumerate() {
            let x = 60 + 110 * at as i32;
            legend.draw(&Circle::new((x, 14), 5, colour(at).filled()))?;
            legend.draw(&Text::new((*backend).to_owned(), (x + 12, 6), ("sans-serif", 15)))?;
        }
        area.present()?;
    }
    Ok(svg)
}

fn draw<B>(
    panel: &DrawingArea<B, plotters::coord::Shift>,
    title: &str,
    lines: &[Vec<(f64, f64)>],
) -> Result<(), Box<dyn Error>>
where
    B: DrawingBackend,
    B::ErrorType: 'static,
{
    let all = || lines.iter().flatten();
    let x = around(all().map(|point| point.0));
    let y = around(all().map(|point| point.1));
    let mut axes = ChartBuilder::on(panel)
        .caption(title, ("sans-serif", 15))
        .margin(12)
        .x_label_area_size(24)
        .y_label_area_size(52)
        .build_cartesian_2d(x.log_scale(), y.log_scale())?;
    label(&mut axes)?;
    for (at, line) in lines.iter().enumerate() {
        axes.draw_series(LineSeries::new(line.iter().copied(), colour(at).stroke_width(2)))?;
        axes.draw_series(line.iter().map(|point| Circle::new(*point, 3, colour(at).filled())))?;
    }
    Ok(())
}

fn label<B, X, Y>(axes: &mut ChartContext<'_, B, Cartesian2d<X, Y>>) -> Result<(), Box<dyn Error>>
where
    B: DrawingBackend,
    B::ErrorType: 'static,
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    axes.configure_mesh()
        .light_line_style(WHITE)
        .x_labels(5)
        .y_labels(6)
        .x_label_formatter(&|value| short(*value))
        .y_label_formatter(&|value| short(*value))
        .draw()?;
    Ok(())
}

fn colour(at: usize) -> RGBColor {
    COLOURS[at % COLOURS.len()]
}

/// A range with room on both sides of what is in it.
fn around(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) =
        values.fold((f64::MAX, f64::MIN), |(low, high), value| (value.min(low), value.max(high)));
    if low > high { 1.0..10.0 } else { low / 2.0..high * 2.0 }
}

/// 5000000 as 5M.
fn short(value: f64) -> String {
    let (scaled, unit) = match value {
        1e6.. => (value / 1e6, "M"),
        1e3.. => (value / 1e3, "k"),
        _ => (value, ""),
    };
    // As many digits as tell neighbours apart.
    let digits = if scaled < 1.0 { 2 } else { usize::from(scaled.fract() > 0.05) };
    format!("{scaled:.digits$}{unit}")
}
