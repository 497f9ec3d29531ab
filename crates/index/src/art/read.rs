//! Reads of the tree. A chunk is the value of one key with up to [`CHUNK`] page hashes of a run.

use super::key::{self, CHUNK};
use super::record::{self, Record};
use super::{ArtIndex, Retained};
use crate::{RunId, RunView};
use ritornello_format::{PageHash, PageHashes, Result, ScopeSlot};

/// Consecutive pages of a run: the run, the number of the first of these pages in the run, and the
/// number of pages.
pub(super) type PageRange = (RunId, u16, usize);

impl ArtIndex {
    /// The run's record, with the latest recency, which may not be in the tree yet. `None` if the
    /// run does not exist, or if its record is damaged.
    pub(super) fn record(&self, run: RunId) -> Result<Option<Record>> {
        let Some(value) = self.tree.get(&key::run(run))? else { return Ok(None) };
        let mut record = Record::decode(run, &value);
        match &mut record {
            Some(record) => {
                if let Some(recency) = self.touched.lock().get(&run) {
                    record.recency = record.recency.max(*recency);
                }
            }
            None => self.log_damage(run),
        }
        Ok(record)
    }

    /// The hashes of the chunk that holds page `page`. Empty if the chunk is missing or fails its
    /// checksum.
    pub(super) fn chunk(&self, scope: ScopeSlot, run: RunId, page: usize) -> Result<Vec<PageHash>> {
        let key = key::chunk(scope, run, page);
        let Some(value) = self.tree.get(&key)? else { return Ok(Vec::new()) };
        Ok(record::decode_chunk(&key, &value).unwrap_or_else(|| {
            self.log_damage(run);
            Vec::new()
        }))
    }

    /// The hashes of a run, chunk by chunk; `None` if a chunk is missing or damaged.
    pub(super) fn pages(&self, run: RunId, record: &Record) -> Result<Option<Vec<PageHash>>> {
        let mut pages = Vec::with_capacity(usize::from(record.pages));
        if usize::from(record.pages) <= CHUNK {
            pages = self.chunk(record.scope, run, 0)?;
        } else {
            for entry in self.tree.scan(&key::chunks(record.scope, run)) {
                let (key, value) = entry?;
                let first = key::parse_chunk(&key).map(|(_, _, first)| first);
                match record::decode_chunk(&key, &value) {
                    Some(more) if first == Some(pages.len()) => pages.extend(more),
                    _ => break,
                }
            }
        }
        pages.truncate(usize::from(record.pages));
        Ok((pages.len() == usize::from(record.pages)).then_some(pages))
    }

    /// Returns the run and page number that the tree names for a hash, and the run's record. Does
    /// not check that the run has this hash at this page. Returns `None` if the tree names no
    /// position, or names a run or page that does not exist.
    fn hint(&self, scope: ScopeSlot, hash: PageHash) -> Result<Option<(RunId, u16, Record)>> {
        if hash == PageHash::NONE {
            return Ok(None);
        }
        let entry = self.tree.get(&key::page(scope, hash))?;
        let Some((run, page)) = entry.and_then(|value| record::decode_entry(&value)) else {
            return Ok(None);
        };
        let record = self.record(run)?;
        Ok(record
            .filter(|record| record.scope == scope && page < record.pages)
            .map(|record| (run, page, record)))
    }

    /// The run and number of a page, verified against the run's hashes.
    pub(super) fn find(
        &self,
        scope: ScopeSlot,
        hash: PageHash,
    ) -> Result<Option<(RunId, u16, Record)>> {
        let Some((run, page, record)) = self.hint(scope, hash)? else { return Ok(None) };
        let is = if page + 1 == record.pages {
            record.last == hash
        } else {
            let chunk = self.chunk(scope, run, usize::from(page))?;
            chunk.get(usize::from(page) % CHUNK) == Some(&hash)
        };
        Ok(is.then_some((run, page, record)))
    }

