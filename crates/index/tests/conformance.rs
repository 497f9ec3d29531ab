//! Both backends pass the suite.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![cfg(not(loom))]

use ritornello_index::{MemoryIndex, RunIndex, RunOptions, conformance};
use ritornello_medium::SimDisk;
use std::path::Path;
use std::sync::Arc;

#[test]
fn memory() {
    conformance::run_all(&|| Box::new(MemoryIndex::new()));
}

#[test]
fn run() {
    conformance::run_all(&|| {
        let disk = Arc::new(SimDisk::new(1 << 30));
        Box::new(RunIndex::open(disk, Path::new("/index"), RunOptions::default()).unwrap())
    });
}
