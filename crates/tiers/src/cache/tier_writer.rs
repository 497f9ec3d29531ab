//! Writes pages to one tier in the background: claims them in the page table, queues them, and
//! copies them to the tier. A job ([`WriteJob`]) writes consecutive pages of one prompt; in an
//! unchained scope, any pages.

use super::local_tier::LocalTier;
use super::pending_put::PendingPut;
use super::prompt::PromptPages;
use super::read::copy_for;
use super::stats::tier_name;
use super::tier_policies::WritePolicy;
use super::tier_set::{RemoteHandle, TierSet};
use super::write_back::WriteBack;
use super::write_queue::{Next, WriteJob, WriteQueue};
use crate::Residence;
use crate::remote::{FAILED_OBJECTS_MAX, step_pages};
use ritornello_format::residency::Tier;
use ritornello_store::{PutOptions, time_limit};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time that a job, and each step of a promotion, waits for loads in progress to end. After
/// this time the job runs concurrently with loads, because a busy cache would otherwise never
/// write.
const YIELD_TO_LOADS: Duration = Duration::from_secs(1);
/// Minimum timeout of a job's wait for the puts that store its pages
/// ([`Store::time_limit`](ritornello_store::Store::time_limit)).
const PUT_TIMEOUT: Duration = Duration::from_secs(30);
/// Minimum timeout of one write to a tier ([`time_limit`]), and timeout of one query of a remote.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum bytes copied to a local tier in one step; a longer page is a step alone.
const COPY_BYTES: u64 = 8 << 20;
/// Interval at which the worker of a write-back tier checks the used space of the tier above.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// The writer of one tier. Pages that it cannot queue or write are counted as dropped or lost.
/// Pages of waiting jobs are not counted if the jobs are cancelled, or discarded because the queue
/// closes. Pages of a job that is cancelled while it runs are not counted as dropped.
#[derive(Debug)]
pub(super) struct TierWriter {
    pub(super) to: Tier,
    pub(super) policy: WritePolicy,
    pub(super) queue: WriteQueue,
    /// The dirty pages of the tier above, if this tier has the policy `WriteBack`.
    pub(super) write_back: Option<WriteBack>,
    tiers: Arc<TierSet>,
    /// The writer of the next lower tier. If that tier is write-back, its writer records the pages
    /// that arrive on this tier as dirty.
    below: Option<Arc<TierWriter>>,
}

/// The finished leading part of a job: its pages, up to page `end` of the prompt, were written or
/// given up. `whole`: all of them are on the tier.
struct FinishedPart {
    end: usize,
    whole: bool,
}

/// The result of a write-back batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchEnd {
    /// No dirty pages remain.
    AllQueued,
    /// Dirty pages remain.
    DirtyRemain,
    /// Dirty pages remain, because the queue had no room for pages of the batch.
    QueueFull,
}

impl TierWriter {
    pub(super) fn new(
        tiers: &Arc<TierSet>,
        (to, policy): (Tier, WritePolicy),
        max_bytes: u64,
        below: Option<Arc<Self>>,
    ) -> Arc<Self> {
        let write_back = policy == WritePolicy::WriteBack;
        Arc::new(Self {
            to,
            policy,
            queue: WriteQueue::new(tier_name(to), max_bytes),
            write_back: write_back.then(|| WriteBack::new(Arc::clone(tiers), to)),
            tiers: Arc::clone(tiers),
            below,
        })
    }

    /// Removes pages from the page table's record of the tier, which may have evicted them, so that
    /// they are written again.
    pub(super) fn forget(&self, pages: &PromptPages, range: Range<usize>) {
        self.tiers.table.forget(self.to, &pages.hashes, range);
    }

    /// Queues writes of pages that another tier has, or will have after `put`. In a chained scope,
    /// leaves out pages that are on this tier or queued already, according to the page table.
    pub(super) fn write(
        self: &Arc<Self>,
        pages: &PromptPages,
        range: Range<usize>,
        put: PendingPut,
    ) {
        let (pages, puts) = (pages.clone(), vec![put]);
        let refused = self.enqueue(&WriteJob { pages, range, puts, evict_source: false });
        self.count_dropped(&refused);
    }

    fn count_dropped(&self, refused: &[Range<usize>]) {
        self.tiers
            .counts(self.to)
            .dropped
            .add(refused.iter().map(|pages| pages.len() as u64).sum());
    }

