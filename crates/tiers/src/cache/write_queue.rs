//! The queue of background writes to one tier, and its worker thread.
//!
//! A job holds keys, and the bytes of spilled pages only: the worker reads all other pages from
//! other tiers when it runs the job. The queue is bounded by the bytes to write, and by the keys
//! that its jobs hold; pages beyond a bound are refused, so that no put waits for a slow tier.

use super::pending_put::PendingPut;
use super::prompt::PromptPages;
use ritornello_volume::{ForkSafeLock, ThreadPool};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Maximum number of keys that the waiting jobs hold, which take about 100 bytes each with their
/// hashes. A single waiting job may hold more.
const MAX_KEYS: usize = 1 << 19;
/// Number of the last waiting jobs that a new job may extend: prompts that grow page by page at the
/// same time.
const MERGE_JOBS: usize = 64;

#[derive(Debug)]
pub(super) struct WriteQueue {
    max_bytes: u64,
    /// Bytes of the jobs, the current job included. Changed under the lock on `state`.
    bytes: Arc<AtomicU64>,
    state: ForkSafeLock<State>,
    /// The worker's thread. The worker takes jobs from `state` instead of the pool's queue, because
    /// waiting jobs are merged, and because the worker of a write-back tier watches the tier above
    /// while no job waits.
    thread: ThreadPool<Box<dyn FnOnce() + Send>>,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<WriteJob>,
    /// Keys that `jobs` hold.
    keys: usize,
    busy: bool,
    /// The job in progress; cleared by a cancellation.
    running: Option<(PromptPages, Range<usize>)>,
    /// When the last job ended, if the job left pages unwritten and was not cancelled.
    failed_at: Option<Instant>,
    started: bool,
    closing: bool,
}

#[derive(Clone, Debug)]
pub(super) struct WriteJob {
    pub(super) pages: PromptPages,
    pub(super) range: Range<usize>,
    /// Puts of these pages to the first tier, which may still run.
    pub(super) puts: Vec<PendingPut>,
    /// Whether the pages are evicted from the tier above after they are written, unless they were
    /// used again, or pages after them are dirty: not yet written to this tier.
    pub(super) evict_source: bool,
}

/// The next step of the worker.
pub(super) enum Next {
    Job(WriteJob),
    /// No job was queued within the interval.
    Idle,
    Closed,
}

impl WriteQueue {
    /// A queue of at most `max_bytes`, for the tier `name`.
    pub(super) fn new(name: &str, max_bytes: u64) -> Self {
        let thread = ThreadPool::new(format!("ritornello-{name}"), 1, 1);
        Self { max_bytes, bytes: Arc::default(), state: ForkSafeLock::default(), thread }
    }

    pub(super) fn queued_bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// The counter of the queued bytes, for reports that outlive the queue.
    pub(super) fn byte_counter(&self) -> &Arc<AtomicU64> {
        &self.bytes
    }

    /// Bytes that the queue still takes.
    pub(super) fn room(&self) -> u64 {
        self.max_bytes.saturating_sub(self.queued_bytes())
    }

    /// Whether the queue takes a page of `page_bytes` while no other job waits.
    pub(super) fn can_ever_take(&self, page_bytes: u64) -> bool {
        let state = self.state.lock();
        state.started && !state.closing && page_bytes <= self.max_bytes
    }

    /// Whether less than half of the queue's bytes are in use.
    pub(super) fn has_room(&self) -> bool {
        self.queued_bytes() < self.max_bytes / 2
    }

