//! Lines over a common axis, as a picture: SVG, with a panel for each figure.

use std::fmt::Write;

/// Of a panel, in pixels.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 280.0;
/// Around a panel's axes.
const LEFT: f64 = 58.0;
const TOP: f64 = 34.0;
const RIGHT: f64 = 14.0;
const BOTTOM: f64 = 44.0;
/// A line of the legend.
const LEGEND: f64 = 24.0;
/// Panels beside each other.
const ABREAST: usize = 2;

/// Colours that the colour-blind can tell apart (Okabe and Ito, "Color Universal Design", 2008).
const COLOURS: [&str; 8] =
    ["#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#888888"];

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// In the legend; lines of the same name have the same colour in all panels.
    pub name: String,
    /// In order of the first number.
    pub points: Vec<(f64, f64)>,
    /// Whether a value holds until the next one.
    pub steps: bool,
}

/// One pair of axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Panel {
    /// Above it.
    pub title: String,
    /// Below it.
    pub across: String,
    /// Beside it; values start at zero.
    pub up: String,
    /// What it shows.
    pub lines: Vec<Line>,
    /// Places on the axis across that are marked from top to bottom.
    pub marks: Vec<f64>,
}

/// Draws panels, two abreast, above one legend: an SVG document.
#[must_use]
pub fn plot(panels: &[Panel]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for line in panels.iter().flat_map(|panel| &panel.lines) {
        if !names.contains(&line.name.as_str()) {
            names.push(&line.name);
        }
    }
    let rows = panels.len().div_ceil(ABREAST);
    let width = WIDTH * panels.len().clamp(1, ABREAST) as f64;
    let height = HEIGHT * rows as f64 + LEGEND;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    for (at, panel) in panels.iter().enumerate() {
        let (x, y) = (WIDTH * (at % ABREAST) as f64, HEIGHT * (at / ABREAST) as f64);
        let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">");
        draw(&mut svg, panel, &names);
        svg.push_str("</g>\n");
    }
    let y = HEIGHT * rows as f64 + LEGEND / 2.0;
    let apart = (width - LEFT) / names.len().max(1) as f64;
    for (at, name) in names.iter().enumerate() {
        let x = LEFT + apart * at as f64;
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{y}\" x2=\"{:.1}\" y2=\"{y}\" {}/>\
             <text x=\"{:.1}\" y=\"{}\">{}</text>",
            x + 18.0,
            stroke(at),
            x + 22.0,
            y + 4.0,
            escaped(name)
        );
    }
    svg + "</svg>\n"
}

fn draw(svg: &mut String, panel: &Panel, names: &[&str]) {
    let points = || panel.lines.iter().flat_map(|line| line.points.iter());
    let (least, most) = points()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), (x, _)| {
            (least.min(*x), most.max(*x))
        });
    if least > most {
        return;
    }
    let top = round_up(points().map(|(_, y)| *y).fold(0.0, f64::max));
    let across = (most - least).max(f64::MIN_POSITIVE);
    let x = |value: f64| LEFT + (value - least) / across * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM);
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    let _ = writeln!(
        svg,
        "<text x=\"{middle}\" y=\"20\" text-anchor=\"middle\" font-weight=\"bold\">{}</text>\n\
         <text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
         <text transform=\"translate(14 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        escaped(&panel.title),
        HEIGHT - 8.0,
        escaped(&panel.across),
        (TOP + HEIGHT - BOTTOM) / 2.0,
        escaped(&panel.up)
    );
    for step in 0..=4 {
        let value = top * f64::from(step) / 4.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{0:.1}\" x2=\"{1}\" y2=\"{0:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{2}\" y=\"{3:.1}\" text-anchor=\"end\">{4}</text>",
            y(value),
            WIDTH - RIGHT,
            LEFT - 6.0,
            y(value) + 4.0,
            short(value)
        );
    }
    for step in 0..=4 {
        let value = least + across * f64::from(step) / 4.0;
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            x(value),
            HEIGHT - BOTTOM + 17.0,
            short(value)
        );
    }
    for mark in &panel.marks {
        let _ = writeln!(
            svg,
            "<line x1=\"{0:.1}\" y1=\"{TOP}\" x2=\"{0:.1}\" y2=\"{1}\" stroke=\"#bbbbbb\" \
             stroke-dasharray=\"3 3\"/>",
            x(*mark),
            HEIGHT - BOTTOM
        );
    }
    for line in &panel.lines {
        let at = names.iter().position(|name| *name == line.name).unwrap_or(0);
        let mut drawn = String::new();
        let mut last = None;
        for (across, up) in &line.points {
            if let Some(last) = last.filter(|_| line.steps) {
                let _ = write!(drawn, "{:.1},{:.1} ", x(*across), y(last));
            }
            let _ = write!(drawn, "{:.1},{:.1} ", x(*across), y(*up));
            last = Some(*up);
        }
        let _ =
            writeln!(svg, "<polyline points=\"{}\" fill=\"none\" {}/>", drawn.trim(), stroke(at));
    }
}

fn stroke(at: usize) -> String {
    // The first is the one to look at.
    let width = if at == 0 { 2.5 } else { 1.5 };
    format!("stroke=\"{}\" stroke-width=\"{width}\"", COLOURS[at % COLOURS.len()])
}

/// The next of 1, 2, 4, 6, 8 times a power of ten; 1 for nothing.
fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let unit = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 4.0, 6.0, 8.0]
        .into_iter()
        .map(|n| n * unit)
        .find(|n| value <= *n)
        .unwrap_or(10.0 * unit)
}

/// A number of three or four digits.
fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        big if big >= 1e6 => (value / 1e6, " M"),
        big if big >= 1e4 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    format!("{}{unit}", (value * 100.0).round() / 100.0)
}

/// Text as SVG writes it.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_share_a_legend_and_steps_have_corners() {
        let line = |name: &str, steps| Line {
            name: name.to_owned(),
            points: vec![(0.0, 1.0), (10.0, 3.0), (20.0, 2.0)],
            steps,
        };
        let panel = |lines| Panel {
            title: "a < b".to_owned(),
            lines,
            marks: vec![5.0],
            ..Panel::default()
        };
        let svg = plot(&[
            panel(vec![line("one", false), line("two", true)]),
            panel(vec![line("two", true)]),
        ]);
        assert_eq!((svg.matches("<polyline").count(), svg.matches(">two<").count()), (3, 1));
        let corners = |at: usize| {
            let line = svg.lines().filter(|line| line.starts_with("<polyline")).nth(at);
            line.map(|line| line.matches(',').count())
        };
        assert_eq!((corners(0), corners(1)), (Some(3), Some(5)));
        assert!(svg.contains("a &lt; b") && !svg.contains("NaN") && !svg.contains("inf"));
        assert!(plot(&[panel(Vec::new())]).ends_with("</svg>\n"));
        assert_eq!([round_up(0.0), round_up(3.1), round_up(90.0)], [1.0, 4.0, 100.0]);
        assert_eq!([short(12_345.0), short(2.5e6), short(0.125)], ["12.35 k", "2.5 M", "0.13"]);
    }
}
