//! Writing down: pages of the tiers above go to a slower one in the background; and, likewise, up.
//!
//! A job holds keys, no bytes: they are read from the tier above when it is their turn, and that is
//! after all loads. What waits is bounded by the bytes that it will take to write; what finds no room
//! is dropped and counted, so that nobody who puts ever waits for a slow tier.

use super::policy::WritePolicy;
use super::prompt::Pages;
use super::shared::{RemoteSlot, Shared, with_prompt};
use super::spill::Spilled;
use crate::{Phase, remote::RemoteTier};
use ritornello_format::residency::Tier;
use ritornello_store::{Terms, Ticket};
use ritornello_volume::Parked;
use ritornello_volume::memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Loads go first for so long; then a job goes beside them, or a busy cache would never write.
const YIELD_TO_LOADS: Duration = Duration::from_secs(1);
/// A put that a job waits for is given up then.
const PUT_TIMEOUT: Duration = Duration::from_secs(30);
/// What a remote has of a prompt, and one write to either kind of tier.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes that are copied at once, and objects of a remote.
const COPY_BYTES: u64 = 8 << 20;
const OBJECTS_AT_ONCE: usize = 4;
/// How often a thread that waits for `write_back` looks how full the tier above is.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// The way to one tier.
#[derive(Debug)]
pub(super) struct WriteQueue {
    pub(super) to: Tier,
    pub(super) policy: WritePolicy,
    pub(super) dirty: super::write_back::DirtyPages,
    max_bytes: u64,
    state: Parked<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    jobs: VecDeque<Job>,
    bytes: u64,
    busy: bool,
    /// The pages that are on their way, unless nobody wants them any more.
    running: Option<(Pages, Range<usize>)>,
    /// When a job came to less than it was to, if the last one did.
    failed_at: Option<Instant>,
    threads: usize,
    closing: bool,
}

#[derive(Debug)]
struct Job {
    pages: Pages,
    range: Range<usize>,
    /// Puts that bring the pages to the tiers above.
    puts: Vec<PendingPut>,
    /// Whether the tier above is to let them go then.
    evict_source: bool,
}

/// What brings pages to the first tier, and where those of them are that have no room there.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingPut {
    pub(super) ticket: Option<Ticket>,
    pub(super) spilled: Option<Arc<Spilled>>,
}

impl WriteQueue {
    pub(super) fn new(to: Tier, policy: WritePolicy, max_bytes: u64) -> Self {
        let dirty = super::write_back::DirtyPages::default();
        Self { to, policy, dirty, max_bytes, state: Parked::default() }
    }

    /// Whether such pages may go there: a remote holds prompts from their first page on.
    pub(super) fn accepts(&self, pages: &Pages) -> bool {
        pages.scope.chained || self.to != Tier::Remote
    }

    pub(super) fn queued_bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Whether less than half of what may wait does.
    pub(super) fn has_room(&self) -> bool {
        self.queued_bytes() < self.max_bytes / 2
    }

    /// Tells the thread to end when its job is done.
    pub(super) fn close(&self) {
        self.state.lock().closing = true;
        self.state.wake_all();
    }

    pub(super) fn is_running(&self) -> bool {
        self.state.lock().threads > 0
    }

    /// Leaves out what waits of the pages that `mine` knows, and ends what is under way of them.
    /// Returns what did not begin, and whether there was anything.
    pub(super) fn cancel(
        &self,
        mine: impl Fn(&Pages, &Range<usize>) -> bool,
    ) -> (Vec<(Pages, Range<usize>)>, bool) {
        let mut state = self.state.lock();
        let (cancelled, kept): (Vec<Job>, _) =
            state.jobs.drain(..).partition(|job| mine(&job.pages, &job.range));
        state.jobs = kept.into();
        state.bytes -= cancelled.iter().map(|job| job.pages.bytes(job.range.len())).sum::<u64>();
        let stopped = state.running.take_if(|(pages, range)| mine(pages, range)).is_some();
        let any = stopped || !cancelled.is_empty();
        (cancelled.into_iter().map(|job| (job.pages, job.range)).collect(), any)
    }

    /// Whether nobody has cancelled what is being written.
    fn is_job_wanted(&self) -> bool {
        self.state.lock().running.is_some()
    }

