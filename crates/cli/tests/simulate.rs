//! The command `simulate`: its output, and the arguments that it refuses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{ritornello, scratch, text};
use std::path::Path;

const CONVERSATION: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../traces/mooncake_conversation.jsonl.gz");

/// Writes a trace of `requests`, each a JSON list of block ids.
fn written(path: &Path, requests: &[&str]) {
    let lines = requests.iter().enumerate().map(|(at, ids)| {
        format!(
            "{{\"timestamp\":{at},\"input_length\":9,\"output_length\":1,\"hash_ids\":{ids}}}\n"
        )
    });
    std::fs::write(path, lines.collect::<String>()).unwrap();
}

#[test]
fn rows_have_hit_rates_and_writes() {
    let dir = scratch();
    let path = dir.path().join("small.jsonl");
    written(&path, &["[1,2,3]", "[1,2,4]", "[1,2,3]", "[5]"]);
    let words = ["--capacity", "60%,100%", "--policy", "lru,belady", "--warm-up", "0%", "--json"];
    let answer = ritornello(&[&["simulate", text(&path)], &words[..]].concat());
    assert_eq!(answer.code, 0, "{}", answer.err);
    let json = answer.json();
    let trace = &json["traces"][0];
    assert_eq!((&trace["requests"], &trace["footprint_blocks"]), (&4.into(), &5.into()));
    let rows = json["rows"].as_array().unwrap();
    let seen = rows.iter().map(|row| {
        let rate = (row["hit_rate"].as_f64().unwrap() * 10.0).round();
        let fraction = row["capacity_fraction"].as_f64().unwrap();
        (row["policy"].as_str().unwrap(), fraction, row["capacity_blocks"].as_u64().unwrap(), rate)
    });
    let expected = [
        ("lru", 0.6, 3, 4.0),
        ("lru", 1.0, 5, 5.0),
        ("belady", 0.6, 3, 5.0),
        ("belady", 1.0, 5, 5.0),
    ];
    assert_eq!(seen.collect::<Vec<_>>(), expected);
    for row in rows {
        assert_eq!(row["trace"], "small");
        let amplification = row["write_amplification"].as_f64().unwrap();
        assert!((1.0..1.05).contains(&amplification), "{row}");
        assert!(row["writes_per_unique"].as_f64().unwrap() > 0.0);
    }
    // LRU with room for 3 blocks writes 3, 1, 1 and 1 blocks for the four requests, which have 5
    // unique blocks.
    assert_eq!(rows[0]["writes_per_unique"], 1.2);
}

#[test]
fn text_output_has_table_and_chart() {
    let dir = scratch();
    let chart = dir.path().join("rates.svg");
    let words = ["simulate", CONVERSATION, "--capacity", "5%,30%", "--chart", text(&chart)];
    let answer = ritornello(&[&words[..], &["--policy", "lru,belady", "--warm-up", "0"]].concat());
    assert_eq!(answer.code, 0, "{}", answer.err);
    for word in
        ["12,031 requests", "288,500 references", "182,790 blocks", "30 %", "belady", "36.6"]
    {
        assert!(answer.out.contains(word), "{word}: {}", answer.out);
    }
    let svg = std::fs::read_to_string(&chart).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("mooncake_conversation"), "{svg}");
}

#[test]
fn equal_seeds_generate_equal_workloads() {
    let small = ["--users", "10", "--requests", "500", "--history-tokens", "1000"];
    let stages = ["--warm-up-tokens", "200000", "--stage-tokens", "100000"];
    let both = ["simulate", "--generate", "multi-round-qa,ten-stage", "--json", "--policy", "lru"];
    let run = |seed: &str| {
        let answer = ritornello(&[&both[..], &small, &stages, &["--seed", seed]].concat());
        assert_eq!(answer.code, 0, "{}", answer.err);
        let json = answer.json();
        let rows = json["rows"].as_array().unwrap().iter();
        rows.map(|row| (row["trace"].to_string(), row["hit_rate"].to_string())).collect::<Vec<_>>()
    };
    let once = run("1");
    assert_eq!(once.len(), 8);
    assert_eq!(once[7].0, "\"ten-stage\"");
    assert_eq!(once, run("1"));
    assert_ne!(once, run("2"));
}

#[test]
fn broken_trace_lines_fail_or_are_reported() {
    let dir = scratch();
    let path = dir.path().join("broken.jsonl");
    written(&path, &["[1]", "oops", "[1]", "[2]"]);
    let words = ["simulate", text(&path), "--policy", "lru", "--capacity", "100%"];
    let answer = ritornello(&words);
    assert_eq!(answer.code, 2, "{}", answer.out);
    assert!(
        answer.err.contains("line 2 ") && answer.err.contains("--skip-broken"),
        "{}",
        answer.err
    );
    let answer = ritornello(&[&words[..], &["--skip-broken", "--json"]].concat());
    assert_eq!(answer.code, 0, "{}", answer.err);
    assert!(answer.err.contains("1 broken lines skipped: 2"), "{}", answer.err);
    assert_eq!(answer.json()["traces"][0]["skipped_lines"], serde_json::json!([2]));
}

