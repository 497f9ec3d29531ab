//! `remote` and `doctor --backend`, on a directory and with addresses that cannot be used.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{ritornello, scratch};
use serde_json::Value;

fn address(dir: &std::path::Path) -> String {
    format!("file://{}", dir.display())
}

fn parsed(words: &[&str]) -> (i32, Value) {
    let answer = ritornello(&[words, &["--json"]].concat());
    (answer.code, serde_json::from_str(&answer.out).unwrap())
}

#[test]
fn doctor_leaves_no_objects_in_remote() {
    let dir = scratch();
    let (code, answer) = parsed(&["doctor", "--backend", &address(dir.path())]);
    assert_eq!((code, &answer["healthy"]), (0, &Value::Bool(true)), "{answer}");
    let (code, answer) = parsed(&["remote", "stat", &address(dir.path())]);
    assert_eq!(
        (code, &answer["objects"], &answer["strange"]),
        (0, &0.into(), &Value::Array(vec![]))
    );
    let answer = ritornello(&["doctor", "--backend", &address(dir.path())]);
    assert!(answer.out.contains("nothing is wrong"), "{}", answer.out);
}

#[test]
fn fsck_repair_removes_damaged_objects() {
    let dir = scratch();
    let hex = "0123456789abcdef0123456789abcdef";
    let inside = dir.path().join("ritornello/3").join(hex);
    std::fs::create_dir_all(&inside).unwrap();
    std::fs::write(inside.join(format!("{hex}.2")), b"no object").unwrap();
    std::fs::create_dir_all(dir.path().join("ritornello/7")).unwrap();
    std::fs::write(dir.path().join("ritornello/7/x"), b"newer").unwrap();
    let at = address(dir.path());
    let (_, answer) = parsed(&["remote", "stat", &at]);
    assert_eq!((&answer["objects"], &answer["pages"]), (&1.into(), &2.into()));
    assert_eq!(answer["other_versions"]["7"][0], 1);
    let (code, answer) = parsed(&["remote", "fsck", &at]);
    assert_eq!((code, &answer["clean"], &answer["removed"]), (1, &false.into(), &0.into()));
    let shown = ritornello(&["remote", "fsck", &at, "--repair"]);
    assert_eq!(shown.code, 1);
    assert!(shown.out.contains(hex) && shown.out.contains("1 objects removed"), "{}", shown.out);
    assert_eq!(parsed(&["remote", "fsck", &at]).0, 0);
}

#[test]
fn gc_keeps_to_budget_grace_and_dry_run() {
    let dir = scratch();
    let hex = "0123456789abcdef0123456789abcdef";
    let inside = dir.path().join("ritornello/3").join(hex);
    std::fs::create_dir_all(&inside).unwrap();
    std::fs::write(inside.join(format!("{hex}.1")), vec![0; 1000]).unwrap();
    let at = address(dir.path());
    let gc = |more: &[&str]| {
        parsed(&[&["remote", "gc", &at], more].concat()).1["removed_objects"].clone()
    };
    assert_eq!(gc(&["--budget", "1MiB"]), 0);
    assert_eq!(gc(&["--budget", "0B"]), 0, "an object within the grace period must stay");
    assert_eq!(gc(&["--budget", "0B", "--grace", "0s", "--dry-run"]), 1);
    assert_eq!(gc(&["--budget", "0B", "--grace", "0s"]), 1);
    assert_eq!(gc(&["--budget", "0B", "--grace", "0s"]), 0);
}

#[test]
fn invalid_address_error_shows_valid_forms() {
    for (address, told) in [
        ("bucket", "s3://bucket/prefix"),
        ("ftp://host/kv", "s3://BUCKET/PREFIX"),
        ("s3://", "name the bucket"),
        ("s3://bucket?style=round", "path (HOST/BUCKET)"),
        ("s3://bucket?endpoint=host:80", "http://"),
        ("s3://bucket?regoin=x", "region"),
        ("gs://bucket?endpoint=ftp://x", "https://"),
        ("file:///not/there", "mount or make it"),
    ] {
        let answer = ritornello(&["remote", "stat", address]);
        assert_eq!(answer.code, 2, "{address}: {}", answer.err);
        assert!(answer.err.contains(told), "{address}: {}", answer.err);
    }
    assert_eq!(ritornello(&["doctor"]).code, 2);
    assert_eq!(
        ritornello(&["remote", "gc", "memory:"]).code,
        2,
        "gc without an age or a budget must be refused"
    );
}

#[test]
fn options_and_secrets_of_addresses_are_not_printed() {
    let dir = scratch();
    let at = format!("{}?mode=shared", address(dir.path()));
    let shown = format!("{}?…", address(dir.path()));
    for words in [&["remote", "stat", &at][..], &["remote", "fsck", &at]] {
        assert_eq!(parsed(words).1["address"], shown, "{words:?}");
    }
    assert_eq!(parsed(&["doctor", "--backend", &at]).1["backend"], shown);
    for wrong in [
        "s3://bucket?password=hunter2",
        "s3://bucket?hunter2",
        "s3://bucket?timeout=hunter2",
        "s3://bucket?style=hunter2",
        "s3://bucket?anonymous=hunter2",
        "s3://bucket?endpoint=hunter2",
        "s3://bucket?endpoint=http://me:hunter2@nowhere.invalid&anonymous=true&allow_http=true",
        "s3://me:hunter2@bucket",
        "bucket?password=hunter2",
        "file:///x?mode=hunter2",
        "memory:?zstd=hunter2",
        "memory:?key=hunter2",
    ] {
        for more in [&[][..], &["--json"]] {
            let answer = ritornello(&[&["remote", "stat", wrong], more].concat());
            assert_ne!(answer.code, 0, "{wrong}");
            let said = format!("{}{}", answer.out, answer.err);
            assert!(!said.contains("hunter2"), "{wrong}: {said}");
        }
    }
}

#[test]
fn plain_http_to_another_machine_warns_once() {
    let warned = |address: &str| {
        let answer = ritornello(&["remote", "stat", address]);
        assert_ne!(answer.code, 0, "{address}");
        answer.err.matches("plain HTTP").count()
    };
    let away = "endpoint=http://nowhere.invalid:9000&anonymous=true";
    assert_eq!(warned(&format!("s3://bucket?{away}")), 1);
    assert_eq!(warned(&format!("gs://bucket?{away}")), 1);
    assert_eq!(warned(&format!("az://bucket?account=a&{away}")), 1);
    assert_eq!(warned(&format!("s3://bucket?{away}&allow_http=true")), 0);
    assert_eq!(warned("s3://bucket?endpoint=http://127.0.0.1:1&anonymous=true"), 0);
    assert_eq!(warned("s3://bucket?endpoint=https://nowhere.invalid&anonymous=true"), 0);
}
