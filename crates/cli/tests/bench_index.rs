//! `bench index` with small arguments: its report, that it leaves no files, and a backend that it
//! refuses. No test checks whether a figure is good.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{ritornello, scratch, text};
use serde_json::Value;

#[test]
fn index_report_has_a_row_per_backend_and_sync_mode() {
    for (workload, puts) in [("chains", 2000), ("kv-events", 2000), ("one-prompt", 9920)] {
        let (dir, pictures) = (scratch(), scratch());
        let picture = pictures.path().join("index.svg");
        let words = ["bench", "index", "--dir", text(dir.path()), "--backends", "run,memory"];
        let more = ["--entries", "2000", "--durable", "--workload", workload, "--json"];
        let drawn = ["--chart", text(&picture)];
        let answer = ritornello(&[&words[..], &more, &drawn].concat());
        assert_eq!(answer.code, 0, "{}{}", answer.out, answer.err);
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "the benchmark left files behind"
        );
        let json: Value = serde_json::from_str(&answer.out).unwrap();
        let rows = json["rows"].as_array().unwrap();
        assert!(json["limits"]["memory_access_ns"].as_f64().unwrap() > 0.0);
        assert!(json["limits"]["append_sync_us"].as_f64().unwrap() > 0.0);
        let svg = std::fs::read_to_string(&picture).unwrap();
        assert!(svg.contains("pages put per second") && svg.contains("run"), "{svg}");
        assert_eq!(rows.len(), 6, "two backends with three ways to sync make six rows: {json:#}");
        for row in rows {
            assert_eq!(row["puts"], puts);
            for name in ["ingest_per_s", "probe_p50_us", "probe_p99_us", "removes_per_s"] {
                assert!(row[name].as_f64().unwrap() > 0.0, "{name}: {row:#}");
            }
            assert!(row["memory_bytes_per_entry"].is_number());
            let persistent = row["backend"] == "run";
            for name in ["recovery_ms", "recovery_killed_ms", "disk_bytes_per_entry"] {
                let there = row[name].as_f64().is_some_and(|value| value > 0.0);
                assert_eq!(there, persistent, "{name}: {row:#}");
            }
            assert_eq!(row["write_amplification"].is_number(), persistent);
        }
    }
}

#[test]
fn unknown_backend_lists_compiled_backends() {
    let answer = ritornello(&["bench", "index", "--backends", "run,cuckoo"]);
    assert_eq!(answer.code, 2, "{}", answer.err);
    assert!(answer.err.contains("cuckoo") && answer.err.contains("run, memory"), "{}", answer.err);
}
