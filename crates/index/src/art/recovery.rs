//! Opens the index, and verifies it.
//!
//! Holt recovers its tree. A chunk is a value of the tree that holds page hashes of a run; a link
//! is a key that attaches a run to its parent (module `key`). This module reads the records of
//! runs, and with [`ArtOptions::verify`](super::ArtOptions), or if the tree lacks the entry of the
//! assigned run numbers, every chunk and every link as well. A run is valid if its record and all
//! its chunks are intact and its parent is valid. Invalid runs are removed, and so are chunks that
//! were read and belong to no run: their run was being written or removed when the process died, or
//! its record was damaged.

use super::key;
use super::record::{self, Record};
use super::tree::{self, Batch, Holt, OPS};
use super::write::Numbers;
use super::{ArtIndex, ArtOptions, ArtRecovered, Gauges, Retained};
use crate::RunId;
use parking_lot::Mutex;
use ritornello_format::{Error, PageHash, Result, ScopeSlot};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::Ordering;

/// Holt's log, in the index's directory.
const LOG: &str = "journal.wal";
/// Name of the file that marks the index as created. The file is needed because Holt treats files
/// that lost their root as a new tree.
const MADE: &str = "made";

/// Opens the index. If Holt cannot read its files, removes Holt's log and tries again; if Holt
/// still cannot read them, removes all files.
pub(super) fn open(dir: &Path, options: ArtOptions) -> Result<ArtIndex> {
    std::fs::create_dir_all(dir)?;
    let mut recovered = ArtRecovered::default();
    loop {
        let attempt = || attempt(dir, options.clone(), recovered);
        // A damaged frame may make Holt panic, because Holt's frames have no checksums.
        let error = match catch_unwind(AssertUnwindSafe(attempt)) {
            Ok(Ok(index)) => return Ok(index),
            Ok(Err(error)) if recovered.all_dropped || !tree::is_damage(&error) => {
                return Err(error);
            }
            Ok(Err(error)) => error,
            Err(_) if recovered.all_dropped => {
                return Err(Error::fatal(
                    "Holt panicked while it opened an empty directory: report this",
                ));
            }
            Err(_) => Error::fatal("Holt panicked while it opened its files"),
        };
        let what = if recovered.log_dropped { "every file" } else { "the log" };
        tracing::warn!(dir = %dir.display(), %error, "the index cannot be read: {what} is dropped");
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            if recovered.log_dropped || entry.file_name() == LOG {
                std::fs::remove_file(entry.path())?;
            }
        }
        recovered.all_dropped = recovered.log_dropped;
        recovered.log_dropped = true;
    }
}

fn attempt(dir: &Path, options: ArtOptions, recovered: ArtRecovered) -> Result<ArtIndex> {
    let index = ArtIndex {
        tree: Holt::open(dir, options.cache_bytes, options.durable).map_err(tree::error)?,
        dir: dir.to_owned(),
        numbers: Mutex::new(Numbers { next: 0, reserved: 0 }),
        touched: Mutex::default(),
        retained: Mutex::default(),
        gauges: Gauges::default(),
        recovered,
        options,
    };
    index.reconcile(recovered)
}

/// Fields of a run's record, and what [`ArtIndex::verify`] has found in the chunks and links of the
/// run: the number of pages, the number of pages that are not holes, the last hash, and whether a
/// link attaches the run to its parent.
#[derive(Debug)]
struct Found {
    scope: ScopeSlot,
    pages: usize,
    live: usize,
    last: PageHash,
    parent: Option<(RunId, u32)>,
    pages_found: usize,
    live_found: usize,
    last_found: PageHash,
    linked: bool,
}

impl Found {
    fn is_whole(&self) -> bool {
        (self.pages, self.live, self.last) == (self.pages_found, self.live_found, self.last_found)
    }
}

