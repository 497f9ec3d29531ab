//! `explain`: why pages of a prompt are hits or misses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{filled, keys, open_filled, ritornello, scope, scratch, snapshot, text};
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
        assert_eq!(lines[1], "keys 0 to 15: hit");
        assert!(lines[2].starts_with("keys 16 to 23: removed "), "{}", lines[2]);
        assert!(lines[2].contains("a caller deleted them"), "{}", lines[2]);
        assert!(lines[3].starts_with("key 24: not known"), "{}", lines[3]);
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
    node.close().unwrap();
}

#[test]
fn store_without_owner_is_not_owned_by_the_question() {
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
    assert!(before == snapshot(&store), "the question changed a file");
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
