//! Prefetch: fetches pages of a prompt from the remote before its request is computed.
//!
//! A few threads run prefetches, each thread one prompt at a time. A thread probes the remote for
//! the number of leading pages, lets the gate decide how many of them are worth fetching, and
//! fetches these pages front to back until a page fails or the prefetch is cancelled. No caller
//! waits: repeated lookups report the progress.

use super::lookup::LookupOptions;
use super::prompt::PromptPages;
use super::shared::{RemoteHandle, Shared, with_prompt};
use super::tier_policies::{MAX_LOOKUP_WAIT, WritePolicy};
use super::write_queue::PendingPut;
use crate::Residence;
use crate::gate::TierSpan;
use crate::remote::RemoteTier;
use parking_lot::Mutex;
use ritornello_format::PageHash;
use ritornello_format::residency::Tier;
use ritornello_store::{LeaseNumber, PutOptions};
use ritornello_volume::ForkSafeLock;
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum prefetches that run concurrently, and maximum queued prefetches.
const THREADS: usize = 4;
const MAX_QUEUED: usize = 256;
/// Maximum tracked prefetches, the number of tracked prefetches that starts a sweep of stale
/// prefetches, and how long a reported outcome stays valid before the remote is queried again.
const MAX_TRACKED: usize = 2048;
const STALE_SWEEP_AT: usize = 128;
const REPORTED_VALID_FOR: Duration = Duration::from_secs(5);
/// Timeouts of one query of the remote, and of one read from it.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Time within which fetched pages must find space on the first tier.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for which fetched pages count as reserved, and an unreported outcome stays valid.
const KEEP_FOR: Duration = Duration::from_secs(10);
/// Objects read concurrently.
const OBJECTS_AT_ONCE: usize = 4;
/// Interval at which a prefetch checks whether another prefetch has stored pages.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Prefetches of a cache: the tracked prefetches, the queue, and the threads.
#[derive(Debug, Default)]
pub(super) struct Prefetches {
    state: ForkSafeLock<State>,
    /// A prefetch holds this lock while it decides how much to fetch, so that two prefetches do not
    /// count on the same space.
    deciding: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// Tracked prefetches by the hash of the last page of the prompt.
    known: HashMap<PageHash, Arc<Prefetch>>,
    queue: VecDeque<Arc<Prefetch>>,
    threads: usize,
    idle: usize,
    closing: bool,
}

/// The prefetch of one prompt.
#[derive(Debug)]
pub(super) struct Prefetch {
    pages: PromptPages,
    options: LookupOptions,
    /// Local spans when the prefetch started.
    pub(super) local: Vec<TierSpan>,
    pub(super) since: Instant,
    stage: Mutex<Stage>,
    /// The gate's estimate of the duration of the fetch.
    expected: Mutex<Duration>,
    /// Leases that keep fetched pages on the first tier.
    kept: Mutex<Vec<LeaseNumber>>,
    /// Whether a lookup has returned the outcome.
    reported: AtomicBool,
    cancelled: Arc<AtomicBool>,
}

/// The progress of a prefetch.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// The remote has not answered yet.
    Querying,
    /// `fetched` of `of` pages are stored.
    Fetching { fetched: usize, of: usize },
    /// Complete since `at`: leading pages the remote has, and pages fetched.
    Done { at: Instant, known: usize, fetched: usize },
}

/// The state of a prefetch when it was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    Waiting,
    Running,
}

impl Prefetch {
    pub(super) fn stage(&self) -> Stage {
        *self.stage.lock()
    }

    /// Whether the outcome is so old that the remote should be queried again.
    pub(super) fn is_stale(&self) -> bool {
        let lasts =
            if self.reported.load(Ordering::Acquire) { REPORTED_VALID_FOR } else { KEEP_FOR };
        matches!(self.stage(), Stage::Done { at, .. } if at.elapsed() >= lasts)
    }

    pub(super) fn expected(&self) -> Duration {
        *self.expected.lock()
    }

    /// Bytes of a page in all its objects, each of which has its own prefetch.
    fn page_bytes(&self) -> u64 {
        self.options.page_bytes.max(self.pages.page_bytes)
    }

    /// Bytes on the first tier that are reserved for this prompt, in all objects: pages being
    /// fetched, or kept until a lookup takes them.
    fn reserved_bytes(&self) -> u64 {
        let pages = match self.stage() {
            Stage::Fetching { of, .. } => of,
            Stage::Done { at, fetched, .. } if at.elapsed() < KEEP_FOR => fetched,
            _ => 0,
        };
        (pages as u64).saturating_mul(self.page_bytes())
    }

