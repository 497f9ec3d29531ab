//! Background writes: one queue for each lower tier, and one for promotions to the first tier.
//!
//! A job holds keys, not bytes: a worker reads the pages from the tiers above when the job's turn
//! comes, after pending loads. The queue is bounded by the bytes to write; pages beyond the bound
//! are dropped and counted, so that no put waits for a slow tier.

use super::prompt::PromptPages;
use super::shared::{RemoteHandle, Shared, with_prompt};
use super::spill::Spilled;
use super::tier_policies::WritePolicy;
use crate::{Residence, remote::RemoteTier};
use ritornello_format::residency::Tier;
use ritornello_store::{PutOptions, Ticket};
use ritornello_volume::ForkSafeLock;
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time that a job waits for loads; then the job runs concurrently with loads, because a
/// busy cache would otherwise never write.
const YIELD_TO_LOADS: Duration = Duration::from_secs(1);
/// Maximum time that a job waits for the put that stores its pages.
const PUT_TIMEOUT: Duration = Duration::from_secs(30);
/// Deadline of one write to a tier, or one query of a remote.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum bytes copied to a local tier, and maximum objects written to a remote, in one step.
const COPY_BYTES: u64 = 8 << 20;
const OBJECTS_AT_ONCE: usize = 4;
/// Interval at which the worker of a write-back tier checks the used space of the tier above.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// The queue of writes to one tier.
#[derive(Debug)]
pub(super) struct WriteQueue {
    pub(super) to: Tier,
    pub(super) policy: WritePolicy,
    pub(super) dirty: super::write_back::DirtyPages,
    max_bytes: u64,
    state: ForkSafeLock<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    jobs: VecDeque<Job>,
    bytes: u64,
    busy: bool,
    /// The job in progress; cleared by a cancellation.
    running: Option<(PromptPages, Range<usize>)>,
    /// When the last job finished, if it wrote fewer pages than it should have.
    failed_at: Option<Instant>,
    threads: usize,
    closing: bool,
}

#[derive(Debug)]
struct Job {
    pages: PromptPages,
    range: Range<usize>,
    /// Puts that store the pages on the tiers above.
    puts: Vec<PendingPut>,
    /// Whether the tier above evicts the pages after they are written.
    evict_source: bool,
}

/// A put in progress and the pages it spilled.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingPut {
    pub(super) ticket: Option<Ticket>,
    pub(super) spilled: Option<Arc<Spilled>>,
}

impl WriteQueue {
    pub(super) fn new(to: Tier, policy: WritePolicy, max_bytes: u64) -> Self {
        let dirty = super::write_back::DirtyPages::default();
        Self { to, policy, dirty, max_bytes, state: ForkSafeLock::default() }
    }

    /// Whether the tier accepts these pages: a remote accepts only scopes whose keys chain.
    pub(super) fn accepts(&self, pages: &PromptPages) -> bool {
        pages.scope.chained || self.to != Tier::Remote
    }

    pub(super) fn queued_bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Whether less than half of the queue's bytes are in use.
    pub(super) fn has_room(&self) -> bool {
        self.queued_bytes() < self.max_bytes / 2
    }

    /// Closes the queue: the worker ends after its current job.
    pub(super) fn close(&self) {
        self.state.lock().closing = true;
        self.state.wake_all();
    }

    pub(super) fn is_running(&self) -> bool {
        self.state.lock().threads > 0
    }

    /// Removes queued jobs that match `filter`, and stops the current job if it matches. Returns
    /// the removed jobs, and whether any job matched.
    pub(super) fn cancel(
        &self,
        filter: impl Fn(&PromptPages, &Range<usize>) -> bool,
    ) -> (Vec<(PromptPages, Range<usize>)>, bool) {
        let mut state = self.state.lock();
        let (cancelled, kept): (Vec<Job>, _) =
            state.jobs.drain(..).partition(|job| filter(&job.pages, &job.range));
        state.jobs = kept.into();
        state.bytes -= cancelled.iter().map(|job| job.pages.bytes(job.range.len())).sum::<u64>();
        let stopped = state.running.take_if(|(pages, range)| filter(pages, range)).is_some();
        let any = stopped || !cancelled.is_empty();
        (cancelled.into_iter().map(|job| (job.pages, job.range)).collect(), any)
    }

