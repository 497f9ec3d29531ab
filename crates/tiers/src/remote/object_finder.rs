//! Finds which objects of a prompt exist on a remote. Queries only objects whose existence is not
//! cached.

use super::call_executor::{CallExecutor, Operation};
use super::existence_cache::ExistenceCache;
use super::packing::{self, Form, Prompt};
use ritornello_format::Result;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum names per existence query of [`ObjectFinder::missing`] and [`ObjectFinder::present`].
const NAMES_PER_QUERY: usize = 16;

/// See the [module](self). Calls fail with `Retry` if the remote does not answer by their deadline.
#[derive(Debug)]
pub(super) struct ObjectFinder {
    executor: Arc<CallExecutor>,
    form: Form,
    /// The existence of objects, as known from earlier queries, reads and writes.
    pub(super) existence: ExistenceCache,
}

impl ObjectFinder {
    pub(super) fn new(executor: Arc<CallExecutor>, form: Form) -> Self {
        Self { executor, form, existence: ExistenceCache::default() }
    }

    /// Finds the objects that hold the leading pages. A ternary search finds the last full object,
    /// which holds a full group of pages (see `packing`); then the smaller objects after it are
    /// queried, largest first. Full objects after the first `groups_before_hole` count as missing.
    /// In an unchained scope, where each page is an object, finds the leading objects that
    /// [`present`](Self::present) reports, and ignores `groups_before_hole`.
    pub(super) fn find(
        &self,
        prompt: &Prompt<'_>,
        groups_before_hole: usize,
        deadline: Instant,
    ) -> Result<Vec<Range<usize>>> {
        if !prompt.chained {
            let present = self.present(prompt, deadline)?;
            let leading = present.into_iter().take_while(|present| *present).count();
            return Ok((0..leading).map(|page| page..page + 1).collect());
        }
        let group = prompt.group();
        let pages = prompt.keys.len();
        let name = |end: usize| prompt.object_name(self.form, &((end - 1) * group..end * group));
        // Bounds of the number of leading full objects.
        let (mut least, mut most) = (0, pages / group);
        while least < most {
            let third = (most - least).div_ceil(3);
            let (low, high) = (least + third, (least + 2 * third).min(most));
            let queried = if low == high { &[low][..] } else { &[low, high] };
            let is_before_hole = |end: &&usize| **end <= groups_before_hole;
            let names: Vec<_> = queried.iter().filter(is_before_hole).copied().map(name).collect();
            let mut exists = self.query_existence(&names, deadline)?;
            exists.resize(queried.len(), false);
            match exists.as_slice() {
                [true, true] => least = high,
                [true, false] => (least, most) = (low, high - 1),
                [true] => least = low,
                // Full objects after the first missing object do not matter, because their pages
                // cannot be used.
                _ => most = low - 1,
            }
        }
        let mut found: Vec<_> = (0..least).map(|at| at * group..(at + 1) * group).collect();
        let (mut at, mut size) = (least * group, group / 2);
        while size > 0 {
            if at + size <= pages {
                let span = at..at + size;
                if self.query_existence(&[prompt.object_name(self.form, &span)], deadline)?
                    == [true]
                {
                    at = span.end;
                    found.push(span);
                }
            }
            size /= 2;
        }
        Ok(found)
    }

    /// Returns for each page of an unchained scope whether its object exists. If a query after the
    /// first fails, or is not made because it would probably exceed `deadline`, its pages and all
    /// later pages count as missing.
    ///
    /// # Errors
    /// The error of the query about the first [`NAMES_PER_QUERY`] pages; `Retry` if the remote does
    /// not answer this query.
    pub(super) fn present(&self, prompt: &Prompt<'_>, deadline: Instant) -> Result<Vec<bool>> {
        let name = |page: usize| prompt.object_name(self.form, &(page..page + 1));
        let names: Vec<_> = (0..prompt.keys.len()).map(name).collect();
        let (mut present, mut slowest) = (Vec::with_capacity(names.len()), Duration::ZERO);
        for queried in names.chunks(NAMES_PER_QUERY) {
            let begun = Instant::now();
            // Start no query that would probably exceed the deadline, because a timeout counts as a
            // failure of the remote.
            if !present.is_empty() && begun + 2 * slowest > deadline {
                break;
            }
            match self.query_existence(queried, deadline) {
                Ok(answers) => present.extend(answers),
                Err(error) if present.is_empty() => return Err(error),
                Err(_) => break,
            }
            slowest = slowest.max(begun.elapsed());
        }
        present.resize(names.len(), false);
        Ok(present)
    }