    /// Queues writes of the pages of a job that are not on this tier or queued. Returns the pages
    /// that the queue refused.
    fn enqueue(self: &Arc<Self>, job: &WriteJob) -> Vec<Range<usize>> {
        let (table, pages) = (&self.tiers.table, &job.pages);
        // The page table's claims identify a page by its hash and need chained keys: otherwise an
        // equal last page does not prove that the pages before it are equal.
        let claimed = if pages.scope.chained {
            table.claim(self.to, Residence::Storing, &pages.hashes, job.range.clone())
        } else {
            vec![job.range.clone()]
        };
        let mut refused = Vec::new();
        for range in claimed {
            let job = WriteJob { range: range.clone(), ..job.clone() };
            let fitting = if self.start_worker() { self.queue.push(job) } else { 0 };
            let rest = range.start + fitting..range.end;
            if !rest.is_empty() {
                table.abandon(self.to, &pages.hashes, rest.clone());
                refused.push(rest);
            }
        }
        refused
    }

    /// Records pages that arrived on the tier above as dirty, if this tier has the policy
    /// `WriteBack`.
    pub(super) fn arrived_above(self: &Arc<Self>, pages: &PromptPages, range: Range<usize>) {
        if let Some(write_back) = &self.write_back
            && !range.is_empty()
        {
            match pages.scope.chained {
                true => write_back.add(pages, range),
                // In an unchained scope each page is written and evicted separately.
                false => range.for_each(|page| write_back.add(&pages.select(&[page]), 0..1)),
            }
            // The worker must run even without a queued job, because it checks how full the tier
            // above is.
            self.start_worker();
        }
    }

    /// Queues writes of one batch of dirty pages. With `evict_source` the pages are evicted from
    /// the tier above after they were written, unless they were used again or pages after them are
    /// dirty. Pages that the queue has no room for now stay dirty.
    pub(super) fn write_back_batch(self: &Arc<Self>, evict_source: bool) -> BatchEnd {
        let Some(write_back) = &self.write_back else { return BatchEnd::AllQueued };
        let mut end = BatchEnd::DirtyRemain;
        for (pages, range) in write_back.take_batch(self.queue.room()) {
            self.forget(&pages, range.clone());
            let job = WriteJob { pages, range, puts: Vec::new(), evict_source };
            let refused = self.enqueue(&job);
            if !self.queue.can_ever_take(job.pages.page_bytes) {
                self.count_dropped(&refused);
                continue;
            }
            for range in refused {
                write_back.add(&job.pages, range);
                end = BatchEnd::QueueFull;
            }
        }
        if write_back.dirty_bytes() > 0 { end } else { BatchEnd::AllQueued }
    }

    /// Removes queued jobs that match `filter`. If the current job matches and is a promotion, it
    /// ends before its next step. Returns whether any job matched.
    pub(super) fn cancel(&self, filter: impl Fn(&PromptPages, &Range<usize>) -> bool) -> bool {
        let (cancelled, any) = self.queue.cancel(filter);
        for job in cancelled {
            self.tiers.table.abandon(self.to, &job.pages.hashes, job.range);
        }
        any
    }

    fn start_worker(self: &Arc<Self>) -> bool {
        let writer = Arc::clone(self);
        self.queue.start_worker(move || writer.work())
    }

    fn work(self: Arc<Self>) {
        let watch = self.write_back.as_ref().map(|_| WATCH_INTERVAL);
        loop {
            match self.queue.next(watch) {
                Next::Closed => return,
                Next::Idle => self.write_back_if_full(),
                Next::Job(job) => {
                    let whole = self.run(&job);
                    self.queue.finish(job.pages.bytes(job.range.len()), whole);
                }
            }
        }
    }

    /// If the tier above is nearly full, queues writes of dirty pages until the pages still dirty
    /// are within the limit, or half of the queue's bytes are in use.
    fn write_back_if_full(self: &Arc<Self>) {
        let Some(write_back) = &self.write_back else { return };
        let Some(max) = write_back.max_dirty_bytes() else { return };
        while write_back.dirty_bytes() > max
            && self.queue.has_room()
            && self.write_back_batch(true) == BatchEnd::DirtyRemain
        {}
    }

    /// Runs a job. Returns whether all pages of the job are now on the tier.
    fn run(&self, job: &WriteJob) -> bool {
        let bytes = job.pages.bytes(job.range.len());
        let timeout = self.tiers.first().store().time_limit(bytes, PUT_TIMEOUT, true);
        let until = deadline_in(timeout);
        for put in job.puts.iter().filter_map(|put| put.completion.as_ref()) {
            let _ = put.wait(Some(until.saturating_duration_since(Instant::now())));
        }
        self.tiers.loads.wait(YIELD_TO_LOADS);
        let (mut at, mut whole) = (job.range.start, true);
        match self.tiers.remote.as_ref().filter(|_| self.to == Tier::Remote) {
            Some(remote) if !job.pages.scope.chained => whole = self.write_objects(remote, job),
            _ => {
                while at < job.range.end {
                    let done = self.run_part(&WriteJob { range: at..job.range.end, ..job.clone() });
                    whole &= done.whole;
                    at = done.end;
                }
            }
        }
        self.tiers.trim_table();
        whole
    }