    /// Whether the current job has not been cancelled.
    fn is_job_current(&self) -> bool {
        self.state.lock().running.is_some()
    }

    /// When the tier last failed to store all pages of a job, unless a later job succeeded.
    pub(super) fn failed_at(&self) -> Option<Instant> {
        self.state.lock().failed_at
    }

    /// Waits until the queue is empty and no job runs. Returns false at `until`, or if the queue
    /// closes.
    pub(super) fn wait_until_empty(&self, until: Instant) -> bool {
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
    /// Queues writes of pages that are on the tier above, or will be stored on it by `put`, unless
    /// the pages are already stored or queued.
    pub(super) fn queue_write(
        self: &Arc<Self>,
        queue: &WriteQueue,
        pages: &PromptPages,
        range: Range<usize>,
        put: PendingPut,
    ) {
        self.queue_write_with(queue, pages, range, put, false);
    }

    /// Like [`queue_write`](Self::queue_write); with `evict_source` the tier above evicts the pages
    /// after the write.
    pub(super) fn queue_write_with(
        self: &Arc<Self>,
        queue: &WriteQueue,
        pages: &PromptPages,
        range: Range<usize>,
        put: PendingPut,
        evict_source: bool,
    ) {
        if !queue.accepts(pages) {
            return;
        }
        // Claims rely on chained hashes: without a chain, an equal last page does not prove that
        // the earlier pages are equal.
        let claimed = if pages.scope.chained {
            self.table.claim(queue.to, Residence::Storing, &pages.hashes, range)
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

    /// Queues a job. Returns the number of leading pages that fit into the queue.
    fn push_job(
        self: &Arc<Self>,
        queue: &WriteQueue,
        pages: &PromptPages,
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
            // Merges the job, so that a prompt that grows page by page stays in few jobs.
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

    /// Ensures that a worker checks how full the tier above is.
    pub(super) fn watch_fill(self: &Arc<Self>, queue: &WriteQueue) {
        self.ensure_worker(queue, &mut queue.state.lock());
    }

    /// Starts the worker on first use. Returns whether it runs.
    fn ensure_worker(self: &Arc<Self>, queue: &WriteQueue, state: &mut QueueState) -> bool {
        if state.threads == 0 && !state.closing {
            let (shared, to) = (Arc::clone(self), queue.to);
            let name = format!("ritornello-{}", super::stats::tier_name(to));
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
                if queue.policy == WritePolicy::WriteBack {
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
            // A cancelled job is not a failure of the tier.
            state.failed_at = (!whole && state.running.is_some()).then(Instant::now);
            state.bytes -= bytes;
            state.busy = false;
            state.running = None;
            queue.state.wake_all();
        }
    }

    /// Returns whether all pages of the job are now on the tier.
    fn write_job(self: &Arc<Self>, queue: &WriteQueue, job: &Job) -> bool {
        let until = Instant::now() + PUT_TIMEOUT;
        for ticket in job.puts.iter().filter_map(|put| put.ticket.as_ref()) {
            let _ = ticket.wait(Some(until.saturating_duration_since(Instant::now())));
        }
        self.loads.wait(YIELD_TO_LOADS);
        let (pages, range) = (&job.pages, job.range.clone());
        let written = match (queue.to, &self.remote) {
            (Tier::Remote, Some(slot)) => self.write_remote(slot, job),
            _ => self.write_local(queue.to, job),
        };
        self.table.mark_present(queue.to, &pages.hashes, range.start..range.start + written, &[]);
        self.table.abandon(queue.to, &pages.hashes, range.start + written..range.end);
        if queue.to != self.first_tier().kind {
            self.record_arrival(queue.to, pages, range.start..range.start + written);
        }
        if job.evict_source {
            self.evict_source(queue, pages, range.start..range.start + written);
        }
        self.trim_table();
        written == range.len()
    }

    /// Copies pages to `buffer`, from the tiers above or from the spilled pages. Returns the number
    /// of leading pages copied.
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

    /// Writes a job to a local tier. Returns the number of leading pages of the job that are now on
    /// the tier.
    fn write_local(&self, to: Tier, job: &Job) -> usize {
        let (pages, range) = (&job.pages, job.range.clone());
        let Some(tier) = self.local_tier(to) else { return 0 };
        let counts = self.counts_of(to);
        let at_once = (COPY_BYTES / pages.page_bytes).max(1) as usize;
        let mut buffer = Vec::new();
        let mut at = range.start;
        let promotes = to == self.first_tier().kind;
        while at < range.end && !self.is_closing() {
            if promotes {
                self.loads.wait(YIELD_TO_LOADS);
                if !self.write_queue(to).is_some_and(WriteQueue::is_job_current) {
                    break;
                }
            }
            let end = range.end.min(at + at_once);
            let keys = pages.refs(at..end);
            let control = control_within(WRITE_TIMEOUT);
            // Pages that the tier already has are not read.
            let present = tier.store().exists(&pages.scope, &keys).unwrap_or_default();
            let mut present = present.iter().take_while(|present| **present).count();
            if present > 0 && !promotes {
                // Another process may have written the pages: `put_stored` makes the tier's `flush`
                // cover them.
                let (stored, options) = (&keys[..present], PutOptions::after(pages.before(at)));
                let stored = tier.store().put_stored(&pages.scope, stored, &options, &control);
                present = stored.unwrap_or(0);
            }
            at += present;
            if at == end {
                continue;
            }
            let bytes = pages.bytes(end - at);
            buffer.resize(bytes as usize, 0);
            let copied = self.gather(to, job, at..end, &mut buffer, &control);
            if copied < end - at {
                counts.lost.add((range.end - at - copied) as u64);
            }
            if copied == 0 {
                break;
            }
            if !tier.rate.wait_to_write(pages.bytes(copied), &control) {
                counts.dropped.add(copied as u64);
                break;
            }
            let slices: Vec<&[u8]> =
                buffer.chunks_exact(pages.page_bytes as usize).take(copied).collect();
            let written = tier.store().put_batch(
                &pages.scope,
                &keys[present..present + copied],
                &BorrowedPages::new(&slices),
                &PutOptions::after(pages.before(at)),
                &control,
            );
            let written = match written {
                Ok(outcome) => outcome.pages,
                Err(error) => {
                    tracing::debug!(%error, ?to, "pages could not be written to a lower tier");
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
            if written < copied {
                counts.dropped.add((range.end - at) as u64);
            }
            if at < end {
                break;
            }
        }
        at.max(range.start) - range.start
    }

    /// Writes a job to the remote. Returns the number of leading pages of the job that are now on
    /// the remote. Objects hold groups of pages counted from the start of the prompt, so missing
    /// pages before the range are written too: without these pages no lookup reaches the range.
    fn write_remote(&self, slot: &RemoteHandle, job: &Job) -> usize {
        let (pages, range) = (&job.pages, job.range.clone());
        let counts = self.counts_of(Tier::Remote);
        if pages.parent.is_some() {
            // The object of a page depends on its position in the prompt, which is unknown here.
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
            let copied = self.gather(
                Tier::Remote,
                job,
                at..end,
                &mut buffer,
                &control_within(WRITE_TIMEOUT),
            );
            if at + copied < end {
                counts.lost.add((range.end - range.start.max(at + copied)) as u64);
            }
            if !slot.rate.wait_to_write(pages.bytes(copied), &control_within(WRITE_TIMEOUT)) {
                counts.dropped.add(copied as u64);
                break;
            }
            let page = |page: usize| {
                let from = (page - at) * pages.page_bytes as usize;
                &buffer[from..from + pages.page_bytes as usize]
            };
            let before = slot.tier.stats();
            let present = with_prompt(pages, at + copied, |prompt| {
                slot.tier.put(prompt, at..at + copied, page, deadline_in(WRITE_TIMEOUT))
            })
            .unwrap_or(0);
            let after = slot.tier.stats();
            let written = after.pages_written - before.pages_written;
            counts.written.add(written);
            counts.written_bytes.add(pages.bytes(written as usize));
            counts.dropped.add(after.pages_dropped - before.pages_dropped);
            at += present;
            if at < end {
                break;
            }
        }
        at.max(range.start) - range.start
    }
}

impl Job {
    /// Whether this job continues `last`: in a chained scope an equal last page proves equal pages
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
