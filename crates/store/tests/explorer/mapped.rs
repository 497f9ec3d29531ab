//! Histories of stores in memory, whose segments are mapped.
//!
//! A simulated disk has no descriptors, so its files cannot be mapped. These histories run on the
//! machine's own tmpfs instead. A store on tmpfs does not survive a power loss, and no write is in
//! flight after a kill, because a copy into mapped memory ends with its thread. The histories
//! therefore check that a kill at any change of the metadata costs no flushed page.

use crate::checker::stats;
use crate::common::{MIB, Open, open_on, options};
use crate::kinds::{
    KINDS, Pages, SEQUENCES, SEQUENCES_PER_KIND, check_get, keys_of, kinds, leading,
    left_by_delete, present_pages, put,
};
use crate::operation::Operation;
use crate::rng::Rng;
use crate::unfinished_put::UnfinishedPut;
use crate::workload::Workload;
use parking_lot::Mutex;
use ritornello_medium::{DiskChange, Host, Medium, Watch, Watched};
use ritornello_store::{ClientId, Options};
use std::io;
use std::path::Path;
use std::sync::Arc;

const HISTORIES: u64 = 40;
const OPERATIONS: u64 = 120;
const CAPACITY_MIB: u64 = 32;

#[test]
fn kills_of_mapped_stores_keep_flushed_pages() {
    let shm = Path::new("/dev/shm");
    if Host.room(shm).is_ok_and(|room| room.kind == ritornello_medium::TMPFS) {
        (0..HISTORIES).for_each(|seed| MappedHistory::new(shm, seed).run());
    } else {
        println!("skipped: /dev/shm is not a tmpfs");
    }
}

/// A process on the machine's own file system that can be killed.
#[derive(Clone, Debug, Default)]
struct Process {
    /// Number of changes of files until the kill; `None` if the history plans no kill.
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

impl Watch for Process {
    fn before(&self, change: &DiskChange<'_>) -> io::Result<()> {
        match change {
            DiskChange::Open(_, access) if !access.create => Ok(()),
            _ => self.change(),
        }
    }
}

/// A history of a store that is never full: flushed pages stay until they are deleted or dropped.
struct MappedHistory {
    seed: u64,
    rng: Rng,
    dir: tempfile::TempDir,
    process: Process,
    /// For each sequence, the pages that must be stored: flushed, and not removed since.
    least: Vec<Pages>,
    /// For each sequence, the pages that may be stored: put, and not durably removed since.
    most: Vec<Pages>,
}

impl MappedHistory {
    fn new(shm: &Path, seed: u64) -> Self {
        Self {
            seed,
            rng: Rng::new(seed ^ 0x3a99),
            dir: tempfile::tempdir_in(shm).unwrap(),
            process: Process::default(),
            least: vec![0; SEQUENCES],
            most: vec![0; SEQUENCES],
        }
    }

    fn open(&self) -> Open {
        let options =
            Options { background_threads: false, ..options(self.dir.path(), CAPACITY_MIB) };
        let medium = Watched::new(Arc::new(Host), Arc::new(self.process.clone()));
        let open = open_on(Arc::new(medium), &options).unwrap();
        assert_eq!(stats(&open).io.mode, "mapped");
        open
    }

    fn run(mut self) {
        let mut open = self.open();
        let workload =
            Workload { plain: true, never_full: true, faults: true, ..Workload::default() };
        for number in 0..OPERATIONS {
            let operation = Operation::choose_for(&mut self.rng, &workload, &[], false);
            let what = format!("mapped history {}, operation {number}, {operation:?}", self.seed);
            open = self.apply(open, &operation);
            let present = present_pages(&open.store);
            for (at, &pages) in present.iter().enumerate() {
                assert_eq!(
                    self.least[at] & !pages,
                    0,
                    "{what}: flushed pages of sequence {at} were lost"
                );
                assert_eq!(
                    pages & !self.most[at],
                    0,
                    "{what}: removed pages of sequence {at} returned"
                );
            }
            let at = self.rng.below(SEQUENCES as u64) as usize;
            check_get(&open.store, at, present[at]);
        }
        open.close();
    }

    fn apply(&mut self, open: Open, operation: &Operation) -> Open {
        match *operation {
            Operation::Put { at, pages, .. } => self.put(&open, at, pages),
            Operation::ConcurrentCommit { at, pages, .. } => {
                self.most[at] |= leading(pages);
                let catalog = Arc::new(open.core.catalog_for(ClientId::LOCAL, ""));
                let unfinished = UnfinishedPut::reserve(catalog, open.core.segments(), at, pages);
                if let Some(unfinished) = unfinished.map(UnfinishedPut::write) {
                    unfinished.commit().unwrap();
                }
            }
            Operation::Delete { at, page } => {
                let (kind, keys) = keys_of(at);
                self.least[at] &= left_by_delete(at, page);
                open.store.delete(&kind.scope, &[&keys[page]]).unwrap();
            }
            Operation::DropScope { kind } => {
                open.store.drop_scope(&kinds()[kind].scope).unwrap();
                self.drop_kinds(kind..kind + 1);
            }
            Operation::Clear => {
                open.store.clear().unwrap();
                self.drop_kinds(0..KINDS);
            }
            Operation::Flush => {
                open.store.flush().unwrap();
                self.mark_durable(&open);
            }
            Operation::Maintain => open.core.run_once(),
            Operation::Reopen { .. } => {
                self.mark_durable(&open);
                open.close();
                return self.open();
            }
            // For a store in memory every end of an owner except a close is a kill.
            Operation::Kill { .. } | Operation::Crash { .. } | Operation::FailSync { .. } => {
                return self.kill(open);
            }
            _ => {}
        }
        open
    }

    fn put(&mut self, open: &Open, at: usize, pages: usize) {
        self.most[at] |= leading(pages);
        let stored = put(&open.store, at, pages, 0).unwrap().pages;
        assert_eq!(stored, pages, "a put did not store all its pages");
    }

    /// Kills the owner within three puts and a flush, or after them.
    fn kill(&mut self, open: Open) -> Open {
        *self.process.left.lock() = Some(self.rng.below(12));
        for _ in 0..3 {
            let at = self.rng.below(SEQUENCES as u64) as usize;
            let pages = 1 + self.rng.below(keys_of(at).0.pages as u64) as usize;
            self.most[at] |= leading(pages);
            let _ = put(&open.store, at, pages, 0);
        }
        if open.store.flush().is_ok() {
            self.least = present_pages(&open.store);
        }
        drop(open);
        self.process = Process::default();
        self.open()
    }

    fn mark_durable(&mut self, open: &Open) {
        self.least = present_pages(&open.store);
        self.most.clone_from(&self.least);
    }

    fn drop_kinds(&mut self, kinds: std::ops::Range<usize>) {
        let sequences =
            kinds.start * SEQUENCES_PER_KIND as usize..kinds.end * SEQUENCES_PER_KIND as usize;
        self.least[sequences.clone()].fill(0);
        self.most[sequences].fill(0);
    }
}

const _: () = assert!(CAPACITY_MIB * MIB > 16 << 20, "the capacity must exceed all sequences");
