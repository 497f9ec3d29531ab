//! Power goes at any moment of any write: what comes back is a moment of the past, and not one
//! before the last sync.

#![cfg(not(loom))]
#![allow(dead_code, reason = "shared with another test")]

mod common;

use common::{Op, Pair, op, open, shape};
use parking_lot::Mutex;
use proptest::prelude::*;
use ritornello_index::PrefixIndex;
use ritornello_index::conformance::contents;
use ritornello_medium::{Access, Medium, MediumFile, Room, SimDisk};
use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

/// A disk that remembers how it would come up had the power gone before each change.
#[derive(Clone, Debug)]
struct Watched {
    disk: SimDisk,
    crashes: Arc<Mutex<Vec<SimDisk>>>,
}

#[derive(Debug)]
struct WatchedFile(Arc<dyn MediumFile>, Watched);

impl Watched {
    fn note(&self) {
        let mut crashes = self.crashes.lock();
        let seed = crashes.len() as u64;
        crashes.push(self.disk.crash(seed * 77 + 1));
        crashes.push(self.disk.crash(seed * 99 + 2));
    }
}

impl Medium for Watched {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.disk.create_dir(path)
    }
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        let file = self.disk.open(path, access)?;
        self.note();
        Ok(Arc::new(WatchedFile(file, self.clone())))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.rename(from, to)?;
        self.note();
        Ok(())
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.disk.remove(path)?;
        self.note();
        Ok(())
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.disk.list(dir)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.disk.sync_dir(dir)?;
        self.note();
        Ok(())
    }
    fn room(&self, dir: &Path) -> io::Result<Room> {
        self.disk.room(dir)
    }
}

impl MediumFile for WatchedFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }
    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_at(buffer, offset)?;
        self.1.note();
        Ok(())
    }
    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()?;
        self.1.note();
        Ok(())
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.0.allocate(length)
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)?;
        self.1.note();
        Ok(())
    }
    fn length(&self) -> io::Result<u64> {
        self.0.length()
    }
    fn allocated(&self) -> io::Result<u64> {
        self.0.allocated()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Operations that are one record of the journal, so that no moment lies within one.
fn single(op: Op) -> Op {
    match op {
        Op::Remove { scope, path, at, .. } => Op::Remove { scope, path, at, count: 1 },
        Op::RemoveScope { .. } | Op::Reopen | Op::Crash { .. } => Op::Sync,
        other => other,
    }
}

proptest! {
    #![proptest_config(common::cases(48))]
    #[test]
    fn every_moment_of_a_write_leaves_a_moment_of_the_past(
        ops in prop::collection::vec(op().prop_map(single), 1..40),
    ) {
        let crashes = Arc::new(Mutex::new(Vec::new()));
        let mut pair = Pair::on(SimDisk::new(1 << 30), |disk| {
            Arc::new(Watched { disk: disk.clone(), crashes: Arc::clone(&crashes) })
        });
        for op in &ops {
            pair.apply(op);
            // While the operation ran, the last sync was that before it.
            let mut past = pair.history.clone();
            pair.check(op);
            past.extend(pair.history.last().cloned());
            let past: Vec<_> = past.iter().map(shape).collect();
            for disk in crashes.lock().drain(..) {
                let index = open(&disk);
                prop_assert!(!index.recovered().damaged);
                let now = shape(&contents(&index));
                prop_assert!(past.contains(&now), "after {op:?}: {now:#?} of {past:#?}");
                // And it goes on from there.
                index.sync().unwrap();
                index.checkpoint().unwrap();
                drop(index);
                prop_assert_eq!(shape(&contents(&open(&disk.crash(3)))), now);
            }
        }
    }
}
