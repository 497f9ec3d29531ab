//! The command `soak`: two short runs, and an index that it refuses.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{ritornello, scratch, text};
use ritornello_store::IndexKind;

#[test]
fn short_soak_passes_and_leaves_no_files() {
    let dir = scratch();
    let words =
        ["soak", "--minutes", "0.1", "--capacity", "64MiB", "--seed", "3", "--json", "--index"];
    let index = common::index().map_or("run", IndexKind::word);
    let answer = ritornello(&[&words[..], &[index, "--dir", text(dir.path())]].concat());
    assert_eq!(answer.code, 0, "{}", answer.err);
    let report = answer.json();
    let number = |name: &str| report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report}"));
    assert_eq!((number("wrong_bytes"), number("damaged_pages")), (0, 0));
    assert!(number("operations") > 100 && number("bytes") > 1 << 20, "{report}");
    assert!(number("restarts") >= 4 && number("kills") >= 2, "{report}");
    assert!(number("changes") > 0, "{report}");
    assert_eq!((number("fd_growth"), number("thread_growth")), (0, 0), "{report}");
    assert!(report["memory_growth_bytes"].is_u64());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Runs with the index `run` only: on a busy machine RocksDB opens too slowly. The tests of the
/// crate `store` cover the index `lsm`.
#[test]
fn clients_recover_from_every_fault() {
    let dir = scratch();
    let words = ["soak", "--faults", "--minutes", "0.01", "--within", "100", "--json", "--dir"];
    let answer = ritornello(&[&words[..], &[text(dir.path())]].concat());
    assert_eq!(answer.code, 0, "{}\n{}", answer.out, answer.err);
    let report = answer.json();
    let number = |name: &str| report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report}"));
    assert_eq!((number("wrong_bytes"), number("lost"), number("late")), (0, 0, 0), "{report}");
    let outcomes = report["outcomes"].as_array().unwrap();
    assert!(outcomes.iter().all(|outcome| outcome["times"].as_u64() == Some(1)), "{report}");
    assert!(number("rounds") > 100 && number("looked_for") > 100, "{report}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn unknown_index_lists_compiled_indexes() {
    let answer = ritornello(&["soak", "--index", "cuckoo"]);
    assert_eq!(answer.code, 2, "{}", answer.err);
    for kind in IndexKind::ALL {
        assert!(answer.err.contains(kind.word()), "{}", answer.err);
    }
    assert!(answer.err.contains("cuckoo"), "{}", answer.err);
}