    /// Bytes of this object still to fetch.
    fn remaining_bytes(&self) -> u64 {
        match self.stage() {
            Stage::Fetching { fetched, of } => self.pages.bytes(of - fetched),
            _ => 0,
        }
    }

    fn local_pages(&self) -> usize {
        self.local.iter().map(|span| span.pages).sum()
    }
}

impl Prefetches {
    pub(super) fn get(&self, name: PageHash) -> Option<Arc<Prefetch>> {
        self.state.lock().known.get(&name).cloned()
    }

    /// Returns the bytes reserved for other prompts, and the bytes still to fetch for `prompt`.
    fn usage_beside(&self, prompt: &PromptPages) -> (u64, u64) {
        let (mut others, mut own) = (HashMap::<&[u8], u64>::new(), 0);
        let state = self.state.lock();
        for job in state.known.values() {
            match job.pages.keys.last() {
                key if key == prompt.keys.last() => own += job.remaining_bytes(),
                Some(key) => {
                    let most = others.entry(key).or_default();
                    *most = job.reserved_bytes().max(*most);
                }
                None => {}
            }
        }
        (others.into_values().fold(0, u64::saturating_add), own)
    }

    pub(super) fn running(&self) -> u64 {
        let state = self.state.lock();
        (state.queue.len() + state.threads - state.idle) as u64
    }

    /// Cancels a prefetch unless it is complete. The thread of a running prefetch counts the
    /// cancellation.
    pub(super) fn cancel(&self, name: PageHash) -> Option<Stopped> {
        let mut state = self.state.lock();
        let found = state.known.get(&name).cloned()?;
        if matches!(found.stage(), Stage::Done { .. }) {
            return None;
        }
        state.known.remove(&name);
        found.cancelled.store(true, Ordering::Release);
        let waiting = state.queue.len();
        state.queue.retain(|other| !Arc::ptr_eq(other, &found));
        Some(if state.queue.len() < waiting { Stopped::Waiting } else { Stopped::Running })
    }

    /// Cancels all prefetches and stops the threads.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        state.known.values().for_each(|each| each.cancelled.store(true, Ordering::Release));
        state.queue.clear();
        self.state.wake_all();
    }

    pub(super) fn is_running(&self) -> bool {
        self.state.lock().threads > 0
    }
}

impl State {
    /// Removes stale prefetches and returns them, so that their leases can be released.
    fn sweep_stale(&mut self) -> Vec<Arc<Prefetch>> {
        if self.known.len() < STALE_SWEEP_AT {
            return Vec::new();
        }
        self.known.extract_if(|_, job| job.is_stale()).map(|(_, job)| job).collect()
    }
}

impl Shared {
    /// Starts the prefetch of a prompt. `None` if the limits do not allow it.
    pub(super) fn prefetch(
        self: &Arc<Self>,
        pages: &PromptPages,
        options: LookupOptions,
        local: Vec<TierSpan>,
    ) -> Option<Arc<Prefetch>> {
        let name = pages.name()?;
        let counts = &self.counts.prefetch;
        let swept = self.prefetches.state.lock().sweep_stale();
        for job in &swept {
            self.take_fetched(job);
        }
        let mut state = self.prefetches.state.lock();
        if state.closing || state.queue.len() >= MAX_QUEUED || state.known.len() >= MAX_TRACKED {
            counts.queue_full.add(1);
            return None;
        }
        if state.idle <= state.queue.len() && state.threads < THREADS {
            let shared = Arc::clone(self);
            let thread = thread::Builder::new().name("ritornello-prefetch".to_owned());
            if thread.spawn(move || shared.prefetch_worker()).is_ok() {
                state.threads += 1;
            }
        }
        let started = Arc::new(Prefetch {
            pages: pages.clone(),
            options,
            local,
            since: Instant::now(),
            stage: Mutex::new(Stage::Querying),
            expected: Mutex::default(),
            kept: Mutex::default(),
            reported: AtomicBool::new(false),
            cancelled: Arc::default(),
        });
        state.known.insert(name, Arc::clone(&started));
        state.queue.push_back(Arc::clone(&started));
        counts.started.add(1);
        self.prefetches.state.wake_one();
        Some(started)
    }

    /// Takes the number of pages fetched, which is reported once, and releases the leases on them.
    pub(super) fn take_fetched(&self, job: &Prefetch) -> usize {
        let fetched = match &mut *job.stage.lock() {
            Stage::Done { fetched, .. } => {
                job.reported.store(true, Ordering::Release);
                std::mem::take(fetched)
            }
            _ => 0,
        };
        for lease in std::mem::take(&mut *job.kept.lock()) {
            // An error is harmless: the lease expires.
            let _ = self.first_tier().store().release(lease);
        }
        fetched
    }

