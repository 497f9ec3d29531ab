//! The tier over a remote: finds, reads and writes the pages of prompts.

use super::backend::Backend;
use super::call_executor::{CallExecutor, PendingCall, RemoteCalls};
use super::existence_cache::ExistenceCache;
use super::keyring::KeyRing;
use super::object::{self, Contents, ObjectBytes};
use super::packing::{self, Form};
use super::rejected::{RejectReason, RejectedCounters, RejectedObjects};
use ritornello_format::{Result, ScopeId, check_keys};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Objects read or written concurrently, and names per query of a writer.
const OBJECTS_AT_ONCE: usize = 4;
const NAMES_PER_QUERY: usize = 16;

/// Leading pages of a prompt in one scope, by their keys.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The scope.
    pub scope: &'a ScopeId,
    /// Bytes per page.
    pub page_bytes: u64,
    /// The key of each page.
    pub keys: &'a [&'a [u8]],
}

/// How pages are written to a remote, and which objects are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteOptions {
    /// Compresses each page with Zstandard at this level, from 1 to 19. Reading accepts any
    /// compression.
    pub zstd: Option<i32>,
    /// Seals written objects, and accepts only objects sealed with one of these keys.
    pub keys: Option<Arc<KeyRing>>,
}

impl RemoteOptions {
    /// The form of the objects that are read and written.
    #[must_use]
    pub fn form(&self) -> Form {
        if self.keys.is_some() { Form::Sealed } else { Form::Plain }
    }
}

/// Statistics of a remote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteStats {
    /// Calls of the backend.
    pub calls: RemoteCalls,
    /// Pages read and verified.
    pub pages_read: u64,
    /// Pages that were found and could not be read: removed, damaged, or timed out.
    pub pages_lost: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Pages not written because the remote had them.
    pub pages_present: u64,
    /// Pages that could not be written.
    pub pages_dropped: u64,
    /// Fetched objects that were rejected.
    pub rejected: RejectedObjects,
}

#[derive(Debug, Default)]
struct Counters {
    read: AtomicU64,
    lost: AtomicU64,
    written: AtomicU64,
    present: AtomicU64,
    dropped: AtomicU64,
    rejected: RejectedCounters,
}

/// A remote as a tier. Every call has a deadline: pages that a slow or unreachable remote does not
/// deliver in time are misses, and objects that it does not accept in time are dropped.
#[derive(Debug)]
pub struct RemoteTier {
    executor: CallExecutor,
    options: RemoteOptions,
    existence: ExistenceCache,
    counts: Counters,
}

