//! Lives of stores in memory, whose segments are mapped.
//!
//! A simulated disk has no descriptors, so its files cannot be mapped. These lives run on the
//! machine's own tmpfs instead. There a power loss ends the store, and a copy into mapped memory
//! ends with its thread, so nothing is in flight after a kill. The remaining promise to check:
//! kills at any change of the metadata cost no flushed page.

use crate::act::Act;
use crate::common::{MIB, Open, open_on, options};
use crate::dice::Dice;
use crate::family::Family;
use crate::half::Half;
use crate::judge::stats;
use crate::kinds::{
    KINDS, NAMES, Pages, SEQUENCES, deliver, keys_of, kinds, leading, left_by_delete, present, put,
};
use parking_lot::Mutex;
use ritornello_medium::{Access, Host, Medium, MediumFile, Room};
use ritornello_store::{ClientId, Options};
use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

const LIVES: u64 = 40;
const ACTS: u64 = 120;
const CAPACITY_MIB: u64 = 32;

#[test]
fn kills_of_mapped_stores_keep_flushed_pages() {
    let shm = Path::new("/dev/shm");
    if Host.room(shm).is_ok_and(|room| room.kind == ritornello_medium::TMPFS) {
        (0..LIVES).for_each(|seed| MappedLife::new(shm, seed).live());
    } else {
        println!("skipped: /dev/shm is no tmpfs");
    }
}

/// A process on the machine's own file system that can be killed.
#[derive(Clone, Debug, Default)]
struct Process {
    /// Changes until the kill; `None` if none is planned.
    left: Arc<Mutex<Option<u64>>>,
}

impl Process {
    fn change(&self) -> io::Result<()> {
        match &mut *self.left.lock() {
            None => Ok(()),
            Some(0) => Err(io::ErrorKind::BrokenPipe.into()),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }
}

impl Medium for Process {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        Host.create_dir(path)
    }
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        if access.create {
            self.change()?;
        }
        let file = Host.open(path, access)?;
        Ok(Arc::new(ProcessFile { file, process: self.clone() }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change()?;
        Host.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.change()?;
        Host.remove(path)
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        Host.list(dir)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.change()?;
        Host.sync_dir(dir)
    }
    fn room(&self, dir: &Path) -> io::Result<Room> {
        Host.room(dir)
    }
}

#[derive(Debug)]
struct ProcessFile {
    file: Arc<dyn MediumFile>,
    process: Process,
}

impl MediumFile for ProcessFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }
    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.process.change()?;
        self.file.write_at(buffer, offset)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.process.change()?;
        self.file.sync_data()
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.process.change()?;
        self.file.allocate(length)
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.process.change()?;
        self.file.set_len(length)
    }
    fn drain(&self) -> io::Result<()> {
        self.file.drain()
    }
    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }
    fn allocated(&self) -> io::Result<u64> {
        self.file.allocated()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.descriptor()
    }
}

/// The store is never full, so flushed pages stay until they are deleted or dropped.
struct MappedLife {
    seed: u64,
    dice: Dice,
    dir: tempfile::TempDir,
    process: Process,
    least: Vec<Pages>,
    most: Vec<Pages>,
}

impl MappedLife {
    fn new(shm: &Path, seed: u64) -> Self {
        Self {
            seed,
            dice: Dice::new(seed ^ 0x3a99),
            dir: tempfile::tempdir_in(shm).unwrap(),
            process: Process::default(),
            least: vec![0; SEQUENCES],
            most: vec![0; SEQUENCES],
        }
    }

    fn open(&self) -> Open {
        let options =
            Options { background_threads: false, ..options(self.dir.path(), CAPACITY_MIB) };
        let open = open_on(Arc::new(self.process.clone()), &options).unwrap();
        assert_eq!(stats(&open).io.mode, "mapped");
        open
    }

    fn live(mut self) {
        let mut open = self.open();
        let family = Family { plain: true, never_full: true, faults: true, ..Family::default() };
        for number in 0..ACTS {
            let act = Act::pick_in(&mut self.dice, &family, false);
            let what = format!("mapped life {}, act {number}, {act:?}", self.seed);
            open = self.act(open, &act);
            let there = present(&open.store);
            for (at, &pages) in there.iter().enumerate() {
                assert_eq!(self.least[at] & !pages, 0, "{what}: flushed pages of {at} are gone");
                assert_eq!(pages & !self.most[at], 0, "{what}: pages of {at} are back");
            }
            let at = self.dice.below(SEQUENCES as u64) as usize;
            deliver(&open.store, at, there[at]);
        }
        open.close();
    }

    fn act(&mut self, open: Open, act: &Act) -> Open {
        match *act {
            Act::Put { at, pages, .. } => self.put(&open, at, pages),
            Act::Beside { at, pages, .. } => {
                self.most[at] |= leading(pages);
                let catalog = Arc::new(open.core.catalog_for(ClientId::LOCAL, ""));
                let half = Half::reserve(catalog, open.core.segments(), at, pages);
                if let Some(half) = half.map(Half::write) {
                    half.commit().unwrap();
                }
            }
            Act::Delete { at, page } => {
                let (kind, keys) = keys_of(at);
                self.least[at] &= left_by_delete(at, page);
                open.store.delete(&kind.scope, &[&keys[page]]).unwrap();
            }
            Act::DropScope { kind } => {
                open.store.drop_scope(&kinds()[kind].scope).unwrap();
                self.drop_kinds(kind..kind + 1);
            }
            Act::Clear => {
                open.store.clear().unwrap();
                self.drop_kinds(0..KINDS);
            }
            Act::Flush => {
                open.store.flush().unwrap();
                self.mark_durable(&open);
            }
            Act::Maintain => open.core.run_once(),
            Act::Reopen { .. } => {
                self.mark_durable(&open);
                open.close();
                return self.open();
            }
            // In memory every end but a close is a kill.
            Act::Kill { .. } | Act::Crash { .. } | Act::FailSync { .. } => return self.kill(open),
            _ => {}
        }
        open
    }

    fn put(&mut self, open: &Open, at: usize, pages: usize) {
        self.most[at] |= leading(pages);
        let stored = put(&open.store, at, pages, 0).unwrap().pages;
        assert_eq!(stored, pages, "not stored");
    }

    /// Kills the owner within puts and a flush.
    fn kill(&mut self, open: Open) -> Open {
        *self.process.left.lock() = Some(self.dice.below(12));
        for _ in 0..3 {
            let at = self.dice.below(SEQUENCES as u64) as usize;
            let pages = 1 + self.dice.below(keys_of(at).0.pages as u64) as usize;
            self.most[at] |= leading(pages);
            let _ = put(&open.store, at, pages, 0);
        }
        if open.store.flush().is_ok() {
            self.least = present(&open.store);
        }
        drop(open);
        self.process = Process::default();
        self.open()
    }

    fn mark_durable(&mut self, open: &Open) {
        self.least = present(&open.store);
        self.most.clone_from(&self.least);
    }

    fn drop_kinds(&mut self, kinds: std::ops::Range<usize>) {
        let sequences = kinds.start * NAMES as usize..kinds.end * NAMES as usize;
        self.least[sequences.clone()].fill(0);
        self.most[sequences].fill(0);
    }
}

const _: () = assert!(CAPACITY_MIB * MIB > 16 << 20, "more than all sequences take");