    fn prefetch_worker(self: Arc<Self>) {
        let mut state = self.prefetches.state.lock();
        loop {
            if state.closing {
                state.threads -= 1;
                self.prefetches.state.wake_all();
                return;
            }
            let Some(job) = state.queue.pop_front() else {
                state.idle += 1;
                state = self.prefetches.state.wait(state);
                state.idle -= 1;
                continue;
            };
            drop(state);
            if let Some(slot) = &self.remote {
                self.run_prefetch(slot, &job);
            }
            state = self.prefetches.state.lock();
        }
    }

    fn run_prefetch(self: &Arc<Self>, slot: &RemoteHandle, job: &Prefetch) {
        let counts = &self.counts.prefetch;
        let (pages, local) = (&job.pages, job.local_pages());
        let answer = with_prompt(pages, pages.len(), |prompt| {
            slot.tier.probe(prompt, Instant::now() + PROBE_TIMEOUT)
        });
        let known = *answer.as_ref().unwrap_or(&0);
        let worthwhile = {
            let _alone = self.prefetches.deciding.lock();
            let worthwhile = self.pages_worth_fetching(job, known);
            if worthwhile > local {
                *job.stage.lock() = Stage::Fetching { fetched: 0, of: worthwhile - local };
            }
            worthwhile
        };
        let (fetched, count) = if answer.is_err() {
            (0, &counts.failed)
        } else if worthwhile <= local {
            (0, &counts.not_worthwhile)
        } else {
            self.mark_present(Tier::Remote, pages, 0..known);
            match self.fetch(slot, job, local..worthwhile) {
                fetched if fetched == worthwhile - local => (fetched, &counts.completed),
                fetched if job.cancelled.load(Ordering::Acquire) => (fetched, &counts.cancelled),
                fetched => (fetched, &counts.failed),
            }
        };
        *job.stage.lock() = Stage::Done { at: Instant::now(), known, fetched };
        count.add(1);
        if job.cancelled.load(Ordering::Acquire) {
            // No lookup will take the result of a cancelled prefetch.
            self.take_fetched(job);
        }
        self.trim_table();
    }

    /// Returns the number of leading pages worth having on this machine; only the local pages if
    /// the first tier has no space for all remaining pages.
    fn pages_worth_fetching(&self, job: &Prefetch, known: usize) -> usize {
        let local = job.local_pages();
        if known <= local {
            return local;
        }
        let mut found = job.local.clone();
        found.push(TierSpan { tier: Tier::Remote, pages: known - local });
        let (others, own) = self.prefetches.usage_beside(&job.pages);
        let mut queued = self.pending_load_bytes();
        // The estimate already counts all objects of a page.
        let remote = &mut queued[Tier::Remote as usize];
        *remote = remote.saturating_sub(own);
        let worthwhile = match self.decide(&job.pages, &found, &job.options, queued) {
            Some((pages, decision)) => {
                *job.expected.lock() = decision.load;
                pages
            }
            None => known,
        };
        // Concurrent prompts that evict each other's pages would all be fetched without any
        // benefit.
        let room = (self.first_tier().capacity / 4 * 3).saturating_sub(others);
        let needs = (worthwhile.saturating_sub(local) as u64).saturating_mul(job.page_bytes());
        if needs > room { local } else { worthwhile }
    }

    /// Fetches `range`. Returns the number of leading pages of `range` that are now on the first
    /// tier.
    fn fetch(self: &Arc<Self>, slot: &RemoteHandle, job: &Prefetch, range: Range<usize>) -> usize {
        let (pages, first_tier) = (&job.pages, self.first_tier());
        let group = RemoteTier::object_pages(pages.page_bytes);
        self.table.forget(first_tier.kind, &pages.hashes, range.start..pages.len());
        // A prefetch of a prompt with the same beginning may have fetched pages since the lookup.
        let keys = pages.refs(range.clone());
        let mut at = range.start + first_tier.store().probe(&pages.scope, &keys).unwrap_or(0);
        while at < range.end {
            let end = range.end.min((at / group + OBJECTS_AT_ONCE) * group);
            let claimed =
                self.table.claim(first_tier.kind, Residence::Loading, &pages.hashes, at..end);
            let mut claims = claimed.into_iter().peekable();
            while at < end && !job.cancelled.load(Ordering::Acquire) {
                let range_end;
                (at, range_end) = match claims.next_if(|claim| claim.start == at) {
                    Some(claim) => (self.fetch_claimed(slot, job, claim.clone()), claim.end),
                    None => {
                        let unclaimed = at..claims.peek().map_or(end, |claim| claim.start);
                        (self.await_others(slot, job, unclaimed.clone()), unclaimed.end)
                    }
                };
                let fetched = at - range.start;
                *job.stage.lock() = Stage::Fetching { fetched, of: range.len() };
                if at < range_end {
                    break;
                }
            }
            claims.for_each(|left| self.table.abandon(first_tier.kind, &pages.hashes, left));
            if at < end {
                break;
            }
        }
        at - range.start
    }