impl ArtIndex {
    fn reconcile(mut self, mut recovered: ArtRecovered) -> Result<Self> {
        let mut runs = HashMap::new();
        let mut invalid = Vec::new();
        for entry in self.tree.scan(key::RUNS) {
            let (key, value) = entry?;
            let run = key::run_at_end(&key);
            match Record::decode(run, &value) {
                Some(record) => drop(runs.insert(run, found(&record))),
                None => invalid.push(run),
            }
        }
        let mut leftover = Vec::new();
        let reserved = self.number_of(&key::NUMBERS)?;
        let mut last = runs.keys().chain(&invalid).map(|run| run.0).max().unwrap_or(0);
        if self.options.verify || reserved.is_none() {
            self.verify(&mut runs, &mut leftover)?;
            last = leftover.iter().map(|(_, run, _)| run.0).fold(last, u64::max);
            invalid.extend(damaged(&runs));
        }
        let next = reserved.unwrap_or(0).max(last + 1);
        *self.numbers.lock() = Numbers { next, reserved: next };
        self.gauges.runs.store(runs.len() as u64, Ordering::Relaxed);
        let pages = runs.values().map(|found| found.live as u64).sum();
        self.gauges.pages.store(pages, Ordering::Relaxed);
        *self.retained.lock() = self.read_retained()?;

        let sum: Option<[u64; 2]> = self.numbers_of(&key::SUM)?;
        let count = runs.len() as u64;
        recovered.lost = match sum {
            Some(sum) => sum != [count, self.gauges.pages.load(Ordering::Relaxed)],
            None => self.dir.join(MADE).exists(),
        };
        recovered.leftover_keys = leftover.len() as u64;
        self.remove_leftover(&leftover)?;
        self.relink(&runs)?;
        recovered.dropped_runs = self.drop_runs(&invalid, &runs)?;
        self.recovered = recovered;
        if sum.is_none() {
            let mut batch = Batch::default();
            self.put_sum(&mut batch, 0, 0);
            self.apply(&batch)?;
            self.tree.checkpoint()?;
            std::fs::write(self.dir.join(MADE), b"")?;
        }
        if recovered != ArtRecovered::default() {
            let mut batch = Batch::default();
            self.put_sum(&mut batch, 0, 0);
            self.apply(&batch)?;
            tracing::warn!(
                dir = %self.dir.display(),
                ?recovered,
                "the index was incomplete; opened with the records that could be recovered"
            );
        }
        Ok(self)
    }

    fn numbers_of<const N: usize>(&self, key: &[u8]) -> Result<Option<[u64; N]>> {
        let value = self.tree.get(key)?;
        Ok(value.and_then(|value| record::decode_numbers(key, &value)))
    }

    fn number_of(&self, key: &[u8]) -> Result<Option<u64>> {
        Ok(self.numbers_of(key)?.map(|[number]| number))
    }

    fn read_retained(&self) -> Result<Retained> {
        let clock = self.number_of(&key::CLOCK)?.unwrap_or(0);
        let mut retained = Retained { clock, ..Retained::default() };
        for entry in self.tree.scan(key::RETAINED) {
            let (key, value) = entry?;
            if let Some([until]) = record::decode_numbers(&key, &value) {
                retained.runs.insert(key::run_at_end(&key), until);
            }
        }
        Ok(retained)
    }

    /// Reads all chunks and links. Adds chunks that belong to no run to `leftover`.
    fn verify(
        &self,
        runs: &mut HashMap<RunId, Found>,
        leftover: &mut Vec<(ScopeSlot, RunId, usize)>,
    ) -> Result<()> {
        for entry in self.tree.scan(key::PAGES) {
            let (key, value) = entry?;
            let Some((scope, run, first)) = key::parse_chunk(&key) else { continue };
            match runs.get_mut(&run).filter(|found| found.scope == scope && first < found.pages) {
                Some(found) => {
                    // Chunks come in the order of their pages: after a missing or damaged chunk the
                    // run stays incomplete.
                    let chunk = record::decode_chunk(&key, &value).unwrap_or_default();
                    if first == found.pages_found {
                        found.pages_found += chunk.len();
                        found.live_found += chunk.iter().filter(|p| **p != PageHash::NONE).count();
                        found.last_found = chunk.last().copied().unwrap_or_default();
                    }
                }
                None => leftover.push((scope, run, first)),
            }
        }
        for entry in self.tree.scan(key::CHILDREN) {
            let (key, value) = entry?;
            let (child, parent) = (key::run_at_end(&key), key::parent_of(&key));
            let page = record::decode_numbers(&key, &value).map(|[page]| page as u32);
            if let (Some(found), Some(page)) = (runs.get_mut(&child), page) {
                found.linked |= found.parent == Some((parent, page));
            }
        }
        Ok(())
    }

