//! `serve` as the owner, while it waits for another owner to end, and after its path leads to
//! another store; settings that it refuses.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{PAGES, Served, filled, open_filled, options, probe, ritornello, scratch, text};
use ritornello_node::{Role, open};
use rustix::process::Signal;
use serde_json::Value;
use std::time::Duration;

#[test]
fn client_takes_over_after_serve_ends() {
    let (dir, new) = (scratch(), scratch());
    let mut served = Served::start(&new.path().join("kv"), &["--capacity", "1GiB"]);
    assert!(served.says().starts_with("ready: process "), "`serve` must create a store");
    assert_eq!(served.end(Signal::INT).0, Some(0));
    filled(dir.path());
    let mut served = Served::start(dir.path(), &["--json"]);
    let ready = served.event();
    assert_eq!(ready["event"], "ready");
    assert_eq!(ready["owner_pid"], served.child.id());
    assert_eq!(ready["capacity_bytes"], 16 << 20);
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Client);
    let stat = ritornello(&["stat", text(dir.path()), "--json"]).json();
    assert_eq!((&stat["owner_pid"], &stat["pages"]), (&ready["owner_pid"], &PAGES.into()));
    assert_eq!(stat["clients"], 1, "`stat` must not count as a client");
    let (code, said) = served.end(Signal::TERM);
    let closed: Value = serde_json::from_str(&said[0]).unwrap();
    assert_eq!((code, closed["event"].as_str()), (Some(0), Some("closed")));
    assert!(!dir.path().join("owner.sock").exists(), "an owner that closed must leave no socket");
    assert_eq!(node.ensure_owner().unwrap(), Role::Owner);
    node.close().unwrap();
    assert_eq!(probe(dir.path()), PAGES);
}

#[test]
fn waiting_serve_takes_over_closed_and_killed_owner() {
    let dir = scratch();
    let node = open_filled(dir.path());
    let mut first = Served::start(dir.path(), &[]);
    let said = first.says();
    assert!(said.starts_with(&format!("waiting: process {} owns", std::process::id())), "{said}");
    let refused = ritornello(&["serve", text(dir.path()), "--must-own"]);
    assert_eq!(refused.code, 2, "{}", refused.err);
    assert!(refused.err.contains(&format!("process {} owns", std::process::id())));
    node.close().unwrap();
    assert!(first.says().starts_with("ready"));
    let mut second = Served::start(dir.path(), &[]);
    assert!(second.says().contains(&format!("waiting: process {} owns", first.child.id())));
    first.signal(Signal::KILL);
    first.child.wait().unwrap();
    assert!(second.says().starts_with("ready"));
    assert_eq!(probe(dir.path()), PAGES);
    assert_eq!(second.end(Signal::TERM), (Some(0), vec![format!("closed: {}", text(dir.path()))]));
}

#[test]
fn invalid_serve_arguments_are_refused() {
    let dir = scratch();
    let answer = ritornello(&["serve", text(dir.path())]);
    assert_eq!(answer.code, 2);
    assert!(answer.err.contains("capacity"), "{}", answer.err);
    for more in [["--index", "btree"], ["--durability", "often"], ["--codec", "gif"]] {
        let words = ["serve", text(dir.path()), "--capacity", "16MiB"];
        assert_eq!(ritornello(&[&words[..], &more].concat()).code, 2, "{more:?}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn serve_waits_while_its_path_is_missing_briefly() {
    let root = scratch();
    let [dir, next, away] = ["kv", "next", "away"].map(|name| root.path().join(name));
    let mut first = Served::start(&dir, &["--capacity", "1GiB"]);
    assert!(first.says().starts_with("ready"));
    let mut second = Served::start(&dir, &["--json"]);
    assert_eq!(second.event()["event"], "waiting");
    std::fs::rename(&dir, &away).unwrap();
    first.signal(Signal::KILL);
    first.child.wait().unwrap();
    // `serve` tries every 100 ms to take over, and fails while its path is missing.
    std::thread::sleep(Duration::from_millis(500));
    filled(&next);
    std::fs::rename(&next, &dir).unwrap();
    assert_eq!(second.event()["event"], "reopening");
    assert_eq!(second.event()["event"], "ready");
    assert_eq!(probe(&dir), PAGES);
    assert_eq!(second.end(Signal::TERM).0, Some(0));
}

#[test]
fn serve_opens_store_moved_to_its_path() {
    for waits in [false, true] {
        let root = scratch();
        let [dir, next, away] = ["kv", "next", "away"].map(|name| root.path().join(name));
        let owner = open(&options(&dir)).unwrap();
        if !waits {
            owner.close().unwrap();
        }
        let mut served = Served::start(&dir, &["--json"]);
        let mut event = || served.event();
        assert_eq!(event()["event"], if waits { "waiting" } else { "ready" });
        filled(&next);
        std::fs::rename(&dir, &away).unwrap();
        std::fs::rename(&next, &dir).unwrap();
        let mut reopening = event();
        if waits && reopening["event"] == "ready" {
            // The owner closed the moved store before `serve` noticed the changed path. `serve` has
            // become the owner of the moved store, and prints `reopening` when it leaves this
            // store.
            reopening = event();
        }
        assert_eq!(reopening["event"], "reopening", "{reopening}");
        assert_eq!(reopening["dir"], text(&dir));
        let ready = event();
        assert_eq!(ready["event"], "ready", "{ready}");
        assert_eq!(probe(&dir), PAGES, "`serve` must open the store at the path");
        assert_eq!(served.end(Signal::TERM).0, Some(0));
        drop(owner);
        assert!(
            open(&options(&away)).is_ok(),
            "`serve` must have closed the store that was moved away"
        );
    }
}

#[test]
fn serve_retries_until_path_can_be_opened() {
    let root = scratch();
    let [dir, next, away] = ["kv", "next", "away"].map(|name| root.path().join(name));
    open(&options(&dir)).unwrap().close().unwrap();
    let mut served = Served::start(&dir, &["--must-own"]);
    assert!(served.says().starts_with("ready"));
    filled(&next);
    std::fs::write(next.join("policy.toml"), "permit_all = true").unwrap();
    std::fs::rename(&dir, &away).unwrap();
    std::fs::rename(&next, &dir).unwrap();
    assert!(served.says().starts_with("reopening: "));
    let said = served.says();
    assert!(said.contains("cannot be opened yet") && said.contains("permit_all"), "{said}");
    std::fs::remove_file(dir.join("policy.toml")).unwrap();
    assert!(served.says().starts_with("ready"));
    assert_eq!(served.end(Signal::TERM), (Some(0), vec![format!("closed: {}", text(&dir))]));
    assert_eq!(probe(&dir), PAGES);
}
