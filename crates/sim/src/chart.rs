//! Draws the hit rate over the capacity as an SVG document, with one panel per trace.

use crate::Row;
use std::fmt::Write;

/// Size of a panel in pixels.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 320.0;
/// Margins around a panel's axes, in pixels.
const LEFT: f64 = 52.0;
const TOP: f64 = 34.0;
const RIGHT: f64 = 14.0;
const BOTTOM: f64 = 44.0;
/// Height of the legend below the panels, in pixels.
const LEGEND: f64 = 22.0;

/// Colours that colour-blind readers can distinguish (Okabe and Ito, "Color Universal Design",
/// 2008).
const COLOURS: [&str; 7] =
    ["#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];
/// Colour of Belady's bound, which is drawn dashed.
const GREY: &str = "#888888";

/// Draws for each policy the hit rate over the capacity, on a logarithmic axis of capacities.
/// Without rows the document has no panels.
#[must_use]
pub fn chart(rows: &[Row]) -> String {
    let traces = distinct(rows.iter().map(|row| row.trace.as_str()));
    let policies = distinct(rows.iter().map(|row| row.policy));
    let width = WIDTH * traces.len().max(1) as f64;
    let height = HEIGHT + LEGEND;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    for (at, trace) in traces.iter().enumerate() {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.trace == *trace).collect();
        let _ = writeln!(svg, "<g transform=\"translate({} 0)\">", WIDTH * at as f64);
        panel(&mut svg, trace, &policies, &rows);
        svg.push_str("</g>\n");
    }
    for (at, policy) in policies.iter().enumerate() {
        let (x, y) = (LEFT + 84.0 * at as f64, HEIGHT + LEGEND / 2.0);
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" {}/><text x=\"{}\" y=\"{}\">{}</text>",
            x + 22.0,
            stroke(policy, at),
            x + 27.0,
            y + 4.0,
            escaped(policy)
        );
    }
    svg + "</svg>\n"
}

fn panel(svg: &mut String, trace: &str, policies: &[&str], rows: &[&Row]) {
    let mut capacities: Vec<f64> = rows.iter().map(|row| row.capacity_fraction).collect();
    capacities.sort_by(f64::total_cmp);
    capacities.dedup();
    let (Some(&least), Some(&most)) = (capacities.first(), capacities.last()) else { return };
    let highest = rows.iter().map(|row| row.hit_rate).fold(0.0, f64::max);
    let tops = [0.1, 0.2, 0.4, 0.6, 0.8, 1.0];
    let top = tops.into_iter().find(|top| highest <= *top).unwrap_or(1.0);
    let across = (most / least).ln();
    let x = |capacity: f64| {
        let share = if across > 0.0 { (capacity / least).ln() / across } else { 0.5 };
        LEFT + 12.0 + share * (WIDTH - LEFT - RIGHT - 24.0)
    };
    let y = |rate: f64| HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM);
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    let _ = writeln!(
        svg,
        "<text x=\"{middle}\" y=\"20\" text-anchor=\"middle\" font-weight=\"bold\">{}</text>\n\
         <text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">capacity, share of all blocks</text>\n\
         <text transform=\"translate(14 {}) rotate(-90)\" text-anchor=\"middle\">hit rate</text>",
        escaped(trace),
        HEIGHT - 8.0,
        (TOP + HEIGHT - BOTTOM) / 2.0
    );
    for step in 0..=4 {
        let rate = top * f64::from(step) / 4.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{0:.1}\" x2=\"{1}\" y2=\"{0:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{2}\" y=\"{3:.1}\" text-anchor=\"end\">{4}</text>",
            y(rate),
            WIDTH - RIGHT,
            LEFT - 6.0,
            y(rate) + 4.0,
            percent(rate)
        );
    }
    for &capacity in &capacities {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            x(capacity),
            HEIGHT - BOTTOM + 17.0,
            percent(capacity)
        );
    }
    for (at, policy) in policies.iter().enumerate() {
        let mut line: Vec<_> = rows.iter().filter(|row| row.policy == *policy).collect();
        line.sort_by(|a, b| a.capacity_fraction.total_cmp(&b.capacity_fraction));
        let points = line.iter().map(|row| {
            let (x, y) = (x(row.capacity_fraction), y(row.hit_rate));
            format!("{x:.1},{y:.1}")
        });
        let points = points.collect::<Vec<_>>().join(" ");
        let _ =
            writeln!(svg, "<polyline points=\"{points}\" fill=\"none\" {}/>", stroke(policy, at));
    }
}

fn stroke(policy: &str, at: usize) -> String {
    if policy == "belady" {
        return format!("stroke=\"{GREY}\" stroke-width=\"2\" stroke-dasharray=\"5 4\"");
    }
    // The first policy has a wider line.
    let width = if at == 0 { 3 } else { 2 };
    format!("stroke=\"{}\" stroke-width=\"{width}\"", COLOURS[at % COLOURS.len()])
}

fn percent(share: f64) -> String {
    // Show at most four decimal places of a percent, which small capacities need.
    let rounded = (share * 1e6).round() / 1e4;
    format!("{rounded} %")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

fn distinct<'a>(words: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut out = Vec::new();
    words.for_each(|word| {
        if !out.contains(&word) {
            out.push(word);
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SimPolicy, TraceBuilder, simulate};

    #[test]
    fn each_policy_has_a_line_with_all_points() {
        let mut builder = TraceBuilder::new("a < b");
        (0..50).for_each(|at| builder.request(0.0, [1, 2, at % 7]));
        let trace = builder.finish();
        let mut rows = Vec::new();
        for word in ["lru", "belady"] {
            for capacity in [0.2, 0.5, 1.0] {
                let policy = SimPolicy::parse(word).unwrap();
                let row = simulate(&trace, policy, capacity, 4096, 0.0, &mut |_| ());
                rows.push(row.unwrap());
            }
        }
        let svg = chart(&rows);
        assert_eq!(svg.matches("<polyline").count(), 2, "{svg}");
        let line = svg.lines().find(|line| line.starts_with("<polyline")).unwrap();
        assert_eq!(line.matches(',').count(), 3, "{line}");
        for word in [">a &lt; b<", ">20 %<", ">50 %<", ">lru<", ">belady<"] {
            assert!(svg.contains(word), "{word}: {svg}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        assert!(chart(&[]).ends_with("</svg>\n"));
    }
}
