//! Runs the conformance suite, `crates/index/src/conformance.rs`, on every index backend.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_index::conformance::{self, PersistentIndex};
use ritornello_index::{MemoryIndex, PrefixIndex, RunIndex, RunOptions};
use ritornello_medium::SimDisk;
use std::path::Path;
use std::sync::Arc;

#[test]
fn memory_index_conforms() {
    conformance::run_all(&|| Box::new(MemoryIndex::new()));
}

#[test]
fn run_index_conforms() {
    conformance::run_all(&|| {
        let disk = Arc::new(SimDisk::new(1 << 30));
        Box::new(RunIndex::open(disk, Path::new("/index"), RunOptions::default()).unwrap())
    });
}

#[test]
fn run_index_conforms_after_power_loss() {
    let open = |disk: &SimDisk| -> Box<dyn PrefixIndex> {
        let disk = Arc::new(disk.clone());
        Box::new(RunIndex::open(disk, Path::new("/index"), RunOptions::default()).unwrap())
    };
    conformance::run_durable(&|| {
        let disk = SimDisk::new(1 << 30);
        let lost = disk.clone();
        let after_power_loss = Box::new(move || open(&lost.crash(1)));
        PersistentIndex { index: open(&disk), after_power_loss }
    });
}

#[test]
fn art_index_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let count = std::cell::Cell::new(0);
    conformance::run_all(&|| {
        let number = count.replace(count.get() + 1);
        let options = ritornello_index::ArtOptions::default();
        let dir = dir.path().join(number.to_string());
        Box::new(ritornello_index::ArtIndex::open(&dir, options).unwrap())
    });
}

#[cfg(feature = "lsm")]
#[test]
fn lsm_index_conforms() {
    use ritornello_index::lsm::{LsmIndex, LsmOptions, ProbeMethod};
    let dir = tempfile::tempdir().unwrap();
    let made = std::cell::Cell::new(0);
    for probe in [ProbeMethod::Bisect, ProbeMethod::Scan] {
        conformance::run_all(&|| {
            let dir = dir.path().join(made.replace(made.get() + 1).to_string());
            let options = LsmOptions { probe, ..LsmOptions::default() };
            Box::new(LsmIndex::open(&dir, &options).unwrap())
        });
    }
}