    /// Matches the keys starting at `at` with the run that the tree names for the first of them.
    /// `skip`: see [`ArtIndex::along`].
    ///
    /// In a chained scope a hash commits to all pages before it. If the run's last page matches the
    /// key at its position, the whole run therefore matches, and the run's record, which has the
    /// last hash, suffices. Otherwise pages are compared one by one.
    pub(super) fn match_run(
        &self,
        scope: ScopeSlot,
        keys: &dyn PageHashes,
        at: usize,
        skip: bool,
    ) -> Result<Option<PageRange>> {
        let Some((run, page, record)) = self.hint(scope, keys.at(at))? else { return Ok(None) };
        let left = usize::from(record.pages - page);
        if skip
            && record.chained
            && left <= keys.len() - at
            && keys.at(at + left - 1) == record.last
        {
            return Ok(Some((run, page, left)));
        }
        let mut common = 0;
        let span = left.min(keys.len() - at);
        let mut compare = |pages: &[PageHash]| {
            let from = common;
            let same = |(offset, page): (usize, &PageHash)| {
                from + offset < span && *page == keys.at(at + from + offset)
            };
            common += pages.iter().enumerate().take_while(|it| same(*it)).count();
            common == from + pages.len()
        };
        if skip {
            let mut next = usize::from(page);
            while next < usize::from(record.pages) {
                let chunk = self.chunk(scope, run, next)?;
                let rest = chunk.get(next % CHUNK..).unwrap_or_default();
                if rest.is_empty() || !compare(rest) {
                    break;
                }
                next += rest.len();
            }
        } else if let Some(pages) = self.scanned(scope, run, usize::from(page))? {
            compare(&pages[..left.min(pages.len())]);
        }
        Ok((common > 0).then_some((run, page, common)))
    }

    /// The pages of a run starting at page `from`, by a range read; `None` if a chunk is damaged,
    /// or the run has no page `from`.
    fn scanned(&self, scope: ScopeSlot, run: RunId, from: usize) -> Result<Option<Vec<PageHash>>> {
        let mut pages = Vec::new();
        for entry in self.tree.scan(&key::chunks(scope, run)) {
            let (key, value) = entry?;
            let Some(chunk) = record::decode_chunk(&key, &value) else { return Ok(None) };
            pages.extend(chunk);
        }
        Ok((from < pages.len()).then(|| pages.split_off(from)))
    }

    /// Matches the keys run by run, calls `visit` with each match and its position in the keys, and
    /// returns the number of keys matched. With `skip`, reads only the record of a chained run that
    /// matches as a whole. Without `skip`, reads the hashes of every run, by range reads.
    pub(super) fn along(
        &self,
        scope: ScopeSlot,
        keys: &dyn PageHashes,
        skip: bool,
        mut visit: impl FnMut(PageRange, usize),
    ) -> usize {
        let mut at = 0;
        while at < keys.len() {
            let match_run = self.match_run(scope, keys, at, skip);
            let Some(match_run) = self.or_miss(match_run).flatten() else { break };
            visit(match_run, at);
            at += match_run.2;
        }
        at
    }

    pub(super) fn children(&self, run: RunId) -> Result<Vec<(RunId, u32)>> {
        let mut children = Vec::new();
        for entry in self.tree.scan(&key::children(run)) {
            let (key, value) = entry?;
            if let Some([page]) = record::decode_numbers(&key, &value) {
                children.push((key::run_at_end(&key), page as u32));
            }
        }
        Ok(children)
    }

    pub(super) fn view(&self, run: RunId) -> Result<Option<RunView>> {
        let Some(record) = self.record(run)? else { return Ok(None) };
        let Some(pages) = self.pages(run, &record)? else { return Ok(None) };
        Ok(Some(RunView {
            scope: record.scope,
            chained: record.chained,
            parent: record.parent,
            pages,
            place: record.place,
            recency: record.recency,
            retain_until: self.retained.lock().until(run),
        }))
    }

    /// Returns the runs with the lowest numbers above `from`, ascending, at most 1,024. Empty if no
    /// run has a number above `from`.
    pub(super) fn runs_from(&self, from: u64) -> Result<Vec<RunId>> {
        const BATCH: usize = 1024;
        let start = key::run(RunId(from));
        let runs = self.tree.keys_after(key::RUNS, &start, BATCH)?;
        Ok(runs.iter().map(|key| key::run_at_end(key)).collect())
    }
}

impl Retained {
    pub(super) fn until(&self, run: RunId) -> u64 {
        self.runs.get(&run).copied().unwrap_or_default()
    }
}