#[test]
fn each_half_of_a_trace_starts_with_empty_store() {
    let dir = scratch();
    let path = dir.path().join("jump.jsonl");
    written(&path, &["[1,2]", "[1,2]", "[1,2]", "[1,2]"]);
    let late =
        std::fs::read_to_string(&path).unwrap().replace("\"timestamp\":1", "\"timestamp\":99");
    std::fs::write(&path, late).unwrap();
    let words = ["simulate", text(&path), "--policy", "lru", "--warm-up", "0%", "--json"];
    let rate = |half: &str| {
        let answer = ritornello(&[&words[..], &["--capacity", "100%", "--half", half]].concat());
        assert_eq!(answer.code, 0, "{}", answer.err);
        assert!(answer.err.contains("clock goes back 1 times"), "{}", answer.err);
        answer.json()["rows"][0]["hit_rate"].as_f64().unwrap()
    };
    assert_eq!([rate("first"), rate("second"), rate("whole")], [0.5, 0.5, 0.75]);
}

#[test]
fn invalid_arguments_are_explained() {
    let dir = scratch();
    let (empty, one) = (dir.path().join("empty.jsonl"), dir.path().join("one.jsonl"));
    std::fs::write(&empty, "").unwrap();
    written(&one, &["[1]"]);
    let missing = dir.path().join("missing");
    for (words, says) in [
        (&[text(&one), "--capacity", "0%"][..], "above 0 %"),
        (&[text(&one), "--capacity", "101%"], "at most 100 %"),
        (&[text(&one), "--capacity", "some"], "5% or 0.05"),
        (&[text(&one), "--policy", "fifo"], "s3fifo"),
        (&[text(&one), "--chart", "rates.png"], ".svg"),
        (&[text(&one), "--half", "first"], "no blocks"),
        (&[text(&empty)], "no blocks"),
        (&[text(&missing)], "missing"),
        (&["--generate", "multi-round-qa", "--rounds", "1"], "rounds"),
        (&["--generate", "ten-stage", "--skew", "2"], "skew"),
        (&[], "TRACE"),
    ] {
        let answer = ritornello(&[&["simulate"], words].concat());
        assert_eq!(answer.code, 2, "{words:?}: {}", answer.out);
        assert!(answer.err.contains(says), "{words:?}: {}", answer.err);
    }
}

#[test]
fn pipeline_prints_model_figures_of_given_machine() {
    let dir = scratch();
    let chart = dir.path().join("bubbles.svg");
    let words = ["simulate", "pipeline", "--tokens", "32768", "--hit-rate", "50%,90%"];
    let machine = ["--tflops", "550", "--half-rate-tokens", "500", "--link-gbs", "55"];
    let disk = ["--disk-gbs", "25", "--copies-gbs", "25"];
    let words = [&words[..], &machine, &disk].concat();
    let answer = ritornello(&[&words[..], &["--chart", text(&chart)]].concat());
    assert_eq!(answer.code, 0, "{}", answer.err);
    for word in ["362.6 (154.6)", "212.8 (4.8)", "1364.0 ms (model)", "none", "model: TTFT"] {
        assert!(answer.out.contains(word), "{word}: {}", answer.out);
    }
    let svg = std::fs::read_to_string(&chart).unwrap();
    for word in ["model: bubble in ms, 32,768 tokens", "HBM-DRAM", "disk, layered"] {
        assert!(svg.contains(word), "{word}");
    }
    let json = ritornello(&[&words[..], &["--json"]].concat()).json();
    assert_eq!((&json["kind"], json["rows"].as_array().unwrap().len()), (&"model".into(), 8));
    let [host, copies] = [&json["media"][0], &json["media"][1]];
    assert_eq!(host["medium"], "hbm-dram");
    assert!(host["model_crossover_hit_rate"].as_f64().unwrap() > 0.9);
    assert!(copies["model_crossover_hit_rate"].is_null());
    for part in [&json["rows"][0], host] {
        let keys = part.as_object().unwrap().keys();
        let given = ["tokens", "medium", "hit_rate"];
        let unnamed = keys.filter(|key| !given.contains(&key.as_str()));
        assert!(unnamed.clone().all(|key| key.starts_with("model_")), "{part}");
    }
}

#[test]
fn pipeline_compares_each_published_row() {
    let answer = ritornello(&["simulate", "pipeline", "--published"]);
    assert_eq!(answer.code, 0, "{}", answer.err);
    let json = ritornello(&["simulate", "pipeline", "--published", "--json"]).json();
    let rows = json["published"].as_array().unwrap();
    assert_eq!(rows.len(), 11);
    for row in rows {
        assert!(answer.out.contains(row["figure"].as_str().unwrap()), "{row}: {}", answer.out);
        assert!(row["reproduced"].is_boolean() && row["model"].is_number(), "{row}");
    }
}

#[test]
fn pipeline_explains_invalid_arguments_in_first_line() {
    for (words, says) in [
        (&["--disk-gbs", "0"][..], "a number from 0.001"),
        (&["--tflops", "fast"], "a number from"),
        (&["--link-gbs", "NaN"], "a number from"),
        (&["--half-rate-tokens", "9000"], "to 8192"),
        (&["--hit-rate", "100%"], "below 100%"),
        (&["--tokens", "1"], "1 is not in 2.."),
        (&["--shape", "gpt"], "gpt"),
        (&["--chart", "bubbles.png"], ".svg"),
        (&["--published", "--tokens", "8192"], "--published"),
        (&["--policy", "lru"], "--policy"),
    ] {
        let answer = ritornello(&[&["simulate", "pipeline"], words].concat());
        assert_eq!(answer.code, 2, "{words:?}: {}", answer.out);
        let line = answer.err.lines().next().unwrap();
        assert!(line.starts_with("error: ") && line.contains(says), "{words:?}: {}", answer.err);
    }
}
