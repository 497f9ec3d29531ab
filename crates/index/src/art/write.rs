//! Batches of changes, and removals. Writers are serialised.

use super::ArtIndex;
use super::key::{self, CHUNK};
use super::record::{self, Record};
use super::tree::{Batch, OPS};
use crate::live_extents::held;
use crate::{Removed, RunId};
use ritornello_format::{Error, PageHash, Result, ScopeSlot};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of run numbers that one write to the tree marks as assigned (see [`Numbers::reserved`]).
const NUMBERS: u64 = 1 << 16;

#[derive(Debug)]
pub(super) struct Numbers {
    pub(super) next: u64,
    /// The tree records all numbers below `reserved` as assigned.
    pub(super) reserved: u64,
}

impl ArtIndex {
    /// Returns the next run number. The limit that the tree records is always above this number.
    /// After a crash no number is therefore assigned again, which matters because the tree may
    /// still hold keys of the earlier run.
    pub(super) fn number(&self, numbers: &mut Numbers) -> Result<RunId> {
        if numbers.next >= numbers.reserved {
            let reserved = numbers.next + NUMBERS;
            let mut batch = Batch::default();
            batch.put(&key::NUMBERS, &record::encode_numbers(&key::NUMBERS, &[reserved]));
            self.apply(&batch)?;
            numbers.reserved = reserved;
        }
        let run = RunId(numbers.next);
        numbers.next += 1;
        Ok(run)
    }