    fn remove_leftover(&self, leftover: &[(ScopeSlot, RunId, usize)]) -> Result<()> {
        for &(scope, run, first) in leftover {
            let mut batch = Batch::default();
            for page in self.chunk(scope, run, first)? {
                self.delete_entry(&mut batch, scope, page, run)?;
            }
            batch.delete(&key::chunk(scope, run, first));
            self.apply(&batch)?;
        }
        Ok(())
    }

    /// Restores lost links, so that a removal reaches all descendants of a run. Does nothing
    /// without [`ArtOptions::verify`](super::ArtOptions).
    fn relink(&self, runs: &HashMap<RunId, Found>) -> Result<()> {
        let mut batch = Batch::default();
        for (run, found) in runs {
            if let Some((parent, page)) =
                found.parent.filter(|_| self.options.verify && !found.linked)
            {
                let key = key::child(parent, *run);
                batch.put(&key, &record::encode_numbers(&key, &[page.into()]));
            }
            if batch.len() == OPS {
                self.apply(&std::mem::take(&mut batch))?;
            }
        }
        if batch.len() > 0 { self.apply(&batch) } else { Ok(()) }
    }

    /// Drops invalid runs and their descendants. Returns their number.
    fn drop_runs(&self, invalid: &[RunId], runs: &HashMap<RunId, Found>) -> Result<u64> {
        let mut waiting = invalid.to_vec();
        let mut dropped = 0;
        while let Some(run) = waiting.pop() {
            if self.tree.get(&key::run(run))?.is_none() {
                continue;
            }
            waiting.extend(self.children(run)?.iter().map(|(child, _)| *child));
            let mut batch = Batch::default();
            batch.delete(&key::run(run));
            batch.delete(&key::retained(run));
            if let Some(found) = runs.get(&run) {
                if let Some((parent, _)) = found.parent {
                    batch.delete(&key::child(parent, run));
                }
                self.gauges.runs.fetch_sub(1, Ordering::Relaxed);
                self.gauges.pages.fetch_sub(found.live as u64, Ordering::Relaxed);
            }
            self.apply(&batch)?;
            if let Some(found) = runs.get(&run) {
                let chunks = (0..found.pages).step_by(key::CHUNK);
                let chunks: Vec<_> = chunks.map(|first| (found.scope, run, first)).collect();
                self.remove_leftover(&chunks)?;
            }
            self.retained.lock().runs.remove(&run);
            dropped += 1;
        }
        Ok(dropped)
    }
}

fn found(record: &Record) -> Found {
    Found {
        scope: record.scope,
        pages: record.pages.into(),
        live: record.live.into(),
        last: record.last,
        parent: record.parent,
        pages_found: 0,
        live_found: 0,
        last_found: PageHash::NONE,
        linked: false,
    }
}

/// The runs in `runs` whose chunks are not whole, or whose parent page does not exist.
fn damaged(runs: &HashMap<RunId, Found>) -> impl Iterator<Item = RunId> + '_ {
    let is_intact = |found: &Found| {
        let has_page = |(run, page): (RunId, u32)| {
            runs.get(&run)
                .is_some_and(|parent| parent.scope == found.scope && (page as usize) < parent.pages)
        };
        found.is_whole() && found.parent.is_none_or(has_page)
    };
    runs.iter().filter(move |(_, found)| !is_intact(found)).map(|(run, _)| *run)
}
