//! Line charts as one SVG document: a panel with its own axes for each chart, and one legend.

use crate::exit::Failure;
use plotters::chart::ChartContext;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;
use std::error::Error;
use std::path::Path;

/// Colours that colour-blind readers can distinguish: those of Okabe and Ito ("Color Universal
/// Design", 2008), with grey instead of yellow.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 0, 0),
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(136, 136, 136),
];
/// Width and height of a panel, in pixels.
const PANEL: (u32, u32) = (400, 280);
/// Height of the legend, in pixels.
const LEGEND: u32 = 34;
/// Width of one name in the legend, in pixels.
const NAME: i32 = 130;
const FONT: (&str, i32) = ("sans-serif", 15);

/// One line of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Name in the legend; lines of the same name have the same colour in all panels.
    pub name: String,
    /// Points (x, y), sorted by x.
    pub points: Vec<(f64, f64)>,
    /// How points are joined.
    pub join: Join,
}

/// How points become a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// Straight lines, with the points marked.
    Points,
    /// Straight lines without marks, for many points.
    Straight,
    /// Steps: the line keeps the y of a point until the x of the next point.
    Steps,
}

/// Scale of both axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Linear; the vertical axis begins at zero.
    #[default]
    Linear,
    /// Equal distances are equal factors.
    Logarithmic,
}

/// One chart: lines over one pair of axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Panel {
    /// Title above the panel, with the unit of the vertical axis.
    pub title: String,
    /// Label below the horizontal axis.
    pub across: String,
    /// Scale of both axes.
    pub scale: Scale,
    /// Lines of the panel.
    pub lines: Vec<Line>,
    /// Positions on the horizontal axis that get a vertical mark.
    pub marks: Vec<f64>,
}

/// Writes panels to a file, `abreast` per row, above one legend.
///
/// # Errors
/// If a panel cannot be drawn, or the file cannot be written.
pub fn write(path: &Path, panels: &[Panel], abreast: usize) -> Result<(), Failure> {
    let drawn = plot(panels, abreast).map_err(|error| {
        Failure::failed(format!("the chart could not be drawn: {error}"), "report this")
    })?;
    std::fs::write(path, drawn).map_err(|error| {
        let line = format!("the chart cannot be written to {}: {error}", path.display());
        Failure::failed(line, "--chart with another file")
    })
}

fn plot(panels: &[Panel], abreast: usize) -> Result<String, Box<dyn Error>> {
    let mut names: Vec<&str> = Vec::new();
    for line in panels.iter().flat_map(|panel| &panel.lines) {
        if !names.contains(&line.name.as_str()) {
            names.push(&line.name);
        }
    }
    let rows = panels.len().div_ceil(abreast);
    let height = PANEL.1 * rows as u32;
    let mut svg = String::new();
    {
        let size = (PANEL.0 * abreast as u32, height + LEGEND);
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE)?;
        let (upper, legend) = area.split_vertically(height);
        for (place, panel) in upper.split_evenly((rows, abreast)).iter().zip(panels) {
            draw(place, panel, &names)?;
        }
        for (at, name) in names.iter().enumerate() {
            let x = 30 + NAME * at as i32;
            legend.draw(&Circle::new((x, 14), 5, colour(at).filled()))?;
            legend.draw(&Text::new((*name).to_owned(), (x + 12, 6), FONT))?;
        }
        area.present()?;
    }
    Ok(svg)
}

type Place<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw(place: &Place<'_>, panel: &Panel, names: &[&str]) -> Result<(), Box<dyn Error>> {
    let all = || panel.lines.iter().flat_map(|line| &line.points);
    let Some(x) = extent(all().map(|point| point.0)) else { return Ok(()) };
    let Some(y) = extent(all().map(|point| point.1)) else { return Ok(()) };
    let mut chart = ChartBuilder::on(place);
    chart.caption(&panel.title, FONT).margin(12).x_label_area_size(40).y_label_area_size(56);
    match panel.scale {
        Scale::Linear => {
            let end = if x.1 > x.0 { x.1 } else { x.0 + 1.0 };
            let top = if y.1 > 0.0 { y.1 * 1.08 } else { 1.0 };
            fill(&mut chart.build_cartesian_2d(x.0..end, 0.0..top)?, panel, names, (0.0, top))
        }
        Scale::Logarithmic => {
            let (x, y) = (x.0 / 2.0..x.1 * 2.0, y.0 / 2.0..y.1 * 2.0);
            let ends = (y.start, y.end);
            let mut axes = chart.build_cartesian_2d(x.log_scale(), y.log_scale())?;
            fill(&mut axes, panel, names, ends)
        }
    }
}