    pub(super) fn apply(&self, batch: &Batch) -> Result<()> {
        let bytes = self.tree.apply(batch)?;
        self.gauges.pending.fetch_add(bytes, Ordering::Relaxed);
        self.gauges.written.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Applies a batch of new keys. If the batch fails, removes its keys, and the keys of the
    /// batches `done`, which were applied before. If the removal fails too, the index is poisoned.
    pub(super) fn apply_or_undo(&self, batch: &Batch, done: &[Batch]) -> Result<()> {
        let Err(error) = self.apply(batch) else { return Ok(()) };
        for undone in std::iter::once(batch).chain(done.iter().rev()) {
            let mut undo = undone.undo(&key::SUM);
            self.put_sum(&mut undo, 0, 0);
            self.apply_or_poison(&undo)?;
        }
        Err(error)
    }

    /// Adds to the batch the total numbers of runs and pages that the index has after the batch. An
    /// open compares these numbers with the records of runs that it finds, to notice lost records.
    pub(super) fn put_sum(&self, batch: &mut Batch, runs: i64, pages: i64) {
        let add =
            |gauge: &AtomicU64, more| gauge.load(Ordering::Relaxed).saturating_add_signed(more);
        let sum = [add(&self.gauges.runs, runs), add(&self.gauges.pages, pages)];
        batch.put(&key::SUM, &record::encode_numbers(&key::SUM, &sum));
    }

    /// Applies a batch. If the batch fails, poisons the index, because a part of the batch may have
    /// been applied.
    pub(super) fn apply_or_poison(&self, batch: &Batch) -> Result<()> {
        self.apply(batch).inspect_err(|error| {
            tracing::error!(
                dir = %self.dir.display(),
                %error,
                "a change of the index failed: the index refuses changes until it is reopened"
            );
            self.gauges.poisoned.store(true, Ordering::Release);
        })
    }

    pub(super) fn check_not_poisoned(&self) -> Result<()> {
        if self.gauges.poisoned.load(Ordering::Acquire) {
            return Err(Error::fatal(
                "a change of the index failed halfway: close the store and open it again",
            ));
        }
        Ok(())
    }

    /// Truncates run `run` after `keep` pages. First removes the descendants of the pages after
    /// this cut, leaves before their parents, so that a crash leaves no page without the pages
    /// before it. Skips runs that are damaged or cannot be read. Stops if a batch cannot be
    /// applied, which poisons the index.
    pub(super) fn cut(&self, run: RunId, keep: u32) -> Vec<Removed> {
        let removals = self.or_miss(self.closure(run, keep)).unwrap_or_default();
        let mut removed = Vec::with_capacity(removals.len());
        for (run, keep) in removals.into_iter().rev() {
            if self.check_not_poisoned().is_err() {
                break;
            }
            removed.extend(self.or_miss(self.cut_one(run, keep)).flatten());
        }
        removed
    }

    /// The run, and all descendants of its pages after `keep`, each with the number of pages that
    /// it keeps, and each run after its parent.
    fn closure(&self, run: RunId, keep: u32) -> Result<Vec<(RunId, u32)>> {
        let Some(record) = self.record(run)? else { return Ok(Vec::new()) };
        if keep >= u32::from(record.pages) {
            return Ok(Vec::new());
        }
        let mut removals = vec![(run, keep)];
        let mut met = HashSet::from([run]);
        let mut at = 0;
        while record.chained && at < removals.len() {
            let (next, from) = removals[at];
            for (child, page) in self.children(next)? {
                if page < from {
                    continue;
                }
                // Every run but the first is reached once, from its single parent. If the first run
                // is reached again, it is its own descendant, which the keys of real prompts never
                // cause: the run is then removed whole, with all its children.
                if child == run && removals[0].1 > 0 {
                    removals[0].1 = 0;
                    for (child, page) in self.children(run)? {
                        if page < keep && met.insert(child) {
                            removals.push((child, 0));
                        }
                    }
                } else if met.insert(child) {
                    removals.push((child, 0));
                }
            }
            at += 1;
        }
        Ok(removals)
    }

    /// Truncates one run after `keep` pages, and returns the extents of the removed pages. Removes
    /// or changes the run's record first, after which no page after the cut exists. If the process
    /// dies before all batches are applied, keys that list these pages' hashes remain; the next
    /// open with [`ArtOptions::verify`](super::ArtOptions) removes them.
    fn cut_one(&self, run: RunId, keep: u32) -> Result<Option<Removed>> {
        let Some(mut record) = self.record(run)? else { return Ok(None) };
        let Some(pages) = self.pages(run, &record)? else { return Ok(None) };
        let tail = &pages[(keep as usize).min(pages.len())..];
        let gone = tail.iter().filter(|page| **page != PageHash::NONE).count();
        let whole = gone == usize::from(record.live);
        let keep = if whole { 0 } else { keep as usize };
        let extents = held(&record.place, &pages, keep as u32);
        let scope = record.scope;
        let mut batch = Batch::default();
        self.put_sum(&mut batch, -i64::from(whole), -(gone as i64));
        if whole {
            batch.delete(&key::run(run));
            if let Some((parent, _)) = record.parent {
                batch.delete(&key::child(parent, run));
            }
            if self.retained.lock().until(run) > 0 {
                batch.delete(&key::retained(run));
            }
        } else {
            record.place.truncate(keep as u32);
            record.live -= gone as u16;
            record.pages = keep as u16;
            record.last = pages[keep - 1];
            batch.put(&key::run(run), &record.encode(run)?);
        }
        let first = keep - keep % CHUNK;
        for (at, chunk) in pages[first..].chunks(CHUNK).enumerate() {
            if batch.len() + CHUNK + 1 > OPS {
                self.apply_or_poison(&std::mem::take(&mut batch))?;
            }
            let from = first + at * CHUNK;
            let kept = keep.saturating_sub(from);
            let key = key::chunk(scope, run, from);
            if kept > 0 {
                batch.put(&key, &record::encode_chunk(&key, &chunk[..kept]));
            } else {
                batch.delete(&key);
            }
            for page in chunk[kept..].iter().filter(|page| **page != PageHash::NONE) {
                self.delete_entry(&mut batch, scope, *page, run)?;
            }
        }
        self.apply_or_poison(&batch)?;
        if whole {
            self.touched.lock().remove(&run);
            self.retained.lock().runs.remove(&run);
            self.gauges.runs.fetch_sub(1, Ordering::Relaxed);
        }
        self.gauges.pages.fetch_sub(gone as u64, Ordering::Relaxed);
        let hashes = pages.get(keep..).unwrap_or_default().to_vec();
        Ok(Some(Removed { run, scope, pages: gone as u32, hashes, whole, extents }))
    }

    /// Deletes the entry that names a page's position, if this entry names the run `run`.
    pub(super) fn delete_entry(
        &self,
        batch: &mut Batch,
        scope: ScopeSlot,
        page: PageHash,
        run: RunId,
    ) -> Result<()> {
        let key = key::page(scope, page);
        let entry = self.tree.get(&key)?;
        if entry.and_then(|value| record::decode_entry(&value)).is_some_and(|(of, _)| of == run) {
            batch.delete(&key);
        }
        Ok(())
    }

    pub(super) fn remove_page(&self, scope: ScopeSlot, page: PageHash) -> Vec<Removed> {
        let Some((run, at, record)) = self.or_miss(self.find(scope, page)).flatten() else {
            return Vec::new();
        };
        if record.chained || record.live == 1 {
            return self.cut(run, if record.chained { at.into() } else { 0 });
        }
        self.or_miss(self.punch(run, at, record)).into_iter().collect()
    }

    fn punch(&self, run: RunId, page: u16, mut record: Record) -> Result<Removed> {
        self.check_not_poisoned()?;
        let (scope, at) = (record.scope, usize::from(page));
        let key = key::chunk(scope, run, at);
        let mut chunk = self.chunk(scope, run, at)?;
        let mut batch = Batch::default();
        record.live -= 1;
        if page + 1 == record.pages {
            record.last = PageHash::NONE;
        }
        batch.put(&key::run(run), &record.encode(run)?);
        let hash = chunk.get_mut(at % CHUNK).map(std::mem::take);
        if let Some(hash) = hash {
            batch.delete(&key::page(scope, hash));
        }
        batch.put(&key, &record::encode_chunk(&key, &chunk));
        self.put_sum(&mut batch, 0, -1);
        self.apply_or_poison(&batch)?;
        self.gauges.pages.fetch_sub(1, Ordering::Relaxed);
        let extents = record.place.page(page.into());
        let hashes = hash.into_iter().collect();
        Ok(Removed { run, scope, pages: 1, hashes, whole: false, extents })
    }
}