    /// Returns the number of full objects before the first known hole. A hole is a full object that
    /// is cached as missing, or that could not be read or was rejected, and is missing when this
    /// method queries it again. The caller passes the result to [`find`](Self::find), whose ternary
    /// search could otherwise skip the hole and count pages after it.
    pub(super) fn groups_before_hole(
        &self,
        prompt: &Prompt<'_>,
        deadline: Instant,
    ) -> Result<usize> {
        let group = prompt.group();
        let mut groups_before_hole = 0;
        for end in 1..=prompt.keys.len() / group {
            let name = prompt.object_name(self.form, &((end - 1) * group..end * group));
            let exists = match self.existence.get(&name, Instant::now()) {
                None if self.existence.is_lost(&name) => {
                    self.query_existence(&[name], deadline)? == [true]
                }
                known => known != Some(false),
            };
            if !exists {
                break;
            }
            groups_before_hole += 1;
        }
        Ok(groups_before_hole)
    }

    /// Returns for each object whether it exists and is marked neither as lost nor as rejected in
    /// the [`ExistenceCache`]. Writers write all other objects again, and thus replace damaged and
    /// forged objects.
    pub(super) fn readable(&self, names: &[String], deadline: Instant) -> Result<Vec<bool>> {
        let fails =
            |name: &String| self.existence.is_lost(name) || self.existence.is_rejected(name);
        let lost: Vec<_> = names.iter().map(fails).collect();
        let queried = names.iter().zip(&lost).filter(|(_, lost)| !**lost);
        let queried: Vec<_> = queried.map(|(name, _)| name.clone()).collect();
        let mut answers = self.query_existence(&queried, deadline)?.into_iter();
        Ok(lost.into_iter().map(|lost| !lost && answers.next() == Some(true)).collect())
    }

    fn query_existence(&self, names: &[String], deadline: Instant) -> Result<Vec<bool>> {
        let now = Instant::now();
        let mut exists: Vec<_> = names.iter().map(|name| self.existence.get(name, now)).collect();
        let unknown: Vec<String> = names
            .iter()
            .zip(&exists)
            .filter(|(_, exists)| exists.is_none())
            .map(|(name, _)| name.clone())
            .collect();
        if !unknown.is_empty() {
            let queried = unknown.clone();
            let answers = self.executor.call(Operation::Exists, deadline, move |remote| {
                let names: Vec<&str> = queried.iter().map(String::as_str).collect();
                remote.exists_batch(&names).into_iter().collect::<Result<Vec<bool>>>()
            })?;
            for (name, answer) in unknown.iter().zip(&answers) {
                self.existence.record(name, *answer, now);
            }
            let mut answers = answers.into_iter();
            for exists in exists.iter_mut().filter(|exists| exists.is_none()) {
                *exists = answers.next();
            }
        }
        Ok(exists.into_iter().map(|exists| exists == Some(true)).collect())
    }

    /// Returns the first range of consecutive pages, at or after `from`, whose objects a writer
    /// must write, because they are not [`readable`](Self::readable). Further such objects may
    /// follow the range directly, because it covers at most [`NAMES_PER_QUERY`] objects. If no
    /// object is missing, this is the empty range at the end of the prompt. `from` must be the
    /// start of an object. Checks the objects in order, because `find` may skip over a missing
    /// object.
    pub(super) fn missing(
        &self,
        prompt: &Prompt<'_>,
        from: usize,
        deadline: Instant,
    ) -> Result<Range<usize>> {
        let all: Vec<_> = packing::spans(prompt.keys.len(), prompt.group())
            .filter(|span| span.start >= from)
            .collect();
        for spans in all.chunks(NAMES_PER_QUERY) {
            let names: Vec<_> =
                spans.iter().map(|span| prompt.object_name(self.form, span)).collect();
            let exists = self.readable(&names, deadline)?;
            let mut missing = spans.iter().zip(exists).skip_while(|(_, exists)| *exists);
            if let Some((first, _)) = missing.next() {
                let last = missing.take_while(|(_, exists)| !exists).last();
                return Ok(first.start..last.map_or(first.end, |(last, _)| last.end));
            }
        }
        let end = prompt.keys.len();
        Ok(end..end)
    }
}
