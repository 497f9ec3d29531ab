//! `explain`: why pages of a prompt are hits or misses, and what was decided about a request.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{filled, keys, open_filled, ritornello, scope, scratch, snapshot, text};
use ritornello_store::{Decision, DecisionEstimate, DecisionOutcome};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes keys in hexadecimal digits, one per line, with an empty line at the end.
fn write_keys(path: &Path, keys: &[[u8; 16]]) {
    let lines = keys.iter().map(|key| key.iter().map(|byte| format!("{byte:02x}")).collect());
    let lines: Vec<String> = lines.collect();
    std::fs::write(path, lines.join("\n") + "\n\n").unwrap();
}

#[test]
fn each_span_of_keys_is_explained_in_one_line() {
    let dir = scratch();
    let (store, prompt) = (dir.path().join("kv"), dir.path().join("prompt"));
    let node = open_filled(&store);
    let mut asked = keys();
    node.store().delete(&scope(), &[&asked[16]]).unwrap();
    asked.push([0xEE; 16]);
    write_keys(&prompt, &asked);
    let id = scope().id().to_string();
    for scope in [&id[..], &id[..8], &id[..20].to_uppercase()] {
        let answer =
            ritornello(&["explain", text(&store), "--scope", scope, "--keys", text(&prompt)]);
        assert_eq!((answer.code, answer.err.as_str()), (0, ""), "{}", answer.out);
        let lines: Vec<&str> = answer.out.lines().collect();
        assert_eq!(lines[0], format!("scope {id}: 16 of 25 pages are hits"));
        // The tier depends on the file system of the test's directory.
        assert!(lines[1].starts_with("keys 0 to 15: hit ("), "{}", lines[1]);
        assert!(lines[2].starts_with("keys 16 to 23: removed "), "{}", lines[2]);
        assert!(lines[2].contains("a caller deleted them"), "{}", lines[2]);
        assert!(lines[3].starts_with("key 24: not stored, and no put asked "), "{}", lines[3]);
        assert!(lines[4].starts_with("the owner opened the store "), "{}", lines[4]);
        assert_eq!(lines.len(), 5, "{}", answer.out);
    }
    let words = ["explain", text(&store), "--scope", &id, "--keys", "-", "--json"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_ritornello"));
    let piped = command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    child.stdin.take().unwrap().write_all(&std::fs::read(&prompt).unwrap()).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success());
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((&json["scope"], &json["is_registered"]), (&id.as_str().into(), &true.into()));
    let words: Vec<_> = json["spans"].as_array().unwrap().iter().map(|s| &s["answer"]).collect();
    assert_eq!(words, ["hit", "removed", "unknown"]);
    assert_eq!(json["spans"][2]["detail"], "not_offered");
    let is_mapped = node.store().stats().unwrap().catalog.io.mode == "mapped";
    assert_eq!(json["spans"][0]["detail"], if is_mapped { "host" } else { "disk" });
    node.close().unwrap();
}

#[test]
fn request_is_explained_by_the_id_that_the_engine_returned() {
    let dir = scratch();
    let store = dir.path().join("kv");
    let node = open_filled(&store);
    let (id, keys) = (scope().id(), keys());
    let refs: Vec<&[u8]> = keys.iter().map(<[u8; 16]>::as_slice).collect();
    let decide = |request: &str, outcome: DecisionOutcome, loaded: u32| {
        let decision = Decision::now(request, id, outcome).with_pages(&refs);
        let times = DecisionEstimate { with_load_micros: 9_000, without_load_micros: 7_000 };
        let estimate = (outcome == DecisionOutcome::Declined).then_some(times);
        node.store().note_decision(Decision { found: 24, loaded, estimate, ..decision });
    };
    decide("chatcmpl-7-5d41402a", DecisionOutcome::Declined, 0);
    decide("chatcmpl-7-5d41402a", DecisionOutcome::Loaded, 24);
    decide("chatcmpl-8-7f2ababa", DecisionOutcome::Loaded, 24);
    // A call for statistics first sends to the owner the decisions that this process has noted.
    assert_eq!(node.store().stats().unwrap().catalog.counters["decisions_loaded"], 2);
    node.store().delete(&scope(), &[&keys[16]]).unwrap();

    let answer = ritornello(&["explain", text(&store), "--request", "chatcmpl-7"]);
    assert_eq!((answer.code, answer.err.as_str()), (0, ""), "{}", answer.out);
    let lines: Vec<&str> = answer.out.lines().collect();
    assert_eq!(lines[0], "request chatcmpl-7-5d41402a");
    assert!(lines[1].ends_with(" s ago: 24 of 24 pages found, 24 to load"), "{}", lines[1]);
    let declined = "24 of 24 pages found, none to load: the gate chose to compute them; \
                    estimated 9.0 ms with a load, 7.0 ms without";
    assert!(lines[2].ends_with(declined), "{}", lines[2]);
    assert_eq!(lines[3], format!("scope {id}: 16 of 24 pages are hits"));
    assert!(["disk", "host"].iter().any(|tier| lines[4] == format!("keys 0 to 15: hit ({tier})")));
    assert!(lines[5].starts_with("keys 16 to 23: removed "), "{}", lines[5]);
    assert!(lines[7].starts_with("the owner's memory of decisions begins "), "{}", lines[7]);
    assert_eq!(lines.len(), 8, "{}", answer.out);

    let json = ritornello(&["explain", text(&store), "--request", "chatcmpl-7", "--json"]).json();
    let [request] = &json["requests"].as_array().unwrap()[..] else { panic!("{json}") };
    assert_eq!(request["request_id"], "chatcmpl-7-5d41402a");
    assert_eq!(request["scope"], id.to_string());
    let outcomes: Vec<_> =
        request["decisions"].as_array().unwrap().iter().map(|made| &made["outcome"]).collect();
    assert_eq!(outcomes, ["loaded", "declined"]);
    assert_eq!(request["decisions"][1]["seconds_with_load"], 0.009);
    assert_eq!(request["explanation"]["spans"][1]["answer"], "removed");
    assert_eq!((&json["forgotten"], &json["dropped"]), (&0.into(), &0.into()));

    let unknown = ritornello(&["explain", text(&store), "--request", "chatcmpl-9"]);
    assert_eq!(unknown.code, 0, "{}", unknown.err);
    assert!(unknown.out.starts_with("no decision about request chatcmpl-9"), "{}", unknown.out);
    node.close().unwrap();
    let unowned = ritornello(&["explain", text(&store), "--request", "chatcmpl-7"]);
    assert_eq!((unowned.code, unowned.out.as_str()), (2, ""));
    assert!(unowned.err.contains("no process owns the store"), "{}", unowned.err);
}

