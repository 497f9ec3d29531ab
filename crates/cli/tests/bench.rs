//! `bench store`, `bench clients` and `bench table` with small arguments: their reports, that the
//! first two leave no files, and arguments that `bench store` refuses. No test checks a speed.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{ritornello, scratch, text};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn tiny(more: &[&str]) -> (i32, String, String) {
    let dir = scratch();
    let words = ["bench", "store", "--dir", text(dir.path()), "--runs", "1"];
    let small = ["--total", "16MiB", "--segment-bytes", "1MiB", "--entries", "20000"];
    let answer = ritornello(&[&words, &small[..], more].concat());
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "the benchmark left files behind"
    );
    (answer.code, answer.out, answer.err)
}

fn number(json: &Value, path: &str) -> f64 {
    let value = json.pointer(path).unwrap_or_else(|| panic!("no {path}: {json:#}"));
    value.as_f64().unwrap_or_else(|| panic!("{path} is {value}"))
}

#[test]
fn store_report_has_positive_figures() {
    let more = ["--shape", "qwen2.5-0.5b", "--page-tokens", "16", "--json"];
    let (code, out, err) = tiny(&more);
    assert_eq!(code, 0, "{out}{err}");
    let json: Value = serde_json::from_str(&out).unwrap();
    for path in [
        "/raw/write_gib_s",
        "/raw/write_fresh_gib_s",
        "/raw/read_gib_s",
        "/raw/memcpy_gib_s",
        "/put/gib_s",
        "/put/ratio",
        "/put/cpu_s_per_gib",
        "/put_fresh/ratio",
        "/get/ratio",
        "/get/cpu_s_per_gib",
        "/raw/memory_read_cpu_s_per_gib",
        "/probe/p50_us",
        "/probe/p99_us",
        "/probe/cold_p50_us",
        "/probe/socket_p50_us",
        "/reopen_ms",
        "/reopen_cold_ms",
        "/files",
        "/bytes_on_disk",
    ] {
        assert!(number(&json, path) > 0.0, "{path}: {json:#}");
    }
    number(&json, "/memory_bytes_per_page");
    number(&json, "/memory_bytes_per_page_single");
    assert_eq!(number(&json, "/probe/entries"), 20_000.0);
    assert_eq!(number(&json, "/page_bytes"), f64::from(192 << 10));
    assert!(number(&json, "/bytes_put") >= f64::from(16 << 20));
    assert!(number(&json, "/files") <= number(&json, "/bytes_on_disk") / f64::from(1 << 20) + 16.0);
    assert!(
        json["probe"]["python_p50_us"].is_null(),
        "without an interpreter `python_p50_us` must be null"
    );
}

#[test]
fn text_report_shows_the_selected_part() {
    let shape = ["--shape", "custom", "--page-bytes", "256KiB"];
    let (code, out, err) = tiny(&[&shape[..], &["--only", "data"]].concat());
    assert_eq!(code, 0, "{out}{err}");
    for word in ["put + flush, overwriting", "cold get", "raw I/O + one read", "memcpy", "16 MiB"] {
        assert!(out.contains(word), "{word}: {out}");
    }
    let (code, out, err) = tiny(&["--only", "index", "--page-tokens", "1"]);
    assert_eq!(code, 0, "{out}{err}");
    assert!(out.contains("index of 20,000 pages") && !out.contains("cold get"), "{out}");
}

#[test]
fn steady_report_has_figures_of_equal_and_mixed_sizes() {
    let dir = scratch();
    let words = ["bench", "store", "--steady", "--dir", text(dir.path()), "--total", "640MiB"];
    let answer = ritornello(&[&words[..], &["--segment-bytes", "16MiB", "--json"]].concat());
    assert_eq!(answer.code, 0, "{}{}", answer.out, answer.err);
    let json = answer.json();
    for case in ["one_size", "mixed"] {
        let figures = &json[case];
        for name in ["put_ratio", "get_ratio", "get16_p99_ratio", "extents_per_run"] {
            assert!(figures[name].as_f64().unwrap() > 0.0, "{case} {name}: {figures:#}");
        }
        let number = |name: &str| figures[name].as_u64().unwrap();
        assert!(number("pages_evicted") > 0);
        assert!(number("allocated_bytes_max") <= number("budget_bytes"));
        assert!(figures["small_pages"]["max"].as_u64().unwrap() == 1);
        assert!(figures["write_amplification"].as_f64().unwrap() < 1.05);
    }
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "the benchmark left files behind"
    );
}

