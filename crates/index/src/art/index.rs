//! Changes and lookups: the implementation of [`PrefixIndex`]. Writers are serialised.

use super::ArtIndex;
use super::key::{self, CHUNK};
use super::record::{self, Record};
use super::tree::{Batch, OPS};
use crate::live_extents::held;
use crate::{IndexStats, MatchedRun, NewRun, PrefixIndex, Removed, RunId, RunView, SyncData, run};
use ritornello_format::{Error, PageHash, PageHashes, Place, Result, ScopeSlot};
use std::sync::atomic::{AtomicU64, Ordering};

impl PrefixIndex for ArtIndex {
    fn insert(&self, new: &NewRun<'_>) -> Result<RunId> {
        run::check(new)?;
        let mut numbers = self.numbers.lock();
        self.check_not_poisoned()?;
        for (at, page) in new.pages.iter().enumerate() {
            if self.find(new.scope, *page)?.is_some() {
                return Err(Error::invalid(
                    "a page is in the index already: insert only missing pages",
                )
                .with("page", at));
            }
        }
        let parent = match new.parent {
            None => None,
            Some(hash) => match self.find(new.scope, hash)? {
                Some((run, page, _)) => Some((run, u32::from(page))).filter(|_| new.chained),
                None => {
                    return Err(Error::invalid(
                        "the parent is not in the index: insert it first, or leave it out",
                    ));
                }
            },
        };
        let run = self.number(&mut numbers)?;
        let pages = new.pages.len() as u16;
        let record = Record {
            scope: new.scope,
            chained: new.chained,
            pages,
            live: pages,
            last: new.pages.last().copied().unwrap_or_default(),
            recency: new.recency,
            parent,
            place: new.place.clone(),
        };
        let value = record.encode(run)?;
        let mut batch = Batch::default();
        let mut done = Vec::new();
        for (at, chunk) in new.pages.chunks(CHUNK).enumerate() {
            if batch.len() + CHUNK + 3 > OPS {
                self.apply_or_undo(&batch, &done)?;
                done.push(std::mem::take(&mut batch));
            }
            let key = key::chunk(new.scope, run, at * CHUNK);
            batch.put(&key, &record::encode_chunk(&key, chunk));
            for (offset, page) in chunk.iter().enumerate() {
                let entry = record::encode_entry(run, (at * CHUNK + offset) as u16);
                batch.put(&key::page(new.scope, *page), &entry);
            }
        }
        if let Some((parent, page)) = parent {
            let key = key::child(parent, run);
            batch.put(&key, &record::encode_numbers(&key, &[page.into()]));
        }
        self.put_sum(&mut batch, 1, i64::from(pages));
        // The run exists as soon as its record does, so the record is in the last batch.
        batch.put(&key::run(run), &value);
        self.apply_or_undo(&batch, &done)?;
        self.gauges.runs.fetch_add(1, Ordering::Relaxed);
        self.gauges.pages.fetch_add(pages.into(), Ordering::Relaxed);
        Ok(run)
    }

    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash) {
        let _writer = self.numbers.lock();
        let find = |hash| self.or_miss(self.find(scope, hash)).flatten();
        let Some((child, 0, mut record)) = find(child) else { return };
        let Some((parent, page, _)) = find(parent) else { return };
        if child == parent
            || record.parent.is_some()
            || !record.chained
            || self.check_not_poisoned().is_err()
        {
            return;
        }
        record.parent = Some((parent, page.into()));
        let Ok(value) = record.encode(child) else { return };
        let mut batch = Batch::default();
        let key = key::child(parent, child);
        batch.put(&key, &record::encode_numbers(&key, &[page.into()]));
        batch.put(&key::run(child), &value);
        let _ = self.apply_or_poison(&batch);
    }

    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed> {
        let _writer = self.numbers.lock();
        self.cut(run, keep)
    }

    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed> {
        let _writer = self.numbers.lock();
        (0..pages.len()).flat_map(|at| self.remove_page(scope, pages.at(at))).collect()
    }

    fn drop_scope(&self, scope: ScopeSlot) -> Vec<Removed> {
        let mut removed = Vec::new();
        let mut start = key::scoped(scope).to_vec();
        loop {
            // Release the writers' lock between batches, so that inserts make progress.
            let _writer = self.numbers.lock();
            let keys = self.tree.keys_after(&key::scoped(scope), &start, 256);
            let keys = self.or_miss(keys).unwrap_or_default();
            let Some(last) = keys.last() else { return removed };
            start.clone_from(last);
            let mut runs: Vec<RunId> = keys
                .iter()
                .filter_map(|key| key::parse_chunk(key))
                .map(|(_, run, _)| run)
                .collect();
            runs.dedup();
            for run in runs {
                removed.extend(self.cut(run, 0).into_iter().map(Removed::without_hashes));
            }
        }
    }

    fn relocate(&self, run: RunId, place: &Place) -> Option<Removed> {
        let _writer = self.numbers.lock();
        let mut record = self.or_miss(self.record(run)).flatten()?;
        let pages = self.or_miss(self.pages(run, &record)).flatten()?;
        run::check_place(place, pages.len()).ok()?;
        let extents = held(&record.place, &pages, 0);
        let scope = record.scope;
        record.place = place.clone();
        let value = record.encode(run).ok()?;
        self.check_not_poisoned().ok()?;
        let mut batch = Batch::default();
        batch.put(&key::run(run), &value);
        self.apply_or_poison(&batch).ok()?;
        Some(Removed { run, scope, pages: 0, hashes: Vec::new(), whole: false, extents })
    }

    fn probe(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        self.along(scope, pages, true, |_, _| ())
    }

    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<MatchedRun> {
        let mut matched = Vec::new();
        self.along(scope, pages, true, |(run, page, count), at| {
            matched.push(MatchedRun {
                run,
                first: u32::from(page),
                pages: count as u32,
                at: at as u32,
            });
        });
        matched
    }

    fn reads_files(&self) -> bool {
        true
    }

    fn probe_methods(&self) -> &'static [&'static str] {
        &["walk", "range"]
    }

    fn probe_by(&self, method: &str, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        self.along(scope, pages, method != "range", |_, _| ())
    }

    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool> {
        (0..pages.len()).map(|at| self.locate(scope, pages.at(at)).is_some()).collect()
    }

    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)> {
        let (run, page, _) = self.or_miss(self.find(scope, page)).flatten()?;
        Some((run, u32::from(page)))
    }

    fn place(&self, run: RunId) -> Option<Place> {
        self.or_miss(self.record(run)).flatten().map(|record| record.place)
    }

    fn page(&self, run: RunId, at: u32) -> Option<PageHash> {
        let record = self.or_miss(self.record(run)).flatten()?;
        let at = usize::try_from(at).ok().filter(|at| *at < usize::from(record.pages))?;
        let chunk = self.or_miss(self.chunk(record.scope, run, at))?;
        chunk.get(at % key::CHUNK).copied().filter(|page| *page != PageHash::NONE)
    }

    fn run(&self, run: RunId) -> Option<RunView> {
        self.or_miss(self.view(run)).flatten()
    }

    fn parent(&self, run: RunId) -> Option<RunId> {
        let (parent, _) = self.or_miss(self.record(run)).flatten()?.parent?;
        Some(parent)
    }

    fn has_children(&self, run: RunId) -> bool {
        self.or_miss(self.tree.any(&key::children(run))).unwrap_or_default()
    }

    fn touch(&self, run: RunId, recency: u64) {
        let record = self.or_miss(self.record(run)).flatten();
        if record.is_some_and(|record| record.recency < recency) {
            self.touched.lock().insert(run, recency);
        }
    }

    fn retain(&self, runs: &[(RunId, u64)], clock: u64) {
        let _writer = self.numbers.lock();
        if self.check_not_poisoned().is_err() {
            return;
        }
        let clock = clock.max(self.retained.lock().clock);
        let mut batch = Batch::default();
        batch.put(&key::CLOCK, &record::encode_numbers(&key::CLOCK, &[clock]));
        for &(run, until) in runs {
            if self.or_miss(self.record(run)).flatten().is_none() {
                continue;
            }
            let key = key::retained(run);
            if until == 0 {
                self.retained.lock().runs.remove(&run);
                batch.delete(&key);
            } else {
                self.retained.lock().runs.insert(run, until);
                batch.put(&key, &record::encode_numbers(&key, &[until]));
            }
            if batch.len() == OPS && self.apply_or_poison(&std::mem::take(&mut batch)).is_err() {
                return;
            }
        }
        self.retained.lock().clock = clock;
        let _ = self.apply_or_poison(&batch);
    }

    fn clock(&self) -> u64 {
        self.retained.lock().clock
    }

    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView)) {
        let mut from = 0;
        loop {
            let batch = self.or_miss(self.runs_from(from)).unwrap_or_default();
            let Some(last) = batch.last() else { return };
            from = last.0;
            for run in batch {
                if let Some(view) = self.run(run) {
                    visit(run, view);
                }
            }
        }
    }

    fn sync_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        sync_data()?;
        {
            let _writer = self.numbers.lock();
            self.check_not_poisoned()?;
            let touched = self.touched.lock().clone();
            let runs: Vec<RunId> = touched.keys().copied().collect();
            for section in runs.chunks(OPS) {
                let mut batch = Batch::default();
                for &run in section {
                    // `record` includes the recency from `touch`, which is not in the tree yet.
                    if let Some(record) = self.record(run)? {
                        batch.put(&key::run(run), &record.encode(run)?);
                    }
                }
                self.apply_or_poison(&batch)?;
            }
            // Keep runs that were touched again during the write.
            self.touched.lock().retain(|run, recency| touched.get(run) != Some(recency));
        }
        let pending = self.gauges.pending.load(Ordering::Relaxed);
        if !self.options.durable {
            let synced = self.tree.checkpoint();
            synced.inspect_err(|_| self.gauges.poisoned.store(true, Ordering::Release))?;
            self.gauges.checkpoints.fetch_add(1, Ordering::Relaxed);
        }
        self.gauges.pending.fetch_sub(pending, Ordering::Relaxed);
        Ok(())
    }

    fn stats(&self) -> IndexStats {
        let get = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        let (mut disk_bytes, mut files) = (0, 0);
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            use std::os::unix::fs::MetadataExt;
            if let Ok(metadata) = entry.metadata() {
                disk_bytes += metadata.blocks() * 512;
                files += 1;
            }
        }
        IndexStats {
            runs: get(&self.gauges.runs),
            pages: get(&self.gauges.pages),
            memory_bytes: self.options.cache_bytes,
            memory_bytes_max: 0,
            memory_percent: 0,
            disk_bytes,
            written_bytes: get(&self.gauges.written),
            checkpoints: get(&self.gauges.checkpoints),
            pending_bytes: get(&self.gauges.pending),
            files,
        }
    }
}
