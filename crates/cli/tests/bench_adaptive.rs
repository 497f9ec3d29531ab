//! `bench adaptive` with small arguments: its report, that it leaves no files, and a setting that
//! it refuses. No test checks whether a figure is good.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::ritornello;

#[cfg(feature = "lsm")]
#[test]
fn report_covers_every_variant_and_stage() {
    let (dir, pictures) = (common::scratch(), common::scratch());
    let picture = pictures.path().join("adaptive.svg");
    let words = ["bench", "adaptive", "--dir", common::text(dir.path()), "--entries", "20000"];
    let more = ["--stages", "2", "--rounds", "1", "--settings", "4/1", "--memtable", "256KiB"];
    let drawn = ["--json", "--chart", common::text(&picture)];
    let answer = ritornello(&[&words[..], &more, &drawn].concat());
    assert_eq!(answer.code, 0, "{}{}", answer.out, answer.err);
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "the benchmark left files behind"
    );
    let json: serde_json::Value = serde_json::from_str(&answer.out).unwrap();
    let rows = json["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["adaptive", "4/1"]);
    for row in rows {
        assert!(row["cost_s"].as_f64().unwrap() > 0.0, "{row:#}");
        assert!(row["rewrites"].as_f64().unwrap() > 0.0, "{row:#}");
        assert_eq!(row["stages"].as_array().unwrap().len(), 2);
        assert!(row["stages"][0]["probe_p50_us"].as_f64().unwrap() > 0.0, "{row:#}");
    }
    assert!(!rows[0]["decisions"].as_array().unwrap().is_empty());
    let hits = json["hits"].as_array().unwrap();
    let rate = |at: usize| hits[at]["hit_rate"].as_f64().unwrap();
    assert!(rate(0) > 0.0 && rate(0) < 1.0 && hits.len() == 3, "{hits:?}");
    let svg = std::fs::read_to_string(&picture).unwrap();
    assert!(svg.contains("sorted runs") && svg.contains("4/1"), "{svg}");
}

#[cfg(not(feature = "lsm"))]
#[test]
fn build_without_lsm_names_the_feature() {
    let answer = ritornello(&["bench", "adaptive"]);
    assert_eq!(answer.code, 2, "{}", answer.err);
    assert!(answer.err.contains("cargo feature `lsm`"), "{}", answer.err);
}

#[test]
fn invalid_setting_is_refused() {
    let answer = ritornello(&["bench", "adaptive", "--settings", "4/4"]);
    assert_eq!(answer.code, 2);
    assert!(answer.err.contains("T/K with T from 2 to 12"), "{}", answer.err);
}