#[test]
fn clients_report_has_latencies_and_rates() {
    let dir = scratch();
    let words = ["bench", "clients", "--dir", text(dir.path()), "--runs", "1", "--clients", "2"];
    let small = ["--total", "1MiB", "--page-bytes", "16KiB", "--segment-bytes", "1MiB"];
    let answer = ritornello(&[&words[..], &small, &["--json"]].concat());
    assert_eq!(answer.code, 0, "{}", answer.err);
    let json = answer.json();
    for caller in ["own", "alone", "crowded"] {
        for what in ["probe", "lease", "long_probe"] {
            let [p50, p99] =
                ["p50_us", "p99_us"].map(|of| number(&json, &format!("/{caller}/{what}/{of}")));
            assert!(0.0 < p50 && p50 <= p99, "{caller} {what}: {json:#}");
        }
    }
    for path in ["/put/own_gib_s", "/put/client_gib_s", "/put/ratio", "/get/ratio"] {
        assert!(number(&json, path) > 0.0, "{path}: {json:#}");
    }
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "the benchmark left files behind"
    );
}

#[test]
fn puts_into_full_volumes_evict() {
    let dir = scratch();
    let paths = ["a", "b"].map(|name| dir.path().join(name));
    for path in &paths {
        std::fs::create_dir(path).unwrap();
    }
    let joined = paths.each_ref().map(|path| text(path)).join(",");
    let words = ["bench", "store", "--paths", &joined, "--runs", "2", "--full", "--json"];
    let small = ["--total", "32MiB", "--segment-bytes", "1MiB", "--call-bytes", "4MiB,32MiB"];
    let shape = ["--shape", "custom", "--page-bytes", "256KiB"];
    let answer = ritornello(&[&words[..], &small, &shape].concat());
    assert_eq!(answer.code, 0, "{}{}", answer.out, answer.err);
    let json = answer.json();
    assert!(number(&json, "/evicted_pages") > 0.0, "{json:#}");
    for call in ["/calls/0", "/calls/1"] {
        for what in ["put", "get"] {
            assert!(number(&json, &format!("{call}/{what}/ratio")) > 0.0, "{json:#}");
        }
    }
    for path in &paths {
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 0, "the benchmark left files behind");
    }
}

#[test]
fn volumes_report_has_ratios_to_sum_of_disk_rates() {
    let dir = scratch();
    let paths = ["a", "b"].map(|name| dir.path().join(name));
    for path in &paths {
        std::fs::create_dir(path).unwrap();
    }
    let joined = paths.each_ref().map(|path| text(path)).join(",");
    let words = ["bench", "store", "--paths", &joined, "--runs", "1", "--throttle", "400MiB"];
    let small = ["--total", "8MiB", "--segment-bytes", "1MiB", "--call-bytes", "2MiB,8MiB"];
    let shape = ["--shape", "custom", "--page-bytes", "256KiB", "--json"];
    let answer = ritornello(&[&words[..], &small, &shape].concat());
    assert_eq!(answer.code, 0, "{}{}", answer.out, answer.err);
    let json = answer.json();
    assert_eq!(number(&json, "/throttle_bytes_per_s"), f64::from(400 << 20));
    assert_eq!(json["io"], "pool", "{json:#}");
    assert_eq!(number(&json, "/evicted_pages"), 0.0, "an empty store has nothing to evict");
    for raw in ["/sum", "/directories/0", "/directories/1"] {
        for figure in ["write_gib_s", "read_gib_s"] {
            assert!(number(&json, &format!("{raw}/{figure}")) > 0.0, "{raw}: {json:#}");
        }
    }
    for (at, (bytes, pages, calls)) in
        [(2 << 20, 8.0, 4.0), (8 << 20, 32.0, 1.0)].iter().enumerate()
    {
        let of = |name: &str| number(&json, &format!("/calls/{at}/{name}"));
        assert_eq!(of("call_bytes"), f64::from(*bytes));
        assert_eq!((of("call_pages"), of("calls")), (*pages, *calls));
        for (what, sum) in [("put", "/sum/write_gib_s"), ("get", "/sum/read_gib_s")] {
            let ratio = of(&format!("{what}/gib_s")) / number(&json, sum);
            assert!((of(&format!("{what}/ratio")) / ratio - 1.0).abs() < 1e-9, "{json:#}");
            assert!(ratio > 0.0 && of(&format!("{what}/cpu_s_per_gib")) > 0.0, "{json:#}");
        }
    }
    for path in &paths {
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 0, "the benchmark left files behind");
    }
}

