//! The limit of open files. A separate test binary, because the limit is per process.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_store::{CapacityChange, Options};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;

/// Soft limit of open files: fewer than the store has segments, more than this process has open.
const SOFT_LIMIT: u64 = 64;
const SEGMENTS: u64 = 160;

fn set(limit: Rlimit) {
    setrlimit(Resource::Nofile, limit).unwrap();
}

fn warned(open: &Open) -> String {
    open.core.segments().report().warnings.join("\n")
}

#[test]
fn open_file_limit_is_raised_as_needed() {
    let limit = getrlimit(Resource::Nofile);
    let dir = tempfile::tempdir().unwrap();
    set(Rlimit { current: Some(SOFT_LIMIT), ..limit });
    let small = Options { background_threads: false, ..options(dir.path(), 8) };
    let open = open_on(Arc::new(ritornello_medium::Host), &small).unwrap();
    let raised = getrlimit(Resource::Nofile).current.unwrap();
    assert!(raised > SOFT_LIMIT, "the limit is {raised} at open");

    // A change of the capacity raises the limit for the store's segments.
    set(Rlimit { current: Some(SOFT_LIMIT), ..limit });
    open.store.change_capacity(&CapacityChange::Capacity(SEGMENTS * MIB)).unwrap();
    for name in 0..SEGMENTS - 16 {
        let outcome = put(&open.store, &chained(65_536), &sequence(name, 15), None);
        assert_eq!(outcome.pages, 15, "put {name}: {outcome:?}");
    }
    let segments = open.store.stats().unwrap().catalog.segments;
    assert!(segments > SOFT_LIMIT, "{segments} segments");
    assert_eq!(warned(&open).matches("may open").count(), 0, "{}", warned(&open));
    open.close();

    // An opening does not lower the limit.
    set(limit);
    let open = open_on(Arc::new(ritornello_medium::Host), &Options::new(dir.path())).unwrap();
    assert!(getrlimit(Resource::Nofile).current >= limit.current, "the limit was lowered");
    open.close();

    // This check is the last, because only root can raise a hard limit again.
    set(Rlimit { current: Some(SOFT_LIMIT), maximum: Some(512) });
    let open = open_on(Arc::new(ritornello_medium::Host), &Options::new(dir.path())).unwrap();
    assert_eq!(getrlimit(Resource::Nofile).current, Some(512));
    let warning = warned(&open);
    assert!(
        warning.contains("may open 512 files") && warning.contains("LimitNOFILE="),
        "{warning}"
    );
    open.close();
}
