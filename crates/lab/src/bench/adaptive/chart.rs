//! Charts of `bench adaptive`: the LSM-tree's shape, its cost, and its effect on latencies.

use super::report::{ADAPTIVE, Row, Sample, Stage};
use ritornello_terminal::plot::{Join, Line, Panel};

/// Variants whose numbers of sorted runs are drawn: the controller, and two fixed settings.
const SHAPES: [&str; 3] = [ADAPTIVE, "12/1", "12/11"];

/// Returns the panels for the rows that were measured with one memtable size.
#[must_use]
pub fn panels(rows: &[&Row]) -> Vec<Panel> {
    let adaptive = rows.iter().find(|row| row.name == ADAPTIVE);
    let samples = adaptive.map_or(&[][..], |row| &row.samples[..]);
    let decided = samples.iter().filter(|sample| sample.decided);
    let marks: Vec<f64> = decided.map(|sample| sample.request as f64).collect();
    let over_requests = |title: &str, lines, marks| Panel {
        title: title.to_owned(),
        across: "requests, warm-up included".to_owned(),
        lines,
        marks,
        ..Panel::default()
    };
    let shapes = rows.iter().filter(|row| SHAPES.contains(&row.name.as_str()));
    let runs = shapes.map(|row| shape(&row.name, &row.samples, |at| at.sorted_runs as f64));
    let settings = vec![
        shape("size ratio T", samples, |at| f64::from(at.ratio)),
        shape("runs per level K", samples, |at| f64::from(at.runs)),
        shape("levels L", samples, |at| f64::from(at.levels)),
    ];
    let bound = vec![
        shape(ADAPTIVE, samples, |at| at.sorted_runs as f64),
        shape("K L", samples, |at| f64::from(at.runs * at.levels)),
    ];
    let by_stage = |title: &str, value: &dyn Fn(&Stage) -> f64| Panel {
        title: title.to_owned(),
        across: "stage".to_owned(),
        lines: rows.iter().map(|row| stages(row, value)).collect(),
        ..Panel::default()
    };
    let a_request = |value: f64, stage: &Stage| value / stage.requests.max(1) as f64;
    vec![
        over_requests("sorted runs", runs.collect(), Vec::new()),
        over_requests("the controller's runs, and their bound", bound, marks.clone()),
        over_requests("the controller's setting", settings, marks),
        by_stage("processor time, ms per request", &|stage| a_request(stage.cpu_s * 1e3, stage)),
        by_stage("probe of 256 pages, p50, µs", &|stage| stage.probe_p50_us),
        by_stage("put of 32 pages, p99, µs", &|stage| stage.put_p99_us),
        by_stage("put of 32 pages, p50, µs", &|stage| stage.put_p50_us),
        by_stage("written to storage, KiB per request", &|stage| {
            a_request(stage.written_bytes as f64 / 1024.0, stage)
        }),
    ]
}

fn shape(name: &str, samples: &[Sample], value: impl Fn(&Sample) -> f64) -> Line {
    let points = samples.iter().map(|sample| (sample.request as f64, value(sample)));
    Line { name: name.to_owned(), points: points.collect(), join: Join::Steps }
}

fn stages(row: &Row, value: &dyn Fn(&Stage) -> f64) -> Line {
    let points = row.stages.iter().enumerate().map(|(at, stage)| ((at + 1) as f64, value(stage)));
    Line { name: row.name.clone(), points: points.collect(), join: Join::Points }
}