#[test]
fn invalid_volumes_are_refused() {
    let dir = scratch();
    let one = text(dir.path());
    let twice = format!("{one},{one}");
    let small = ["--total", "8MiB", "--call-bytes", "8MiB"];
    for (words, why) in [
        (["--paths", &twice].as_slice(), "twice"),
        (&["--paths", one, "--dir", one], "--dir"),
        (&["--paths", one, "--throttle", "0"], "rate"),
        (&["--throttle", "1MiB"], "--paths"),
        (&["--full"], "--paths"),
    ] {
        let answer = ritornello(&[&["bench", "store"], &small[..], words].concat());
        assert_eq!(answer.code, 2, "{words:?}: {}", answer.err);
        assert!(answer.err.contains(why), "{words:?}: {}", answer.err);
    }
}

#[test]
fn missing_directory_or_too_little_space_is_refused() {
    let dir = scratch();
    let missing = dir.path().join("missing");
    let answer = ritornello(&["bench", "store", "--dir", text(&missing)]);
    assert_eq!(answer.code, 2, "{}", answer.err);
    let answer = ritornello(&["bench", "store", "--dir", text(dir.path()), "--total", "900TiB"]);
    assert_eq!(answer.code, 2, "{}", answer.err);
    assert!(answer.err.contains("room"), "{}", answer.err);
}

#[test]
fn interrupted_run_leaves_no_files() {
    let dir = scratch();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ritornello"));
    command.args(["bench", "store", "--dir", text(dir.path()), "--total", "256MiB"]);
    command.args(["--runs", "100", "--only", "data", "--page-tokens", "1"]);
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let entries = || std::fs::read_dir(dir.path()).unwrap().count();
    let timeout = Instant::now() + Duration::from_secs(60);
    while entries() == 0 && Instant::now() < timeout {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(entries(), 1);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let status = child.wait().unwrap();
    assert!(!status.success());
    assert_eq!(entries(), 0, "the benchmark left files behind");
}

#[test]
fn table_report_has_times_of_walks_and_memory_reads() {
    let words = ["bench", "table", "--nodes", "2048", "--pages-per-node", "32,1", "--json"];
    let answer = ritornello(&words);
    assert_eq!(answer.code, 0, "{}{}", answer.out, answer.err);
    let json: Value = serde_json::from_str(&answer.out).unwrap();
    for (row, (pages, visited)) in [(32.0, 8.0), (1.0, 256.0)].into_iter().enumerate() {
        let of = |name: &str| number(&json, &format!("/rows/{row}/{name}"));
        assert_eq!((of("nodes"), of("pages_per_node")), (2048.0, pages));
        assert_eq!(of("nodes_per_walk"), visited);
        for name in ["walk_p50_us", "walk_p99_us", "reads_p50_us", "cold_reads_p50_us"] {
            assert!(of(name) > 0.0, "{name}: {json:#}");
        }
    }
}