    /// Runs a job, or its leading part: in an unchained scope the part ends after the first page
    /// that no other tier has. This page is given up, and the caller continues after it.
    fn run_part(&self, job: &WriteJob) -> FinishedPart {
        let (pages, range) = (&job.pages, job.range.clone());
        let (written, mut lost) = match (self.tiers.local_tier(self.to), &self.tiers.remote) {
            (Some(tier), _) => self.write_local(tier, job),
            (None, Some(remote)) => self.write_remote(remote, job),
            (None, None) => (0, 0),
        };
        let mut end = range.end;
        if !pages.scope.chained && lost > 0 && written + lost == range.len() {
            (end, lost) = (range.start + written + 1, 1);
        }
        let counts = self.tiers.counts(self.to);
        counts.lost.add(lost as u64);
        // Pages of a cancelled job are not counted as dropped: neither a limit nor a failure ended
        // the job.
        if self.queue.is_job_current() {
            counts.dropped.add((end - range.start - written - lost) as u64);
        }
        let arrived = range.start..range.start + written;
        let table = &self.tiers.table;
        table.mark_present(self.to, &pages.hashes, arrived.clone(), &[]);
        table.abandon(self.to, &pages.hashes, arrived.end..end);
        if let Some(below) = &self.below {
            below.arrived_above(pages, arrived.clone());
        }
        if let Some(write_back) = self.write_back.as_ref().filter(|_| job.evict_source) {
            write_back.evict_source(pages, arrived.clone());
        }
        FinishedPart { end, whole: arrived.end == end }
    }

    /// Returns the time to allow for a copy of `bytes` to the local tier `to` from another local
    /// tier.
    fn copy_limit(&self, to: &LocalTier, bytes: u64) -> Duration {
        let tiers = self.tiers.local.iter();
        let limits =
            tiers.map(|tier| tier.store().time_limit(bytes, WRITE_TIMEOUT, tier.kind == to.kind));
        limits.max().unwrap_or(WRITE_TIMEOUT)
    }

