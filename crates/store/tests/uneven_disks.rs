//! A store on two disks of which one has no room left: the store grows on the other disk.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_medium::{Access, Medium, MediumFile, Room, SimDisk};
use ritornello_store::Options;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A simulated disk on which the file system at `/a` can be full, as `statfs` reports.
#[derive(Clone, Debug)]
struct TwoDisks {
    inner: SimDisk,
    is_full: Arc<AtomicBool>,
}

impl Medium for TwoDisks {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.inner.create_dir(path)
    }
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        self.inner.open(path, access)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.inner.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.inner.remove(path)
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.inner.list(dir)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.inner.sync_dir(dir)
    }
    fn room(&self, dir: &Path) -> io::Result<Room> {
        let room = self.inner.room(dir)?;
        let is_full = dir.ends_with("a") && self.is_full.load(Ordering::Relaxed);
        Ok(if is_full { Room { available: 0, ..room } } else { room })
    }
}

/// Returns how many segments each disk has.
fn segments(disk: &TwoDisks) -> [usize; 2] {
    ["/a", "/b"].map(|dir| {
        let names = disk.list(Path::new(dir)).unwrap();
        names.iter().filter(|name| name.to_string_lossy().starts_with("seg-")).count()
    })
}

#[test]
fn full_disk_leaves_its_share_to_the_other_disk() {
    let disk = TwoDisks { inner: SimDisk::new(256 * MIB), is_full: Arc::default() };
    let paths = vec!["/a".into(), "/b".into()];
    let options = Options { paths, ..options(Path::new("/store"), 64) };
    let open = open_on(Arc::new(disk.clone()), &options).unwrap();
    // Each segment holds three pages, and the store has at most 61 segments.
    let scope = unchained(300_000);
    let put_all = |names: std::ops::Range<u64>| {
        for name in names {
            assert_eq!(put(&open.store, &scope, &sequence(name, 8), None).pages, 8);
        }
    };
    put_all(0..2);
    let [on_a, on_b] = segments(&disk);
    assert!(on_a > 0 && on_b > 0, "{on_a} and {on_b} segments");
    disk.is_full.store(true, Ordering::Relaxed);
    put_all(2..18);
    let [still_on_a, on_b] = segments(&disk);
    assert_eq!(still_on_a, on_a);
    assert!(on_b > 35, "only {on_b} segments, little more than half of 61");
    assert_eq!(open.store.stats().unwrap().catalog.counters["evicted_pages"], 0);
    for name in 0..18 {
        assert_eq!(get(&open.store, &scope, &sequence(name, 8)).pages, 8);
    }
    open.close();
    let open = open_on(Arc::new(disk.clone()), &Options { capacity: None, ..options }).unwrap();
    assert_eq!(segments(&disk), [on_a, on_b], "the next opening must keep the segments");
    for name in 0..18 {
        assert_eq!(get(&open.store, &scope, &sequence(name, 8)).pages, 8);
    }
    open.close();
}
