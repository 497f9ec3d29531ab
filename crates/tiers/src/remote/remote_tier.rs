//! The tier over a remote: finds, reads and writes the pages of prompts.

use super::backend::Backend;
use super::call_executor::{CallCounters, CallExecutor, Operation, PendingCall, RemoteCalls};
use super::keyed_backend::KeyedBackend;
use super::object;
use super::object_finder::ObjectFinder;
use super::object_read::{FetchedObject, ObjectRead};
use super::options::RemoteOptions;
use super::packing::{self, Prompt};
use super::rejected::{RejectReason, RejectedCounters, RejectedObjects};
use ritornello_format::{Result, check_keys};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Number of consecutive failed writes of objects of an unchained scope after which a put writes no
/// further object, because the remote then probably fails every write.
pub(crate) const FAILED_OBJECTS_MAX: usize = 4;

/// Statistics of a remote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteStats {
    /// Calls of the backend.
    pub calls: RemoteCalls,
    /// Pages read and verified.
    pub pages_read: u64,
    /// Pages that a read found and did not deliver, because their object, or an object before it,
    /// was missing, rejected or not read in time.
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
    executor: Arc<CallExecutor>,
    finder: ObjectFinder,
    options: RemoteOptions,
    counts: Counters,
}

impl RemoteTier {
    /// A tier over `backend`, with default options.
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self::with_options(backend, RemoteOptions::default())
    }

    /// A tier over `backend`. Calls of the backend fail while the key file of a deferred key ring
    /// cannot be used.
    #[must_use]
    pub fn with_options(backend: Arc<dyn Backend>, options: RemoteOptions) -> Self {
        let backend: Arc<dyn Backend> = match &options.keys {
            Some(keys) => Arc::new(KeyedBackend::new(backend, Arc::clone(keys))),
            None => backend,
        };
        let executor = Arc::new(CallExecutor::new(backend));
        let finder = ObjectFinder::new(Arc::clone(&executor), options.form());
        Self { executor, finder, options, counts: Counters::default() }
    }

    /// Returns the number of leading pages on the remote. This is a hint, because a read may still
    /// fail. In a chained scope, sends at most 12 queries for 256 pages, and one more for each
    /// object that was found and then could not be read. In an unchained scope, sends at most one
    /// query for each page. Sends no query for an object whose existence is cached.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Retry` if the remote does not answer by `deadline`; the
    /// backend's error, such as `Fatal` if the remote refuses.
    pub fn probe(&self, prompt: &Prompt<'_>, deadline: Instant) -> Result<usize> {
        check_keys(prompt.keys)?;
        let groups = self.finder.groups_before_hole(prompt, deadline)?;
        Ok(self.finder.find(prompt, groups, deadline)?.last().map_or(0, |span| span.end))
    }

    /// Returns for each page of an unchained scope whether the remote has it. This is a hint, as
    /// for [`probe`](Self::probe). Sends at most one query for each page. Pages after a query that
    /// failed, or that would probably exceed `deadline`, count as missing.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; the error of the first query: `Retry` if the remote does not
    /// answer it, otherwise the backend's error, such as `Fatal` if the remote refuses.
    pub fn present(&self, prompt: &Prompt<'_>, deadline: Instant) -> Result<Vec<bool>> {
        check_keys(prompt.keys)?;
        self.finder.present(prompt, deadline)
    }

    /// Copies pages `range` of a prompt to `out`, one after another. The caller has probed the
    /// prompt. Returns the number of leading pages that were read and verified; all further pages
    /// are misses.
    ///
    /// # Errors
    /// `Invalid` for an invalid key, if `range` exceeds the prompt, or if `out` does not have the
    /// length of the pages.
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
        // Unlike a probe, search past known missing objects too: the loop below stops at the first
        // object that it cannot read.
        let Ok(found) = self.finder.find(prompt, usize::MAX, deadline) else { return Ok(0) };
        let objects: Vec<_> = found
            .into_iter()
            .filter(|span| span.end > range.start && span.start < range.end)
            .collect();
        let promised = objects.last().map_or(0, |span| range.end.min(span.end) - range.start);
        let concurrent = packing::concurrent_objects(prompt.page_bytes);
        let mut copied = 0;
        let mut left = objects.into_iter().map(|span| {
            let pages = range.start.max(span.start)..range.end.min(span.end);
            let read = ObjectRead { options: &self.options, prompt, span, pages };
            let call = read.start(&self.executor, deadline);
            (read, call)
        });
        let mut pending: VecDeque<_> = left.by_ref().take(concurrent).collect();
        while let Some((read, answer)) = pending.pop_front() {
            let pages = &read.pages;
            let at = (pages.start - range.start) * page;
            let out = &mut out[at..at + pages.len() * page];
            let fetched = answer.and_then(PendingCall::wait).ok().flatten();
            // Fetch the next object while the current object is verified.
            pending.extend(left.next());
            let bytes = fetched.as_ref().map_or(0, FetchedObject::bytes);
            self.call_counters().read_bytes.fetch_add(bytes, Relaxed);
            let (whole, rejection) =
                fetched.map_or((0, None), |fetched| read.unpack(&fetched, out));
            copied += whole;
            let (name, now) = (read.name(), Instant::now());
            if whole == pages.len() {
                // A partial read does not clear a rejection, because the rejected bytes may be
                // outside the range that was read.
                if *pages == read.span && self.finder.existence.is_rejected(&name) {
                    self.finder.existence.mark_verified(&name, now);
                }
                continue;
            }
            match rejection {
                Some(why) => {
                    self.counts.rejected.add(&name, &why);
                    let is_damaged = matches!(why, RejectReason::Damaged(_));
                    self.finder.existence.mark_rejected(&name, is_damaged, now);
                }
                None => {
                    tracing::debug!(name, "an object that was found could not be read");
                    self.finder.existence.mark_lost(&name, now);
                }
            }
            break;
        }
        self.counts.read.fetch_add(copied as u64, Relaxed);
        self.counts.lost.fetch_add((promised - copied) as u64, Relaxed);
        Ok(copied)
    }

    /// Writes those objects of pages `have` that the remote lacks; `page` lends a page by its index
    /// in the prompt. Only whole objects are written: an object in whose middle `have` begins is
    /// skipped. Objects that are not written by `deadline` are dropped, and their pages count as
    /// [`RemoteStats::pages_dropped`]. A failed write in a chained scope, and four consecutive
    /// failed writes in an unchained scope, drop all objects whose write has not begun: in a
    /// chained scope a read stops at the missing object before them. Returns the number of pages of
    /// `have` that the remote now has, up to the first missing object.
    ///
    /// # Errors
    /// `Invalid` for an invalid key, or pages of different lengths; `Retry` while the key file
    /// cannot be used.
    pub fn put<'a>(
        &self,
        prompt: &Prompt<'_>,
        have: Range<usize>,
        page: impl Fn(usize) -> &'a [u8],
        deadline: Instant,
    ) -> Result<usize> {
        let objects = self.put_objects(prompt, have, page, deadline)?;
        let leading = objects.iter().take_while(|(_, present)| *present);
        Ok(leading.map(|(span, _)| span.len()).sum())
    }

    /// Like [`put`](Self::put), but returns for each whole object of `have`, in order, its pages
    /// and whether the remote now has it.
    ///
    /// # Errors
    /// Like `put`.
    pub(crate) fn put_objects<'a>(
        &self,
        prompt: &Prompt<'_>,
        have: Range<usize>,
        page: impl Fn(usize) -> &'a [u8],
        deadline: Instant,
    ) -> Result<Vec<(Range<usize>, bool)>> {
        check_keys(prompt.keys)?;
        let end = have.end.min(prompt.keys.len());
        let spans: Vec<_> =
            packing::spans(end, prompt.group()).filter(|span| span.start >= have.start).collect();
        let names: Vec<_> =
            spans.iter().map(|span| prompt.object_name(self.options.form(), span)).collect();
        let exists =
            self.finder.readable(&names, deadline).unwrap_or_else(|_| vec![false; names.len()]);
        let mut missing = Vec::new();
        for (at, (name, exists)) in names.into_iter().zip(&exists).enumerate() {
            if *exists {
                self.counts.present.fetch_add(spans[at].len() as u64, Relaxed);
            } else {
                missing.push((at, name));
            }
        }
        let mut objects: Vec<_> = spans.into_iter().zip(exists).collect();
        let concurrent = packing::concurrent_objects(prompt.page_bytes);
        let mut pending: VecDeque<(usize, String, u64, _)> = VecDeque::with_capacity(concurrent);
        let mut left = missing.into_iter();
        let (mut failures, most) = (0, if prompt.chained { 1 } else { FAILED_OBJECTS_MAX });
        loop {
            let next = left.next();
            if pending.len() == concurrent || next.is_none() {
                let Some((at, name, bytes, answer)) = pending.pop_front() else { break };
                let (span, present) = &mut objects[at];
                *present = self.written(span, &name, bytes, answer);
                // Once the failures reach the limit, the put starts no further write, even if a
                // write in flight then succeeds.
                failures = if *present && failures < most { 0 } else { failures + 1 };
            }
            let Some((at, name)) = next else { continue };
            let span = objects[at].0.clone();
            if failures >= most {
                self.counts.dropped.fetch_add(span.len() as u64, Relaxed);
                continue;
            }
            let pages: Vec<&[u8]> = span.clone().map(&page).collect();
            let keys = &prompt.keys[span.clone()];
            let before = span.start.checked_sub(1).filter(|_| prompt.chained);
            let parent = before.map(|at| prompt.keys[at]);
            let packed = object::pack(prompt.scope, parent, keys, &pages, &self.options)?;
            let (to, bytes, packed) = (name.clone(), packed.len() as u64, Arc::new(packed));
            let put = move |remote: &dyn Backend| remote.set_shared(&to, &packed);
            let answer = self.executor.start(Operation::Put, deadline, put);
            pending.push_back((at, name, bytes, answer));
        }
        Ok(objects)
    }

    /// Returns the first range of consecutive pages, at or after `from`, whose objects a writer
    /// must write, because they are missing, or this process could not read or verify them. Objects
    /// directly after the range may have to be written as well. Returns the empty range at the end
    /// of the prompt if no object must be written. `from` must be the start of an object. Checks
    /// the objects in order, whereas a probe may skip over a missing object.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Retry` if the remote does not answer by `deadline`; the
    /// backend's error, such as `Fatal` if the remote refuses.
    pub fn missing(
        &self,
        prompt: &Prompt<'_>,
        from: usize,
        deadline: Instant,
    ) -> Result<Range<usize>> {
        check_keys(prompt.keys)?;
        self.finder.missing(prompt, from, deadline)
    }

    /// Records the outcome of writing the object of `span`, of `bytes` bytes. Returns whether it
    /// was written.
    fn written(
        &self,
        span: &Range<usize>,
        name: &str,
        bytes: u64,
        answer: Result<PendingCall<()>>,
    ) -> bool {
        let written = answer.and_then(PendingCall::wait).is_ok();
        let count = if written { &self.counts.written } else { &self.counts.dropped };
        count.fetch_add(span.len() as u64, Relaxed);
        if written {
            self.call_counters().written_bytes.fetch_add(bytes, Relaxed);
            self.finder.existence.mark_verified(name, Instant::now());
        }
        written
    }

    pub(crate) fn call_counters(&self) -> &Arc<CallCounters> {
        self.executor.counters()
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
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryBackend;
    use super::super::packing::Form;
    use super::*;
    use ritornello_format::ScopeId;
    use std::time::Duration;

    const SCOPE: ScopeId = ScopeId([9; 16]);
    /// Bytes of a page: a full object holds eight pages.
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
            let prompt =
                Prompt { scope: &SCOPE, page_bytes: PAGE as u64, chained: true, keys: &keys };
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
            self.tier.finder.existence.record(name, false, past);
        }
    }

    #[test]
    fn lost_object_ends_prefix_until_restored() {
        let fixture = Fixture::new(72);
        let name = fixture.first_object();
        assert_eq!(fixture.put(), 72);
        let value = fixture.backend.get(&name, None).unwrap().unwrap();
        fixture.backend.delete(&name).unwrap();
        assert_eq!(fixture.probe(), 72);
        assert_eq!(fixture.get(), 0);
        assert_eq!(fixture.probe(), 0);
        fixture.expire_missing(&name);
        assert_eq!(fixture.probe(), 0, "a probe must query the lost object itself");
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