    /// Since when the tier has not taken what it was to, if that is so.
    pub(super) fn failed_at(&self) -> Option<Instant> {
        self.state.lock().failed_at
    }

    /// Waits until nothing waits and nothing is being written. Returns whether that came to be.
    pub(super) fn drain(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        while state.threads > 0 && (state.busy || !state.jobs.is_empty()) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.closing {
                return false;
            }
            state = self.state.wait_for(state, left);
        }
        true
    }
}

impl Shared {
    /// Has pages written down that are on the tier above, or will be when `after` is done, if they
    /// are not on their way already.
    pub(super) fn queue_write(
        self: &Arc<Self>,
        queue: &WriteQueue,
        pages: &Pages,
        range: Range<usize>,
        put: PendingPut,
    ) {
        self.queue_write_with(queue, pages, range, put, false);
    }

    /// Likewise; with `evict_source` the tier above lets them go when they are there.
    pub(super) fn queue_write_with(
        self: &Arc<Self>,
        queue: &WriteQueue,
        pages: &Pages,
        range: Range<usize>,
        put: PendingPut,
        evict_source: bool,
    ) {
        if !queue.accepts(pages) {
            return;
        }
        // The table takes pages that end alike for the same.
        let claimed = if pages.scope.chained {
            self.table.claim(queue.to, Phase::Storing, &pages.hashes, range)
        } else {
            vec![range]
        };
        for range in claimed {
            let taken =
                range.start + self.push_job(queue, pages, &range, put.clone(), evict_source);
            self.counts_of(queue.to).dropped.add((range.end - taken) as u64);
            self.table.abandon(queue.to, &pages.hashes, taken..range.end);
        }
    }

    /// Returns how many of the first pages there is room for.
    fn push_job(
        self: &Arc<Self>,
        queue: &WriteQueue,
        pages: &Pages,
        range: &Range<usize>,
        put: PendingPut,
        evict_source: bool,
    ) -> usize {
        let mut state = queue.state.lock();
        let room = (queue.max_bytes.saturating_sub(state.bytes) / pages.page_bytes) as usize;
        let count = range.len().min(room);
        if state.closing || count == 0 {
            return 0;
        }
        if !self.ensure_worker(queue, &mut state) {
            return 0;
        }
        state.bytes += pages.bytes(count);
        let job = Job {
            pages: pages.clone(),
            range: range.start..range.start + count,
            puts: vec![put],
            evict_source,
        };
        match state.jobs.back_mut().filter(|last| job.follows(last)) {
            // A prompt that grows page by page is written in few pieces.
            Some(last) => {
                last.range.end = job.range.end;
                last.pages = job.pages;
                last.puts.extend(job.puts);
            }
            None => state.jobs.push_back(job),
        }
        queue.state.wake_all();
        count
    }

    /// Sees to it that somebody looks how full the tier above is.
    pub(super) fn watch_fill(self: &Arc<Self>, queue: &WriteQueue) {
        self.ensure_worker(queue, &mut queue.state.lock());
    }

    /// Starts the thread of a link, the first time. Returns whether there is one.
    fn ensure_worker(self: &Arc<Self>, queue: &WriteQueue, state: &mut QueueState) -> bool {
        if state.threads == 0 && !state.closing {
            let (shared, to) = (Arc::clone(self), queue.to);
            let name = format!("ritornello-{}", super::figures::tier_word(to));
            let thread = thread::Builder::new().name(name);
            state.threads = usize::from(thread.spawn(move || shared.write_worker(to)).is_ok());
        }
        state.threads > 0
    }