    /// Fetches pages claimed by this prefetch. Returns the end of the pages that were stored.
    fn fetch_claimed(
        self: &Arc<Self>,
        slot: &RemoteHandle,
        job: &Prefetch,
        range: Range<usize>,
    ) -> usize {
        let (pages, first_tier) = (&job.pages, self.first_tier());
        let bytes = pages.bytes(range.len());
        let loading = self.loads.begin(Tier::Remote, bytes);
        let begun = Instant::now();
        let control = Control {
            deadline: Some(begun + MAX_LOOKUP_WAIT),
            cancelled: Some(Arc::clone(&job.cancelled)),
            ..Control::default()
        };
        let mut buffer = vec![0; bytes as usize];
        let waited = slot.rate.wait(bytes, &control);
        let fetched = waited.map_or(0, |_| {
            with_prompt(pages, pages.len(), |prompt| {
                slot.tier.get(prompt, range.clone(), &mut buffer, Instant::now() + READ_TIMEOUT)
            })
            .unwrap_or(0)
        });
        drop(loading);
        let took = begun.elapsed().saturating_sub(waited.unwrap_or_default());
        self.record_load(Tier::Remote, fetched as u64, pages.bytes(fetched), took);
        let slices: Vec<&[u8]> =
            buffer.chunks_exact(pages.page_bytes as usize).take(fetched).collect();
        let keys = pages.refs(range.start..range.start + fetched);
        let stored = first_tier.store().put_batch(
            &pages.scope,
            &keys,
            &BorrowedPages::new(&slices),
            &PutOptions::after(pages.before(range.start)),
            &Control { deadline: Some(Instant::now() + STORE_TIMEOUT), ..Control::default() },
        );
        let stored = range.start + stored.map_or(0, |outcome| outcome.pages);
        let keys = pages.refs(range.start..stored);
        if let Ok(leased) = first_tier.store().lease(&pages.scope, &keys, MAX_LOOKUP_WAIT)
            && leased.lease != LeaseNumber::default()
        {
            job.kept.lock().push(leased.lease);
        }
        first_tier.rate.reserve(pages.bytes(stored - range.start));
        self.counts.prefetch.pages.add((stored - range.start) as u64);
        self.counts.prefetch.bytes.add(pages.bytes(stored - range.start));
        self.table.mark_present(first_tier.kind, &pages.hashes, range.start..stored, &[]);
        self.table.abandon(first_tier.kind, &pages.hashes, stored..range.end);
        // Local tiers below the first receive fetched pages like pages of a put.
        for queue in self.write_queues.iter().filter(|queue| queue.to != Tier::Remote) {
            if queue.policy == WritePolicy::WriteThrough {
                self.table.forget(queue.to, &pages.hashes, range.start..stored);
                self.queue_write(queue, pages, range.start..stored, PendingPut::default());
            }
        }
        stored
    }

    /// Waits for pages that another prefetch is fetching, and fetches pages that the other prefetch
    /// abandons. Returns the end of the pages that are stored.
    fn await_others(
        self: &Arc<Self>,
        slot: &RemoteHandle,
        job: &Prefetch,
        range: Range<usize>,
    ) -> usize {
        let until = Instant::now() + READ_TIMEOUT;
        let (pages, first_tier) = (&job.pages, self.first_tier());
        let mut at = range.start;
        loop {
            let keys = pages.refs(at..range.end);
            at += first_tier.store().probe(&pages.scope, &keys).unwrap_or(0);
            let stop = Instant::now() >= until || job.cancelled.load(Ordering::Acquire);
            if at == range.end || stop {
                return at;
            }
            let abandoned =
                self.table.claim(first_tier.kind, Residence::Loading, &pages.hashes, at..range.end);
            let mut abandoned = abandoned.into_iter().peekable();
            if let Some(claim) = abandoned.next_if(|claim| claim.start == at) {
                at = self.fetch_claimed(slot, job, claim.clone());
                abandoned.for_each(|left| self.table.abandon(first_tier.kind, &pages.hashes, left));
                if at < claim.end {
                    return at;
                }
                continue;
            }
            abandoned.for_each(|left| self.table.abandon(first_tier.kind, &pages.hashes, left));
            thread::sleep(POLL_INTERVAL);
        }
    }
}