#[test]
fn incomplete_or_conflicting_arguments_are_refused() {
    for (words, named) in [
        (&["explain", "/kv"][..], "--request"),
        (&["explain", "/kv", "--scope", "3f8a12bc"], "--keys"),
        (&["explain", "/kv", "--keys", "-"], "--scope"),
        (&["explain", "/kv", "--request", "r", "--keys", "-", "--scope", "3f8a12bc"], "--request"),
        (&["explain", "/kv", "--request", "r", "--scope", "3f8a12bc"], "--request"),
    ] {
        let answer = ritornello(words);
        assert_eq!((answer.code, answer.out.as_str()), (2, ""), "{words:?}: {}", answer.err);
        assert!(answer.err.contains(named), "{words:?}: {}", answer.err);
    }
}

#[test]
fn store_without_owner_is_refused_unchanged() {
    let dir = scratch();
    let (store, prompt) = (dir.path().join("kv"), dir.path().join("prompt"));
    filled(&store);
    write_keys(&prompt, &keys());
    let before = snapshot(&store);
    let id = scope().id().to_string();
    for scope in [&id[..], &id[..8]] {
        let answer =
            ritornello(&["explain", text(&store), "--scope", scope, "--keys", text(&prompt)]);
        assert_eq!((answer.code, answer.out.as_str()), (2, ""), "{}", answer.err);
        assert!(answer.err.contains("no process owns the store"), "{}", answer.err);
        assert!(answer.err.contains("ritornello serve"), "{}", answer.err);
    }
    assert_eq!(before.len(), snapshot(&store).len());
    assert!(before == snapshot(&store), "`explain` changed a file");
}

#[test]
fn unusable_arguments_are_named() {
    let dir = scratch();
    let (store, prompt) = (dir.path().join("kv"), dir.path().join("prompt"));
    let node = open_filled(&store);
    write_keys(&prompt, &keys()[..2]);
    let id = scope().id().to_string();
    let refused = |scope: &str, keys: &Path, line: &str| {
        let answer = ritornello(&["explain", text(&store), "--scope", scope, "--keys", text(keys)]);
        assert_eq!((answer.code, answer.out.as_str()), (2, ""), "{}", answer.err);
        assert!(answer.err.contains(line), "{line}: {}", answer.err);
    };
    refused("12", &prompt, "not 8 to 32 hexadecimal digits");
    refused("nonsense", &prompt, "not 8 to 32 hexadecimal digits");
    refused("0123456789", &prompt, "no id of the store's largest scopes begins with these digits");
    refused(&id, &dir.path().join("none"), "cannot be read");
    std::fs::write(&prompt, "0101010101010101\n0x01\n").unwrap();
    refused(&id, &prompt, "line 2 of the keys");
    std::fs::write(&prompt, "0101\n").unwrap();
    refused(&id, &prompt, "a page key is 8 to 64 bytes");
    let mut many: Vec<[u8; 16]> = (0..4097_u128).map(u128::to_le_bytes).collect();
    write_keys(&prompt, &many);
    refused(&id, &prompt, "more than 4,096 keys");
    std::fs::write(&prompt, "\n".repeat(2 << 20)).unwrap();
    refused(&id, &prompt, "or 1 MiB");
    many.pop();
    write_keys(&prompt, &many);
    let answer = ritornello(&["explain", text(&store), "--scope", &id, "--keys", text(&prompt)]);
    assert_eq!(answer.code, 0, "{}", answer.err);
    assert_eq!(node.store().probe(&scope(), &[&keys()[0]]).unwrap(), 1);
    node.close().unwrap();
}
