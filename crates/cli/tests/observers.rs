//! `stat` and `top` of a store without an owner, and of a store whose owner was killed, is stopped
//! (SIGSTOP) or starts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{PAGES, Served, filled, index, probe, ritornello, scratch, snapshot, text};
use ritornello_store::IndexKind;
use rustix::process::Signal;
use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

const UNOWNED: &str = "no process owns this store; read from its manifest and checkpoint";

/// Asserts that `stat` reads a store that no process owns, that `top` refuses it, and that neither
/// changes a file. Returns the report of `stat`.
fn read_unowned(dir: &Path) -> serde_json::Value {
    let before = snapshot(dir);
    let answer = ritornello(&["stat", text(dir), "--json"]);
    assert_eq!(answer.code, 0, "{}", answer.err);
    let people = ritornello(&["stat", text(dir)]);
    assert!(people.code == 0 && people.out.contains(UNOWNED), "{}{}", people.out, people.err);
    for more in ["--once", "--json"] {
        let top = ritornello(&["top", text(dir), more]);
        assert_eq!((top.code, top.err.contains("ritornello stat")), (2, true), "{}", top.err);
    }
    let after = snapshot(dir);
    let names = |of: &std::collections::BTreeMap<_, _>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&before), names(&after));
    for (path, found) in &before {
        assert!(after[path] == *found, "{} was changed", path.display());
    }
    answer.json()
}

#[test]
fn unowned_store_is_read_and_not_changed() {
    let dir = scratch();
    filled(dir.path());
    // An owner would change this mode to 0700, which `stat` must not do.
    set_permissions(dir.path().join("segments"), Permissions::from_mode(0o755)).unwrap();
    let stat = read_unowned(dir.path());
    // With the index `lsm`, an owner on a busy machine may close without recording a clean end.
    let is_clean = stat["clean"] == true || stat["index"] == "lsm";
    assert!(stat["owner_pid"].is_null() && is_clean, "{stat:#}");
    assert_eq!((&stat["capacity_bytes"], &stat["scopes"]), (&(16 << 20).into(), &1.into()));
    assert_eq!(stat["first_scopes"][0]["model"], "cli tests");
    assert_eq!((&stat["owner_epoch"], &stat["paths"][0]["dir"]), (&1.into(), &"segments".into()));
    assert_eq!(stat["segments"], stat["paths"][0]["segments"]);
    assert!(stat["segments"].as_u64().unwrap() > 0);
    // Read the store again without LOCK and `clients`, which a copy of a store may lack.
    std::fs::remove_file(dir.path().join("LOCK")).unwrap();
    std::fs::remove_dir(dir.path().join("clients")).unwrap();
    assert_eq!(read_unowned(dir.path())["uuid"], stat["uuid"]);
    assert_eq!(probe(dir.path()), PAGES);
}

#[test]
fn absent_directory_of_unowned_store_is_reported() {
    let (dir, second) = (scratch(), scratch());
    filled(dir.path());
    assert_eq!(ritornello(&["paths", "add", text(dir.path()), text(second.path())]).code, 0);
    std::fs::remove_file(second.path().join("VOLUME")).unwrap();
    let answer = ritornello(&["stat", text(dir.path())]);
    assert_eq!((answer.code, answer.out.contains("DEGRADED")), (1, true), "{}", answer.out);
}

#[test]
fn damage_of_unowned_store_is_reported() {
    let (dir, away) = (scratch(), scratch());
    filled(dir.path());
    let problem_with = |name: &str| {
        let answer = ritornello(&["stat", text(dir.path()), "--json"]);
        assert_eq!(answer.code, 1, "{name}: {}", answer.err);
        let stat = answer.json();
        assert!(stat["problems"][0].as_str().unwrap().contains(name), "{stat:#}");
        let people = ritornello(&["stat", text(dir.path())]);
        assert!(people.code == 1 && people.out.contains("problem"), "{}", people.out);
        stat
    };
    let (scopes, moved) = (dir.path().join("SCOPES"), away.path().join("SCOPES"));
    std::fs::rename(&scopes, &moved).unwrap();
    assert!(problem_with("SCOPES is missing")["scopes"].is_null());
    std::fs::write(&scopes, b"damaged").unwrap();
    assert!(problem_with("SCOPES")["scopes"].is_null());
    std::fs::rename(&moved, &scopes).unwrap();
    assert_eq!(ritornello(&["stat", text(dir.path())]).code, 0);
    if index().unwrap_or_default() == IndexKind::Run {
        let index = dir.path().join("index");
        std::fs::rename(&index, away.path().join("index")).unwrap();
        assert!(problem_with("index")["journal_bytes"].is_null());
        std::fs::create_dir(&index).unwrap();
        std::fs::write(index.join("checkpoint-0"), b"damaged").unwrap();
        assert!(problem_with("checkpoint")["checkpoint"].is_null());
    }
}

#[test]
fn store_of_killed_owner_is_read_and_not_changed() {
    let dir = scratch();
    filled(dir.path());
    let mut served = Served::start(dir.path(), &[]);
    assert!(served.says().starts_with("ready"));
    let stat = ritornello(&["stat", text(dir.path()), "--json"]).json();
    assert_eq!((&stat["owner_pid"], &stat["clients"]), (&served.child.id().into(), &0.into()));
    served.signal(Signal::KILL);
    served.child.wait().unwrap();
    let stat = read_unowned(dir.path());
    assert_eq!((&stat["clean"], &stat["owner_epoch"]), (&false.into(), &2.into()));
    let pid = format!("pid {}", served.child.id());
    assert!(stat["last_owner"].as_str().unwrap().ends_with(&pid), "{stat:#}");
    assert_eq!(probe(dir.path()), PAGES);
    // `probe` has opened the store, and its recovery has written a checkpoint.
    if index().unwrap_or_default() == IndexKind::Run {
        let stat = read_unowned(dir.path());
        assert_eq!(stat["checkpoint"], serde_json::json!({ "runs": 3, "pages": PAGES }));
    }
}

#[test]
fn stopped_owner_fails_commands_within_30_seconds() {
    let dir = scratch();
    filled(dir.path());
    let mut served = Served::start(dir.path(), &[]);
    assert!(served.says().starts_with("ready"));
    served.signal(Signal::STOP);
    for words in [["stat", text(dir.path())], ["top", text(dir.path())]] {
        let started = Instant::now();
        let answer = ritornello(&words);
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
        assert_eq!(answer.code, 2, "{}", answer.err);
        assert!(answer.err.contains("does not answer"), "{}", answer.err);
    }
    served.signal(Signal::CONT);
    assert_eq!(ritornello(&["stat", text(dir.path())]).code, 0);
    assert_eq!(served.end(Signal::TERM).0, Some(0));
}

#[test]
fn owner_starts_while_stat_reads_store() {
    let dir = scratch();
    filled(dir.path());
    let mut served = Served::start(dir.path(), &[]);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "`stat` found no owner in 60 s");
        let answer = ritornello(&["stat", text(dir.path()), "--json"]);
        // On a busy machine the owner may take longer to start than the command waits.
        if answer.code == 2 {
            assert!(answer.err.contains("does not "), "{}", answer.err);
            continue;
        }
        assert_eq!(answer.code, 0, "{}", answer.err);
        let owner = &answer.json()["owner_pid"];
        if *owner == served.child.id() {
            break;
        }
        assert!(owner.is_null(), "{owner}");
    }
    assert!(
        served.says().starts_with("ready"),
        "`stat` must not keep the process from becoming the owner"
    );
    assert_eq!(served.end(Signal::TERM).0, Some(0));
}