    /// Closes the queue: the worker, if it was started, ends after its current job, and all other
    /// jobs are dropped.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        let dropped = std::mem::take(&mut state.jobs);
        state.keys = 0;
        self.bytes.fetch_sub(dropped.iter().map(WriteJob::bytes).sum::<u64>(), Relaxed);
        drop(state);
        self.state.wake_all();
        self.thread.close();
        // Drop the jobs outside the lock, because this frees the staging memory of spilled pages.
        drop(dropped);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.state.lock().closing
    }

    /// Waits until the worker of a closed queue has ended, at most until `deadline`.
    pub(super) fn wait_ended(&self, deadline: Instant) {
        self.thread.wait_ended(deadline);
    }

    /// Starts the worker, unless it was started or the queue is closed. The worker calls `work`
    /// once. Returns whether the worker was started, now or earlier.
    pub(super) fn start_worker(&self, work: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.state.lock();
        if !state.started && !state.closing {
            state.started = self.thread.submit(Box::new(work)).is_ok();
        }
        state.started
    }

    /// Queues the leading pages of a job that fit into the queue, and drops the rest of the job.
    /// Returns the number of queued pages; zero after the queue was closed.
    pub(super) fn push(&self, mut job: WriteJob) -> usize {
        let mut state = self.state.lock();
        let room = (self.room() / job.pages.page_bytes) as usize;
        let count = job.range.len().min(room);
        if state.closing || count == 0 {
            return 0;
        }
        let recent = state.jobs.len().saturating_sub(MERGE_JOBS);
        let merged = state.jobs.range(recent..).rposition(|last| job.follows(last));
        let merged = merged.map(|at| recent + at);
        let freed = merged.map_or(0, |at| state.jobs[at].pages.len());
        let keys = state.keys - freed + job.pages.len();
        let others = state.jobs.len() - usize::from(merged.is_some());
        if keys > MAX_KEYS && others > 0 {
            return 0;
        }
        state.keys = keys;
        job.range.end = job.range.start + count;
        self.bytes.fetch_add(job.pages.bytes(count), Relaxed);
        match merged.and_then(|at| state.jobs.get_mut(at)) {
            // Merge the job into a queued job, so that a prompt that grows page by page stays in
            // few jobs. Puts that have ended are dropped, so that the job does not collect them.
            Some(last) => {
                last.range.end = job.range.end;
                last.pages = job.pages;
                last.puts.retain(|put| !put.is_settled());
                last.puts.extend(job.puts);
            }
            None => state.jobs.push_back(job),
        }
        self.state.wake_all();
        count
    }

    /// For the worker: waits for a job; with `idle`, at most for this interval.
    pub(super) fn next(&self, idle: Option<Duration>) -> Next {
        let mut state = self.state.lock();
        let mut has_waited = false;
        loop {
            if state.closing {
                return Next::Closed;
            }
            if let Some(job) = state.jobs.pop_front() {
                state.keys -= job.pages.len();
                state.busy = true;
                state.running = Some((job.pages.clone(), job.range.clone()));
                return Next::Job(job);
            }
            state = match idle {
                Some(_) if has_waited => return Next::Idle,
                Some(interval) => self.state.wait_for(state, interval),
                None => self.state.wait(state),
            };
            has_waited = true;
        }
    }

    /// For the worker: ends the current job, which holds `bytes`. `whole`: whether it wrote all its
    /// pages.
    pub(super) fn finish(&self, bytes: u64, whole: bool) {
        let mut state = self.state.lock();
        // A cancelled job is not a failure of the tier.
        state.failed_at = (!whole && state.running.is_some()).then(Instant::now);
        self.bytes.fetch_sub(bytes, Relaxed);
        state.busy = false;
        state.running = None;
        self.state.wake_all();
    }

    /// Removes queued jobs that match `filter`. A current job that matches is marked as cancelled:
    /// a promotion then ends before its next step, any other job continues. Returns the removed
    /// jobs, and whether any job matched.
    pub(super) fn cancel(
        &self,
        filter: impl Fn(&PromptPages, &Range<usize>) -> bool,
    ) -> (Vec<WriteJob>, bool) {
        let mut state = self.state.lock();
        let (cancelled, kept): (Vec<WriteJob>, _) =
            state.jobs.drain(..).partition(|job| filter(&job.pages, &job.range));
        state.keys -= cancelled.iter().map(|job| job.pages.len()).sum::<usize>();
        state.jobs = kept.into();
        self.bytes.fetch_sub(cancelled.iter().map(WriteJob::bytes).sum::<u64>(), Relaxed);
        let stopped = state.running.take_if(|(pages, range)| filter(pages, range)).is_some();
        let any = stopped || !cancelled.is_empty();
        (cancelled, any)
    }

    /// Whether a job runs and has not been cancelled.
    pub(super) fn is_job_current(&self) -> bool {
        self.state.lock().running.is_some()
    }

    /// When the last job ended, if that job left pages unwritten and was not cancelled.
    pub(super) fn failed_at(&self) -> Option<Instant> {
        self.state.lock().failed_at
    }

    /// Waits until the queue is empty and no job runs. Returns false at `until`, or if the queue
    /// closes.
    pub(super) fn wait_until_empty(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        while state.busy || !state.jobs.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.closing {
                return false;
            }
            state = self.state.wait_for(state, left);
        }
        true
    }
}