    fn write_worker(self: Arc<Self>, to: Tier) {
        let Some(queue) = self.write_queue(to) else { return };
        loop {
            let mut state = queue.state.lock();
            let job = loop {
                if state.closing {
                    state.threads = 0;
                    state.jobs.clear();
                    state.bytes = 0;
                    queue.state.wake_all();
                    return;
                }
                if let Some(job) = state.jobs.pop_front() {
                    break job;
                }
                if queue.policy == WritePolicy::Back {
                    state = queue.state.wait_for(state, WATCH_INTERVAL);
                    if state.jobs.is_empty() && !state.closing {
                        drop(state);
                        self.write_back_if_full(queue);
                        state = queue.state.lock();
                    }
                } else {
                    state = queue.state.wait(state);
                }
            };
            state.busy = true;
            state.running = Some((job.pages.clone(), job.range.clone()));
            drop(state);
            let bytes = job.pages.bytes(job.range.len());
            let whole = self.write_job(queue, &job);
            let mut state = queue.state.lock();
            // What somebody stopped was not refused.
            state.failed_at = (!whole && state.running.is_some()).then(Instant::now);
            state.bytes -= bytes;
            state.busy = false;
            state.running = None;
            queue.state.wake_all();
        }
    }

    /// Returns whether all of it is there now.
    fn write_job(self: &Arc<Self>, queue: &WriteQueue, job: &Job) -> bool {
        let until = Instant::now() + PUT_TIMEOUT;
        for ticket in job.puts.iter().filter_map(|put| put.ticket.as_ref()) {
            let _ = ticket.wait(Some(until.saturating_duration_since(Instant::now())));
        }
        self.loads.wait(YIELD_TO_LOADS);
        let (pages, range) = (&job.pages, job.range.clone());
        let there = match (queue.to, &self.remote) {
            (Tier::Remote, Some(slot)) => self.write_remote(slot, job),
            _ => self.write_local(queue.to, job),
        };
        self.table.mark_present(queue.to, &pages.hashes, range.start..range.start + there, &[]);
        self.table.abandon(queue.to, &pages.hashes, range.start + there..range.end);
        if queue.to != self.top().kind {
            self.record_arrival(queue.to, pages, range.start..range.start + there);
        }
        if job.evict_source {
            self.evict_source(queue, pages, range.start..range.start + there);
        }
        self.trim_table();
        there == range.len()
    }

    /// Copies pages to `buffer`, from the tiers above or from what had no room on the first. Returns how
    /// many of the first of them came.
    fn gather(
        &self,
        below: Tier,
        job: &Job,
        range: Range<usize>,
        buffer: &mut [u8],
        control: &Control,
    ) -> usize {
        let (pages, size) = (&job.pages, job.pages.page_bytes as usize);
        let spilled = |page| job.puts.iter().find_map(|put| put.spilled.as_ref()?.page(page));
        let mut at = range.start;
        while at < range.end {
            let before = at;
            let rest = &mut buffer[(at - range.start) * size..];
            at += self.copy(below, pages, at..range.end, rest, control);
            while at < range.end
                && let Some(page) = spilled(at).filter(|page| page.len() == size)
            {
                buffer[(at - range.start) * size..][..size].copy_from_slice(page);
                at += 1;
            }
            if at == before {
                break;
            }
        }
        at - range.start
    }

    /// Returns how many of the first pages are there now.
    fn write_local(&self, to: Tier, job: &Job) -> usize {
        let (pages, range) = (&job.pages, job.range.clone());
        let Some(tier) = self.local_tier(to) else { return 0 };
        let counts = self.counts_of(to);
        let at_once = (COPY_BYTES / pages.page_bytes).max(1) as usize;
        let mut buffer = Vec::new();
        let mut at = range.start;
        let promotes = to == self.top().kind;
        while at < range.end && !self.is_closing() {
            if promotes {
                self.loads.wait(YIELD_TO_LOADS);
                if !self.write_queue(to).is_some_and(WriteQueue::is_job_wanted) {
                    break;
                }
            }
            let end = range.end.min(at + at_once);
            let keys = pages.refs(at..end);
            let control = control_within(WRITE_TIMEOUT);
            // Pages that are there need not be read.
            let there = tier.store().exists(&pages.scope, &keys).unwrap_or_default();
            let mut there = there.iter().take_while(|there| **there).count();
            if there > 0 && !promotes {
                // Another process may have written them: with this, the tier's `flush` covers them.
                let (stored, terms) = (&keys[..there], Terms::behind(pages.before(at)));
                let stored = tier.store().put_stored(&pages.scope, stored, &terms, &control);
                there = stored.unwrap_or(0);
            }
            at += there;
            if at == end {
                continue;
            }
            let bytes = pages.bytes(end - at);
            buffer.resize(bytes as usize, 0);
            let came = self.gather(to, job, at..end, &mut buffer, &control);
            if came < end - at {
                counts.lost.add((range.end - at - came) as u64);
            }
            if came == 0 {
                break;
            }
            if !tier.rate.wait_to_write(pages.bytes(came), &control) {
                counts.dropped.add(came as u64);
                break;
            }
            let slices: Vec<&[u8]> =
                buffer.chunks_exact(pages.page_bytes as usize).take(came).collect();
            let written = tier.store().put_batch(
                &pages.scope,
                &keys[there..there + came],
                &BorrowedPages::new(&slices),
                &Terms::behind(pages.before(at)),
                &control,
            );
            let written = match written {
                Ok(outcome) => outcome.pages,
                Err(error) => {
                    tracing::debug!(%error, ?to, "pages were not written down");
                    0
                }
            };
            if promotes {
                counts.promoted.add(written as u64);
            } else {
                counts.written.add(written as u64);
                counts.written_bytes.add(pages.bytes(written));
            }
            at += written;
            if written < came {
                counts.dropped.add((range.end - at) as u64);
            }
            if at < end {
                break;
            }
        }
        at.max(range.start) - range.start
    }

