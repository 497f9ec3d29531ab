//! `top` without a terminal, and `stat` and `top` of a store with an owner.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{PAGES, keys, open_filled, ritornello, scope, scratch, text};
use std::time::Duration;

/// `top` and `stat` must not need the manifest or the scopes of an owned store, because these files
/// may be damaged, or on a disk that hangs.
#[test]
fn top_and_stat_of_owned_store_need_no_manifest_or_scopes() {
    let (dir, away) = (scratch(), scratch());
    let node = open_filled(dir.path());
    let files = ["MANIFEST", "MANIFEST.copy", "SCOPES"];
    for name in files {
        std::fs::rename(dir.path().join(name), away.path().join(name)).unwrap();
    }
    for command in ["top", "stat"] {
        let answer = ritornello(&[command, text(dir.path()), "--json"]);
        assert_eq!((answer.code, answer.err.as_str()), (0, ""), "{command}");
    }
    for name in files {
        std::fs::rename(away.path().join(name), dir.path().join(name)).unwrap();
    }
    node.close().unwrap();
}

#[test]
fn top_without_terminal_prints_one_snapshot() {
    let dir = scratch();
    let node = open_filled(dir.path());
    for words in [&["top", text(dir.path()), "--once"][..], &["top", text(dir.path())]] {
        let answer = ritornello(words);
        assert_eq!(answer.code, 0, "{}", answer.err);
        for word in ["24 pages in 3 runs", "no page probed yet", "0 leases", "quarantined"] {
            assert!(answer.out.contains(word), "{word}: {}", answer.out);
        }
    }
    node.close().unwrap();
}

#[test]
fn stat_prices_the_time_that_loads_saved() {
    let dir = scratch();
    let node = open_filled(dir.path());
    let stat = |more: &[&str]| ritornello(&[&["stat", text(dir.path())], more].concat());
    assert!(stat(&[]).out.contains("0 tokens loaded instead of computed"));
    let hours = |hours: u64| Duration::from_secs(3600 * hours);
    node.store().note_prefill_avoided(70_000, Some(hours(7)), hours(1));
    node.store().note_prefill_avoided(500, None, hours(9));
    // A call for statistics first sends to the owner the loads that this process has noted.
    node.store().stats().unwrap();
    let answer = stat(&["--gpu-hour", "2.5"]);
    assert_eq!((answer.code, answer.err.as_str()), (0, ""));
    let line = "70,500 tokens loaded instead of computed, 500 of them untimed; estimate: 7.0 h of \
                prefill less 1.0 h of loads is 6.0 h; at 2.5 per hour about 15.00 (estimate)";
    assert!(answer.out.contains(line), "{}", answer.out);
    let json = stat(&["--gpu-hour", "2.5", "--json"]).json();
    assert_eq!(json["savings"]["estimated_money"], 15.0);
    assert_eq!(json["savings"]["net_seconds"], 21_600.0);
    assert_eq!(json["counters"]["prefill_avoided_tokens"], 70_500);
    assert!(stat(&["--json"]).json()["savings"]["estimated_money"].is_null());
    let top = ritornello(&["top", text(dir.path()), "--json"]).json();
    assert_eq!(top["savings"]["avoided_tokens"], 70_500);
    for price in ["-1", "nan"] {
        let refused = stat(&[&format!("--gpu-hour={price}")]);
        assert!(refused.code == 2 && refused.err.contains("currency"), "{}", refused.err);
    }
    node.close().unwrap();
    assert!(stat(&["--gpu-hour", "2.5"]).out.contains("unknown without an owner"));
}

#[test]
fn top_reports_figures_of_owned_store() {
    let dir = scratch();
    let node = open_filled(dir.path());
    let mut keys = keys();
    keys.extend([[99; 16]; 1]);
    let keys: Vec<&[u8]> = keys.iter().map(<[u8; 16]>::as_slice).collect();
    assert_eq!(node.store().probe(&scope(), &keys).unwrap(), PAGES);
    let answer = ritornello(&["top", text(dir.path()), "--json"]);
    assert_eq!(answer.code, 0, "{}", answer.err);
    let json = answer.json();
    assert_eq!(json["hit_rate"], PAGES as f64 / (PAGES + 1) as f64);
    assert_eq!((&json["owner_pid"], &json["clients"]), (&std::process::id().into(), &0.into()));
    assert_eq!(
        (&json["tiers"][0]["tier"], &json["tiers"][0]["pages"]),
        (&"disk".into(), &24.into())
    );
    assert_eq!(json["writes"]["pages_stored"], 24);
    for field in ["allocated_bytes", "free_bytes", "limbo_bytes", "quarantined_bytes"] {
        assert!(json["space"][field].is_u64(), "{field}: {json:#}");
    }
    assert!(json["rates"].is_null());
    node.close().unwrap();
}

#[test]
fn top_leaves_empty_directory_empty() {
    let dir = scratch();
    let answer = ritornello(&["top", text(dir.path())]);
    assert_eq!(answer.code, 2, "{}", answer.out);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