impl WriteJob {
    fn bytes(&self) -> u64 {
        self.pages.bytes(self.range.len())
    }

    /// Whether this job can be merged into `last`: it writes a continuation of the same prompt. In
    /// a chained scope the hash of the last page of `last` proves that all pages before it are
    /// equal.
    fn follows(&self, last: &Self) -> bool {
        let end = last.range.end;
        self.pages.scope.chained
            && self.range.start == end
            && end > 0
            && self.evict_source == last.evict_source
            && last.pages.hashes.get(end - 1) == self.pages.hashes.get(end - 1)
            && last.pages.len() == end
    }

    /// The bytes of page `page` of the prompt, if a put of this job spilled it.
    pub(super) fn spilled(&self, page: usize) -> Option<&[u8]> {
        self.puts.iter().find_map(|put| put.spilled.as_ref()?.page(page))
    }
}

#[cfg(test)]
mod tests {
    use super::super::pending_put::Spilled;
    use super::*;
    use ritornello_format::Scope;

    #[test]
    fn closing_before_the_worker_began_releases_the_jobs() {
        let (queue, spilled) = (WriteQueue::new("disk", 100), Arc::<Spilled>::default());
        let scope = Arc::new(Scope::opaque("queue", 10, true));
        let pages = PromptPages::new(scope, vec![[1; 16].into()], None).unwrap();
        let puts = vec![PendingPut { completion: None, spilled: Some(Arc::clone(&spilled)) }];
        assert_eq!(queue.push(WriteJob { pages, range: 0..1, puts, evict_source: false }), 1);
        assert_eq!((Arc::strong_count(&spilled), queue.queued_bytes()), (2, 10));
        queue.close();
        assert_eq!((Arc::strong_count(&spilled), queue.queued_bytes()), (1, 0));
        assert!(!queue.start_worker(|| {}));
    }

    fn job(number: u8, pages: usize, first: usize) -> WriteJob {
        let key = |at: usize| [[number; 8], (at as u64).to_le_bytes()].concat().into();
        let scope = Arc::new(Scope::opaque("queue", 10, true));
        let pages = PromptPages::new(scope, (0..pages).map(key).collect(), None).unwrap();
        let range = first..pages.len();
        WriteJob { pages, range, puts: vec![PendingPut::default()], evict_source: false }
    }

    #[test]
    fn prompts_that_grow_in_turns_stay_one_job_each() {
        let queue = WriteQueue::new("disk", 1 << 20);
        for end in 1..=200 {
            for number in 0..8 {
                assert_eq!(queue.push(job(number, end, end - 1)), 1);
            }
        }
        let state = queue.state.lock();
        assert_eq!((state.jobs.len(), state.keys), (8, 1_600));
        assert!(state.jobs.iter().all(|job| job.range == (0..200) && job.puts.len() == 1));
    }

    #[test]
    fn keys_of_waiting_jobs_are_bounded() {
        let queue = WriteQueue::new("disk", 1 << 20);
        let pages = MAX_KEYS / 4 + 1;
        for number in 0..5 {
            assert_eq!(queue.push(job(number, pages, pages - 1)), usize::from(number < 3));
        }
        assert_eq!((queue.state.lock().keys, queue.queued_bytes()), (3 * pages, 30));
        assert!(matches!(queue.next(None), Next::Job(_)));
        assert_eq!(queue.push(job(3, pages, pages - 1)), 1);
        assert_eq!(queue.cancel(|_, _| true).0.len(), 3);
        assert_eq!(queue.state.lock().keys, 0);
        assert_eq!(queue.push(job(6, MAX_KEYS + 1, MAX_KEYS)), 1);
    }
}