    /// Likewise. Objects hold groups of pages, counted from the start of the prompt: what is missing
    /// before the range is written as well, or nobody would find what is in it.
    fn write_remote(&self, slot: &RemoteSlot, job: &Job) -> usize {
        let (pages, range) = (&job.pages, job.range.clone());
        let counts = self.counts_of(Tier::Remote);
        if pages.parent.is_some() {
            // Where in its prompt a page is decides in which object it lies.
            counts.dropped.add(range.len() as u64);
            return 0;
        }
        let max_bytes = OBJECTS_AT_ONCE * RemoteTier::object_pages(pages.page_bytes);
        let (mut at, mut buffer) = (0, Vec::new());
        while at < range.end && !self.is_closing() {
            let missing = with_prompt(pages, range.end, |prompt| {
                slot.tier.missing(prompt, at, deadline_in(WRITE_TIMEOUT))
            });
            let Ok(missing) = missing else {
                counts.dropped.add((range.end - at.max(range.start)) as u64);
                break;
            };
            at = missing.start;
            let end = missing.end.min(at + max_bytes);
            if at == end {
                break;
            }
            buffer.resize(pages.bytes(end - at) as usize, 0);
            let came = self.gather(
                Tier::Remote,
                job,
                at..end,
                &mut buffer,
                &control_within(WRITE_TIMEOUT),
            );
            if at + came < end {
                counts.lost.add((range.end - range.start.max(at + came)) as u64);
            }
            if !slot.rate.wait_to_write(pages.bytes(came), &control_within(WRITE_TIMEOUT)) {
                counts.dropped.add(came as u64);
                break;
            }
            let page = |page: usize| {
                let from = (page - at) * pages.page_bytes as usize;
                &buffer[from..from + pages.page_bytes as usize]
            };
            let before = slot.tier.stats();
            let there = with_prompt(pages, at + came, |prompt| {
                slot.tier.put(prompt, at..at + came, page, deadline_in(WRITE_TIMEOUT))
            })
            .unwrap_or(0);
            let after = slot.tier.stats();
            let written = after.pages_written - before.pages_written;
            counts.written.add(written);
            counts.written_bytes.add(pages.bytes(written as usize));
            counts.dropped.add(after.pages_dropped - before.pages_dropped);
            at += there;
            if at < end {
                break;
            }
        }
        at.max(range.start) - range.start
    }
}

impl Job {
    /// Whether it is of the pages behind those of `last`: its last page says so, where it commits to all
    /// before it.
    fn follows(&self, last: &Self) -> bool {
        let end = last.range.end;
        self.pages.scope.chained
            && self.range.start == end
            && end > 0
            && self.evict_source == last.evict_source
            && last.pages.hashes.get(end - 1) == self.pages.hashes.get(end - 1)
            && last.pages.len() == end
    }
}

fn deadline_in(timeout: Duration) -> Instant {
    Instant::now() + timeout
}

fn control_within(timeout: Duration) -> Control {
    Control { deadline: Some(deadline_in(timeout)), ..Control::default() }
}