impl RemoteTier {
    /// A tier over `backend`, with default options.
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self::with_options(backend, RemoteOptions::default())
    }

    /// A tier over `backend`.
    #[must_use]
    pub fn with_options(backend: Arc<dyn Backend>, options: RemoteOptions) -> Self {
        let (existence, counts) = (ExistenceCache::default(), Counters::default());
        Self { executor: CallExecutor::new(backend), options, existence, counts }
    }

    /// Pages of a full object with pages of this length; full objects begin at multiples of it.
    #[must_use]
    pub fn object_pages(page_bytes: u64) -> usize {
        packing::group_pages(page_bytes)
    }

    /// Returns the number of leading pages on the remote: a hint, because a read may still fail.
    /// Sends at most 12 queries for 256 pages, and none for objects whose existence is cached.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Retry` if the remote does not answer until `deadline`.
    pub fn probe(&self, prompt: &Prompt<'_>, deadline: Instant) -> Result<usize> {
        check_keys(prompt.keys)?;
        let groups = self.groups_before_hole(prompt, deadline)?;
        Ok(self.find_objects(prompt, groups, deadline)?.last().map_or(0, |span| span.end))
    }

    /// Copies pages `range` of a prompt that was probed before to `out`, one after another. Returns
    /// the number of leading pages that were read and verified; all further pages are misses.
    ///
    /// # Errors
    /// `Invalid` for an invalid key, or if the length of `out` does not match.
    pub fn get(
        &self,
        prompt: &Prompt<'_>,
        range: Range<usize>,
        out: &mut [u8],
        deadline: Instant,
    ) -> Result<usize> {
        check_keys(prompt.keys)?;
        let page = prompt.page_bytes as usize;
        if out.len() != range.len() * page || range.end > prompt.keys.len() {
            return Err(ritornello_format::Error::invalid(
                "a read needs pages of the prompt, and memory of exactly their length",
            ));
        }
        if range.is_empty() {
            return Ok(0);
        }
        let Ok(found) = self.find_objects(prompt, usize::MAX, deadline) else { return Ok(0) };
        let objects: Vec<_> = found
            .into_iter()
            .filter(|span| span.end > range.start && span.start < range.end)
            .collect();
        let promised = objects.last().map_or(0, |span| range.end.min(span.end) - range.start);
        let mut copied = 0;
        let mut left = objects.into_iter().map(|span| {
            let pages = range.start.max(span.start)..range.end.min(span.end);
            let call = self.fetch(prompt, &span, &pages, deadline);
            (span, pages, call)
        });
        let mut pending: VecDeque<_> = left.by_ref().take(OBJECTS_AT_ONCE).collect();
        while let Some((span, pages, answer)) = pending.pop_front() {
            let at = (pages.start - range.start) * page;
            let out = &mut out[at..at + pages.len() * page];
            let read = answer.and_then(PendingCall::wait).ok().flatten();
            // The next object is fetched while the current object is verified.
            pending.extend(left.next());
            let (whole, rejection) = read.map_or((0, None), |read| {
                let inside = pages.start - span.start..pages.end - span.start;
                self.unpack(&read, prompt, &span, inside, out)
            });
            copied += whole;
            let (name, now) = (self.name_of(prompt, &span), Instant::now());
            if whole == pages.len() {
                // A partial read does not clear a rejection, because the rejected bytes may be
                // outside the range read.
                if pages == span && self.existence.is_rejected(&name) {
                    self.existence.mark_verified(&name, now);
                }
                continue;
            }
            match rejection {
                Some(why) => {
                    self.counts.rejected.add(&name, &why);
                    let is_damaged = matches!(why, RejectReason::Damaged(_));
                    self.existence.mark_rejected(&name, is_damaged, now);
                }
                None => {
                    tracing::debug!(name, "an object that was found could not be read");
                    self.existence.mark_lost(&name, now);
                }
            }
            break;
        }
        self.counts.read.fetch_add(copied as u64, Relaxed);
        self.counts.lost.fetch_add((promised - copied) as u64, Relaxed);
        Ok(copied)
    }

    /// Writes those objects of pages `have` that the remote lacks; `page` lends a page by its index
    /// in the prompt. Only whole objects are written: if `have` begins inside an object, that
    /// object is skipped. Objects not written until `deadline`, and all later objects, which no
    /// lookup would reach, are dropped and counted. Returns the number of pages of `have` that the
    /// remote now has, up to the first missing object.
    ///
    /// # Errors
    /// `Invalid` for an invalid key, or pages of different lengths.
    pub fn put<'a>(
        &self,
        prompt: &Prompt<'_>,
        have: Range<usize>,
        page: impl Fn(usize) -> &'a [u8],
        deadline: Instant,
    ) -> Result<usize> {
        check_keys(prompt.keys)?;
        let group = packing::group_pages(prompt.page_bytes);
        let end = have.end.min(prompt.keys.len());
        let spans: Vec<_> =
            packing::spans(end, group).filter(|span| span.start >= have.start).collect();
        let names: Vec<_> = spans.iter().map(|span| self.name_of(prompt, span)).collect();
        let exists = self.readable(&names, deadline).unwrap_or_else(|_| vec![false; names.len()]);
        let mut missing = Vec::new();
        for ((span, name), exists) in spans.iter().zip(names).zip(exists) {
            if exists {
                self.counts.present.fetch_add(span.len() as u64, Relaxed);
            } else {
                missing.push((span.clone(), name));
            }
        }
        let mut pending: VecDeque<(Range<usize>, String, _)> =
            VecDeque::with_capacity(OBJECTS_AT_ONCE);
        let mut left = missing.into_iter();
        // The first missing page.
        let mut first_missing = end;
        loop {
            let next = left.next();
            if pending.len() == OBJECTS_AT_ONCE || next.is_none() {
                let Some((span, name, answer)) = pending.pop_front() else { break };
                if !self.written(&span, &name, answer) {
                    first_missing = first_missing.min(span.start);
                }
            }
            let Some((span, name)) = next else { continue };
            if span.start > first_missing {
                self.counts.dropped.fetch_add(span.len() as u64, Relaxed);
                continue;
            }
            let pages: Vec<&[u8]> = span.clone().map(&page).collect();
            let keys = &prompt.keys[span.clone()];
            let parent = span.start.checked_sub(1).map(|at| prompt.keys[at]);
            let packed = object::pack(prompt.scope, parent, keys, &pages, &self.options)?;
            let (to, packed) = (name.clone(), Arc::new(packed));
            let answer =
                self.executor.start(deadline, move |remote| remote.set_shared(&to, &packed));
            pending.push_back((span, name, answer));
        }
        Ok(spans.iter().take_while(|span| span.start < first_missing).map(Range::len).sum())
    }

    /// The first range of consecutive pages whose objects are missing, starting at or after `from`,
    /// which must be the start of an object; the empty range at the end of the prompt if no object
    /// is missing. For writers: the call queries every object.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Retry` if the remote does not answer until `deadline`.
    pub fn missing(
        &self,
        prompt: &Prompt<'_>,
        from: usize,
        deadline: Instant,
    ) -> Result<Range<usize>> {
        check_keys(prompt.keys)?;
        let group = packing::group_pages(prompt.page_bytes);
        let all: Vec<_> =
            packing::spans(prompt.keys.len(), group).filter(|span| span.start >= from).collect();
        for spans in all.chunks(NAMES_PER_QUERY) {
            let names: Vec<_> = spans.iter().map(|span| self.name_of(prompt, span)).collect();
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

    /// Records the outcome of writing the object of `span`. Returns whether it was written.
    fn written(&self, span: &Range<usize>, name: &str, answer: Result<PendingCall<()>>) -> bool {
        let written = answer.and_then(PendingCall::wait).is_ok();
        let count = if written { &self.counts.written } else { &self.counts.dropped };
        count.fetch_add(span.len() as u64, Relaxed);
        if written {
            self.existence.mark_verified(name, Instant::now());
        }
        written
    }

    /// Statistics since the tier was created.
    #[must_use]
    pub fn stats(&self) -> RemoteStats {
        RemoteStats {
            calls: self.executor.calls(),
            pages_read: self.counts.read.load(Relaxed),
            pages_lost: self.counts.lost.load(Relaxed),
            pages_written: self.counts.written.load(Relaxed),
            pages_present: self.counts.present.load(Relaxed),
            pages_dropped: self.counts.dropped.load(Relaxed),
            rejected: self.counts.rejected.get(),
        }
    }

    /// The objects that hold the leading pages: full groups, the last of which is found by ternary
    /// search, followed by smaller objects. Considers only the first `groups_before_hole` groups.
    fn find_objects(
        &self,
        prompt: &Prompt<'_>,
        groups_before_hole: usize,
        deadline: Instant,
    ) -> Result<Vec<Range<usize>>> {
        let group = packing::group_pages(prompt.page_bytes);
        let pages = prompt.keys.len();
        let name = |end: usize| self.name_of(prompt, &((end - 1) * group..end * group));
        // Bounds of the number of leading groups that exist.
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
                // Later groups do not matter: a prompt ends at the first missing group.
                _ => most = low - 1,
            }
        }
        let mut found: Vec<_> = (0..least).map(|at| at * group..(at + 1) * group).collect();
        let (mut at, mut size) = (least * group, group / 2);
        while size > 0 {
            if at + size <= pages {
                let span = at..at + size;
                if self.query_existence(&[self.name_of(prompt, &span)], deadline)? == [true] {
                    at = span.end;
                    found.push(span);
                }
            }
            size /= 2;
        }
        Ok(found)
    }

    /// The number of full groups before the first group that is cached as missing, or that could
    /// not be read when last found and is still missing. The ternary search in
    /// [`find_objects`](Self::find_objects) may skip over this hole.
    fn groups_before_hole(&self, prompt: &Prompt<'_>, deadline: Instant) -> Result<usize> {
        let group = packing::group_pages(prompt.page_bytes);
        let mut groups_before_hole = 0;
        for end in 1..=prompt.keys.len() / group {
            let name = self.name_of(prompt, &((end - 1) * group..end * group));
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

    /// Which of these objects exist and were not lost or rejected when last read. Writers write all
    /// other objects, and so replace damaged and forged objects.
    fn readable(&self, names: &[String], deadline: Instant) -> Result<Vec<bool>> {
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
            let answers = self.executor.call(deadline, move |remote| {
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

    fn name_of(&self, prompt: &Prompt<'_>, span: &Range<usize>) -> String {
        let last = prompt.keys[span.end - 1];
        packing::name(self.options.form(), prompt.scope, last, span.len())
    }

    /// Copies pages `requested` of the object of `span` to `out`. Returns the number of pages
    /// copied, and the reason if a page was rejected.
    fn unpack(
        &self,
        read: &FetchedObject,
        prompt: &Prompt<'_>,
        span: &Range<usize>,
        requested: Range<usize>,
        out: &mut [u8],
    ) -> (usize, Option<RejectReason>) {
        let verify = self.options.keys.as_deref().map(|keys| (keys, prompt.scope));
        let checked =
            Contents::read(&read.head, self.options.form(), verify).and_then(|contents| {
                contents.check(prompt.scope, &prompt.keys[span.clone()], prompt.page_bytes)?;
                Ok(contents)
            });
        let part = match &read.body {
            None => ObjectBytes { at: 0, bytes: &read.head },
            Some((at, bytes)) => ObjectBytes { at: *at, bytes },
        };
        match checked {
            Ok(contents) => contents.unpack(&part, requested, out),
            Err(why) => (0, Some(why)),
        }
    }

    /// Fetches the header of an object and the bytes of `pages`, which are a part of `span`; in one
    /// request if header and bytes are adjacent.
    fn fetch(
        &self,
        prompt: &Prompt<'_>,
        span: &Range<usize>,
        pages: &Range<usize>,
        deadline: Instant,
    ) -> Result<PendingCall<Option<FetchedObject>>> {
        let name = self.name_of(prompt, span);
        let (form, keys, scope) = (self.options.form(), self.options.keys.clone(), *prompt.scope);
        let (page_bytes, pages_in) = (prompt.page_bytes, span.len());
        let begin =
            object::first_page_offset(form, prompt.keys[span.clone()].iter().map(|k| k.len()));
        let place = |page: usize| begin + (page - span.start) as u64 * prompt.page_bytes;
        let (from, to) = (place(pages.start), place(pages.end));
        let inside = pages.start - span.start..pages.end - span.start;
        self.executor.start(deadline, move |remote| {
            if from == begin {
                let head = remote.get(&name, Some(0..to))?;
                return Ok(head.map(|head| FetchedObject { head, body: None }));
            }
            let requests = [(name.as_str(), Some(0..begin)), (name.as_str(), Some(from..to))];
            let mut answers = remote.get_batch(&requests).into_iter();
            let (Some(head), Some(body)) = (answers.next(), answers.next()) else {
                return Ok(None);
            };
            let (Some(head), Some(body)) = (head?, body?) else { return Ok(None) };
            // Compressed pages start at smaller offsets than computed. The header's page length and
            // count must equal the prompt's, or a forged header could cause fetches of any length.
            let verify = keys.as_deref().map(|keys| (keys, &scope));
            let actual = Contents::read(&head, form, verify).ok().filter(|contents| {
                contents.header.page_bytes == page_bytes && contents.header.keys.len() == pages_in
            });
            let actual = actual.map(|contents| contents.stored_range(inside.clone()));
            match actual.filter(|actual| *actual != (from..to)) {
                None => Ok(Some(FetchedObject { head, body: Some((from, body)) })),
                Some(actual) => {
                    let body = remote.get(&name, Some(actual.clone()))?;
                    Ok(body.map(|body| FetchedObject { head, body: Some((actual.start, body)) }))
                }
            }
        })
    }
}

/// The fetched bytes of an object: from its beginning, or its header and a separate range.
struct FetchedObject {
    head: Vec<u8>,
    body: Option<(u64, Vec<u8>)>,
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryBackend;
    use super::*;
    use std::time::Duration;

    const SCOPE: ScopeId = ScopeId([9; 16]);
    /// Eight pages make an object.
    const PAGE: usize = 1 << 20;

    struct Fixture {
        tier: RemoteTier,
        backend: Arc<MemoryBackend>,
        keys: Vec<Vec<u8>>,
    }

    impl Fixture {
        fn new(pages: u64) -> Self {
            let backend = Arc::new(MemoryBackend::default());
            let tier = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
            let keys = (0..pages).map(|at| [at; 4].map(u64::to_le_bytes).concat()).collect();
            Self { tier, backend, keys }
        }

        fn with<T>(&self, run: impl FnOnce(&Prompt<'_>, Instant) -> Result<T>) -> T {
            let keys: Vec<&[u8]> = self.keys.iter().map(Vec::as_slice).collect();
            let prompt = Prompt { scope: &SCOPE, page_bytes: PAGE as u64, keys: &keys };
            run(&prompt, Instant::now() + Duration::from_secs(60)).unwrap()
        }

        fn put(&self) -> usize {
            let page = vec![5; PAGE];
            self.with(|prompt, until| self.tier.put(prompt, 0..self.keys.len(), |_| &page, until))
        }

        fn get(&self) -> usize {
            let mut out = vec![0; self.keys.len() * PAGE];
            self.with(|prompt, until| self.tier.get(prompt, 0..self.keys.len(), &mut out, until))
        }

        fn probe(&self) -> usize {
            self.with(|prompt, until| self.tier.probe(prompt, until))
        }

        fn first_object(&self) -> String {
            packing::name(Form::Plain, &SCOPE, &self.keys[7], 8)
        }

        /// Lets the cached entry of a missing object expire.
        fn expire_missing(&self, name: &str) {
            let Some(past) = Instant::now().checked_sub(Duration::from_secs(60)) else { return };
            self.tier.existence.record(name, false, past);
        }
    }

    #[test]
    fn hole_is_cached_until_filled() {
        let fixture = Fixture::new(72);
        let name = fixture.first_object();
        assert_eq!(fixture.put(), 72);
        let value = fixture.backend.get(&name, None).unwrap().unwrap();
        fixture.backend.delete(&name).unwrap();
        assert_eq!(fixture.probe(), 72);
        assert_eq!(fixture.get(), 0);
        assert_eq!(fixture.probe(), 0);
        fixture.expire_missing(&name);
        assert_eq!(fixture.probe(), 0, "the lost object is queried separately");
        fixture.backend.set(&name, &value).unwrap();
        fixture.expire_missing(&name);
        assert_eq!((fixture.probe(), fixture.get()), (72, 72));
    }

    #[test]
    fn damaged_object_is_written_again() {
        let fixture = Fixture::new(16);
        let name = fixture.first_object();
        assert_eq!(fixture.put(), 16);
        fixture.backend.set(&name, b"damage").unwrap();
        assert_eq!(fixture.get(), 0);
        fixture.expire_missing(&name);
        assert_eq!(fixture.with(|prompt, until| fixture.tier.missing(prompt, 0, until)), 0..8);
        assert_eq!(fixture.put(), 16);
        assert_eq!(fixture.get(), 16);
    }

    #[test]
    fn partial_read_does_not_clear_rejection() {
        let fixture = Fixture::new(8);
        let name = fixture.first_object();
        assert_eq!(fixture.put(), 8);
        let mut value = fixture.backend.get(&name, None).unwrap().unwrap();
        *value.last_mut().unwrap() ^= 1;
        fixture.backend.set(&name, &value).unwrap();
        assert_eq!(fixture.get(), 7);
        fixture.expire_missing(&name);
        let mut out = vec![0; PAGE];
        assert_eq!(
            fixture.with(|prompt, until| fixture.tier.get(prompt, 0..1, &mut out, until)),
            1
        );
        assert_eq!(fixture.with(|prompt, until| fixture.tier.missing(prompt, 0, until)), 0..8);
        assert_eq!((fixture.put(), fixture.get()), (8, 8));
        assert_eq!(fixture.tier.stats().pages_written, 16);
    }
}
