//! Help, invalid arguments, `RITORNELLO_LOG`, and directories without a store.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{ritornello, scratch, text};
use serde_json::{Value, json};
use std::process::Command;

#[test]
fn help_has_examples_and_json() {
    for words in [
        &[][..],
        &["stat"],
        &["explain"],
        &["fsck"],
        &["doctor"],
        &["bench"],
        &["bench", "store"],
        &["serve"],
        &["resize"],
        &["paths"],
        &["paths", "restore"],
        &["convert-index"],
        &["destroy"],
        &["simulate"],
        &["simulate", "pipeline"],
        &["soak"],
        &["top"],
        &["remote"],
        &["remote", "gc"],
        &["bench", "remote"],
    ] {
        let answer = ritornello(&[words, &["--help"]].concat());
        assert_eq!(answer.code, 0, "{}", answer.err);
        assert!(answer.out.contains("Examples:"), "{words:?}");
        assert!(answer.out.contains("ritornello "), "{words:?}");
        assert!(answer.out.contains("--json"), "{words:?}");
    }
    let top = ritornello(&["--help"]).out;
    for code in ["0  ", "1  ", "2  ", "3  "] {
        assert!(top.contains(code), "{top}");
    }
    assert_eq!(ritornello(&["--version"]).code, 0);
}

#[test]
fn invalid_arguments_exit_with_2() {
    for words in [&["frobnicate"][..], &["stat"], &["bench", "store", "--shape", "gpt"], &[]] {
        let answer = ritornello(words);
        assert_eq!(answer.code, 2, "{words:?}");
        assert!(answer.out.is_empty() && !answer.err.is_empty(), "{words:?}");
    }
    let answer = ritornello(&["bench", "store", "--total", "2G"]);
    assert_eq!(answer.code, 2);
    assert!(answer.err.contains("2GiB"), "{}", answer.err);
    let answer = ritornello(&["bench", "store", "--shape", "custom"]);
    assert_eq!((answer.code, answer.err.contains("--page-bytes")), (2, true), "{}", answer.err);
}

#[test]
fn log_variable_chooses_levels() {
    let dir = scratch();
    let path = dir.path().to_str().unwrap();
    common::filled(dir.path());
    let log = |levels: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ritornello"));
        let output = command.args(["fsck", path]).env("RITORNELLO_LOG", levels).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(log("warn"), "");
    assert!(log("info").contains("the store is open"));
    assert!(log("warn,ritornello_node=info").contains("the store is open"));
    for (value, word) in
        [("ritornello_node=loud", "ritornello_node=loud"), ("info,jsno", "jsno"), ("loud", "loud")]
    {
        let malformed = log(value);
        assert!(malformed.contains(&format!("RITORNELLO_LOG={value} was ignored")), "{malformed}");
        assert!(malformed.contains(&format!("because of \"{word}\"")), "{malformed}");
    }
    assert!(log("info,").contains("the store is open"));
    assert_eq!((log("json"), log(" Warn, JSON ,")), (String::new(), String::new()));
    let lines = log("JSON,info");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let opened = lines.iter().find(|line| line["message"] == "the store is open").unwrap();
    assert_eq!(
        (&opened["level"], &opened["target"]),
        (&json!("INFO"), &json!("ritornello_node::node"))
    );
    assert!(opened["timestamp"].is_string(), "{opened}");
}

#[test]
fn directory_without_store_is_refused_unchanged() {
    let dir = scratch();
    let (missing, file) = (dir.path().join("missing"), dir.path().join("file"));
    std::fs::write(&file, b"x").unwrap();
    let other = dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("photo.jpg"), b"x").unwrap();
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    for command in ["stat", "fsck", "top"] {
        for path in [&missing, &file, &other, &empty] {
            let answer = ritornello(&[command, text(path)]);
            assert_eq!(answer.code, 2, "{command} {path:?}");
            assert!(answer.err.starts_with("error: "), "{}", answer.err);
            let answer = ritornello(&[command, text(path), "--json"]);
            assert_eq!(answer.json()["status"], 2, "{command} {path:?}");
        }
    }
    assert!(!missing.exists());
    assert_eq!(std::fs::read_dir(&empty).unwrap().count(), 0);
    assert_eq!(std::fs::read_dir(&other).unwrap().count(), 1);
    assert_eq!(ritornello(&["doctor", text(&missing)]).code, 2);
}