    /// Copies pages to `buffer`: from the local tiers above this tier (for a promotion, from those
    /// below it), or from the spilled pages. Returns the number of leading pages copied.
    fn gather(
        &self,
        job: &WriteJob,
        range: Range<usize>,
        buffer: &mut [u8],
        control: &Control,
    ) -> usize {
        let (pages, size) = (&job.pages, job.pages.page_bytes as usize);
        let mut at = range.start;
        while at < range.end {
            let before = at;
            let rest = &mut buffer[(at - range.start) * size..];
            at += copy_for(&self.tiers, self.to, pages, at..range.end, rest, control);
            while at < range.end
                && let Some(page) = job.spilled(at).filter(|page| page.len() == size)
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

    /// Writes a job to a local tier. Returns two numbers: leading pages of the job that are now on
    /// the tier, and pages of the job that are not written because no other tier could supply the
    /// first of them.
    fn write_local(&self, tier: &LocalTier, job: &WriteJob) -> (usize, usize) {
        let (pages, range) = (&job.pages, job.range.clone());
        let counts = self.tiers.counts(self.to);
        let at_once = (COPY_BYTES / pages.page_bytes).max(1) as usize;
        let mut buffer = Vec::new();
        let (mut at, mut lost) = (range.start, 0);
        let promotes = self.to == self.tiers.first().kind;
        while at < range.end && !self.queue.is_closing() {
            if promotes {
                self.tiers.loads.wait(YIELD_TO_LOADS);
                if !self.queue.is_job_current() {
                    break;
                }
            }
            let end = range.end.min(at + at_once);
            let keys = pages.refs(at..end);
            let bytes = pages.bytes(end - at);
            let control = control_within(self.copy_limit(tier, bytes));
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
            let copied = self.gather(job, at..end, &mut buffer, &control);
            if copied < end - at {
                lost = range.end - at - copied;
            }
            if copied == 0 || !tier.rate.wait_in_steps(pages.bytes(copied), &control) {
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
                    tracing::debug!(%error, to = ?self.to, "pages could not be written to a tier");
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
            if at < end {
                break;
            }
        }
        (at - range.start, lost)
    }

    /// Writes a job of a chained scope to the remote. Returns, as `write_local` does, the number of
    /// leading pages of the job that are now on the remote, and of pages that are not written
    /// because no other tier could supply the first of them. Pages before the range that the remote
    /// lacks are written too: without them no lookup reaches the range.
    fn write_remote(&self, remote: &RemoteHandle, job: &WriteJob) -> (usize, usize) {
        let (pages, range) = (&job.pages, job.range.clone());
        if pages.parent.is_some() {
            // An object holds a group of pages counted from the start of the prompt, and the
            // position of these pages in the prompt is unknown, so no object can be written.
            return (0, 0);
        }
        let step = step_pages(pages.page_bytes);
        let (mut at, mut lost, mut buffer) = (0, 0, Vec::new());
        while at < range.end && !self.queue.is_closing() {
            let missing = pages.lend(range.end, |prompt| {
                remote.tier.missing(prompt, at, deadline_in(WRITE_TIMEOUT))
            });
            let Ok(missing) = missing else { break };
            at = missing.start;
            let end = missing.end.min(at + step);
            if at == end {
                break;
            }
            let (copied, objects) = self.send(remote, job, at..end, &mut buffer);
            if at + copied < end {
                lost = range.end - range.start.max(at + copied);
            }
            let present = objects.iter().take_while(|(_, present)| *present);
            at += present.map(|(span, _)| span.len()).sum::<usize>();
            if at < end {
                break;
            }
        }
        (at.max(range.start) - range.start, lost)
    }

    /// Writes a job of an unchained scope to the remote. Each page is a separate object, so a page
    /// that no other tier has, or whose object fails, does not keep later pages from the remote.
    /// Gives up after [`FAILED_OBJECTS_MAX`] failures in a row, like a put of the remote tier.
    /// Returns whether all pages of the job are now on the remote.
    fn write_objects(&self, remote: &RemoteHandle, job: &WriteJob) -> bool {
        let (pages, range) = (&job.pages, job.range.clone());
        let step = step_pages(pages.page_bytes);
        let (mut at, mut written, mut lost) = (range.start, 0, 0);
        let (mut failures, mut buffer) = (0, Vec::new());
        while at < range.end && failures < FAILED_OBJECTS_MAX && !self.queue.is_closing() {
            let missing = pages.lend(range.end, |prompt| {
                remote.tier.missing(prompt, at, deadline_in(WRITE_TIMEOUT))
            });
            let Ok(missing) = missing else { break };
            let end = missing.end.min(missing.start + step);
            let (copied, objects) = match missing.is_empty() {
                true => (0, Vec::new()),
                false => self.send(remote, job, missing.start..end, &mut buffer),
            };
            if objects.len() < copied {
                break;
            }
            let present = (at..missing.start).map(|page| (page..page + 1, true));
            for (page, is_present) in present.chain(objects) {
                failures = if is_present { 0 } else { failures + 1 };
                if is_present {
                    written += 1;
                    if let Some(write_back) = self.write_back.as_ref().filter(|_| job.evict_source)
                    {
                        write_back.evict_source(pages, page);
                    }
                }
            }
            at = missing.start + copied;
            if copied == 0 && at < end {
                lost += 1;
                at += 1;
            }
        }
        let counts = self.tiers.counts(Tier::Remote);
        counts.lost.add(lost as u64);
        // Pages of a cancelled job are not counted as dropped, as in `run_part`.
        if self.queue.is_job_current() {
            counts.dropped.add((range.len() - written - lost) as u64);
        }
        written == range.len()
    }

    /// Copies the leading pages of `range` that other tiers have, and writes their objects to the
    /// remote. Returns the number of pages copied, and the pages of each object with whether the
    /// remote now has it; no objects if no page was copied, the rate limit left no time for them,
    /// or none could be made, because a key is invalid or the key file was not read yet.
    fn send(
        &self,
        remote: &RemoteHandle,
        job: &WriteJob,
        range: Range<usize>,
        buffer: &mut Vec<u8>,
    ) -> (usize, Vec<(Range<usize>, bool)>) {
        let (pages, counts) = (&job.pages, self.tiers.counts(Tier::Remote));
        let bytes = pages.bytes(range.len());
        let timeout = time_limit(bytes, WRITE_TIMEOUT, None);
        buffer.resize(bytes as usize, 0);
        let copied = self.gather(job, range.clone(), buffer, &control_within(timeout));
        if copied == 0 || !remote.rate.wait_in_steps(pages.bytes(copied), &control_within(timeout))
        {
            return (copied, Vec::new());
        }
        let page = |page: usize| {
            let from = (page - range.start) * pages.page_bytes as usize;
            &buffer[from..from + pages.page_bytes as usize]
        };
        let (before, end) = (remote.tier.stats().pages_written, range.start + copied);
        let objects = pages.lend(end, |prompt| {
            remote.tier.put_objects(prompt, range.start..end, page, deadline_in(timeout))
        });
        let written = remote.tier.stats().pages_written - before;
        counts.written.add(written);
        counts.written_bytes.add(pages.bytes(written as usize));
        (copied, objects.unwrap_or_default())
    }
}

fn deadline_in(timeout: Duration) -> Instant {
    Instant::now() + timeout
}

fn control_within(timeout: Duration) -> Control {
    Control { deadline: Some(deadline_in(timeout)), ..Control::default() }
}