fn fill<X, Y>(
    axes: &mut ChartContext<'_, SVGBackend<'_>, Cartesian2d<X, Y>>,
    panel: &Panel,
    names: &[&str],
    (bottom, top): (f64, f64),
) -> Result<(), Box<dyn Error>>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    axes.configure_mesh()
        .light_line_style(WHITE)
        .x_labels(5)
        .y_labels(6)
        .x_label_formatter(&|value| short(*value))
        .y_label_formatter(&|value| short(*value))
        .x_desc(&panel.across)
        .draw()?;
    let grey = RGBColor(187, 187, 187);
    for mark in &panel.marks {
        axes.plotting_area().draw(&PathElement::new([(*mark, bottom), (*mark, top)], grey))?;
    }
    for line in &panel.lines {
        let at = names.iter().position(|name| *name == line.name).unwrap_or(0);
        let points = match line.join {
            Join::Points | Join::Straight => line.points.clone(),
            Join::Steps => corners(&line.points),
        };
        axes.plotting_area().draw(&PathElement::new(points, colour(at).stroke_width(2)))?;
        for point in line.points.iter().filter(|_| line.join == Join::Points) {
            axes.plotting_area().draw(&Circle::new(*point, 3, colour(at).filled()))?;
        }
    }
    Ok(())
}

/// Returns the points of a step line: `points`, and a corner before each point after the first,
/// so that every segment is horizontal or vertical.
fn corners(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut out = Vec::with_capacity(2 * points.len());
    for &(x, y) in points {
        if let Some(&(_, before)) = out.last() {
            out.push((x, before));
        }
        out.push((x, y));
    }
    out
}

fn colour(at: usize) -> RGBColor {
    COLOURS[at % COLOURS.len()]
}

/// Returns the minimum and the maximum; `None` without values.
fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |extent, value| {
        let (low, high) = extent.unwrap_or((value, value));
        Some((value.min(low), value.max(high)))
    })
}

/// Formats a number with at most two decimals; from 10,000 in thousands (`12.35k`), from 1,000,000
/// in millions (`2.5M`).
fn short(value: f64) -> String {
    let (scaled, unit) = match value {
        1e6.. => (value / 1e6, "M"),
        1e4.. => (value / 1e3, "k"),
        _ => (value, ""),
    };
    format!("{}{unit}", (scaled * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_share_legend_and_steps_have_corners() {
        let line = |name: &str, join| Line {
            name: name.to_owned(),
            points: vec![(1.0, 1.0), (10.0, 3.0), (20.0, 2.0)],
            join,
        };
        for scale in [Scale::Linear, Scale::Logarithmic] {
            let panel = |lines| {
                let (title, marks) = ("a < b".to_owned(), vec![5.0]);
                Panel { title, across: "pages".to_owned(), scale, lines, marks }
            };
            let first = panel(vec![line("one", Join::Points), line("two", Join::Steps)]);
            let svg = plot(&[first, panel(vec![line("two", Join::Steps)])], 2).unwrap();
            assert_eq!(svg.matches("\ntwo\n").count(), 1, "{svg}");
            assert!(svg.contains("a &lt; b") && svg.contains("pages"), "{svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            assert!(plot(&[panel(Vec::new())], 2).unwrap().ends_with("</svg>\n"));
        }
        let steps = corners(&[(0.0, 1.0), (10.0, 3.0), (20.0, 2.0)]);
        assert_eq!(steps, [(0.0, 1.0), (10.0, 1.0), (10.0, 3.0), (20.0, 3.0), (20.0, 2.0)]);
        assert_eq!([short(12_345.0), short(2.5e6), short(0.125)], ["12.35k", "2.5M", "0.13"]);
    }
}
