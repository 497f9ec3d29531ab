//! Writing down: pages of the tiers above go to a slower one in the background; and, likewise, up.
//!
//! A job holds keys, no bytes: they are read from the tier above when it is their turn, and that is
//! after all loads. What waits is bounded by the bytes that it will take to write; what finds no room
//! is dropped and counted, so that nobody who puts ever waits for a slow tier.

use super::left::Left;
use super::policy::WritePolicy;
use super::prompt::Pages;
use super::shared::{Far, Shared, with_prompt};
use crate::{Phase, remote::RemoteTier};
use ritornello_format::residency::Tier;
use ritornello_store::{PutOptions, Ticket};
use ritornello_volume::Parked;
use ritornello_volume::memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Loads go first for so long; then a job goes beside them, or a busy cache would never write.
const SLACK: Duration = Duration::from_secs(1);
/// A put that a job waits for is given up then.
const PUT: Duration = Duration::from_secs(30);
/// What a remote has of a prompt, and one write to either kind of tier.
const WRITE: Duration = Duration::from_secs(30);
/// Bytes that are copied at once, and objects of a remote.
const COPY: u64 = 8 << 20;
const OBJECTS: usize = 4;
/// How often a thread that waits for `write_back` looks how full the tier above is.
const LOOK: Duration = Duration::from_millis(500);

/// The way to one tier.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) to: Tier,
    pub(super) policy: WritePolicy,
    pub(super) back: super::back::Back,
    most: u64,
    queue: Parked<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    bytes: u64,
    busy: bool,
    /// The pages that are on their way, unless nobody wants them any more.
    running: Option<(Pages, Range<usize>)>,
    /// When a job came to less than it was to, if the last one did.
    refused: Option<Instant>,
    threads: usize,
    closing: bool,
}

#[derive(Debug)]
struct Job {
    pages: Pages,
    range: Range<usize>,
    /// Puts that bring the pages to the tiers above.
    after: Vec<After>,
    /// Whether the tier above is to let them go then.
    leave: bool,
}

/// What brings pages to the first tier, and where those of them are that have no room there.
#[derive(Clone, Debug, Default)]
pub(super) struct After {
    pub(super) put: Option<Ticket>,
    pub(super) left: Option<Arc<Left>>,
}

impl Link {
    pub(super) fn new(to: Tier, policy: WritePolicy, most: u64) -> Self {
        let back = super::back::Back::default();
        Self { to, policy, back, most, queue: Parked::default() }
    }

    /// Whether such pages may go there: a remote holds prompts from their first page on.
    pub(super) fn takes(&self, pages: &Pages) -> bool {
        pages.scope.chained || self.to != Tier::Remote
    }

    pub(super) fn queued_bytes(&self) -> u64 {
        self.queue.lock().bytes
    }

    /// Whether less than half of what may wait does.
    pub(super) fn has_room(&self) -> bool {
        self.queued_bytes() < self.most / 2
    }

    /// Tells the thread to end when its job is done.
    pub(super) fn close(&self) {
        self.queue.lock().closing = true;
        self.queue.wake_all();
    }

    pub(super) fn is_running(&self) -> bool {
        self.queue.lock().threads > 0
    }

    /// Leaves out what waits of the pages that `mine` knows, and ends what is under way of them.
    /// Returns what did not begin, and whether there was anything.
    pub(super) fn cancel(
        &self,
        mine: impl Fn(&Pages, &Range<usize>) -> bool,
    ) -> (Vec<(Pages, Range<usize>)>, bool) {
        let mut queue = self.queue.lock();
        let (gone, left): (Vec<Job>, _) =
            queue.jobs.drain(..).partition(|job| mine(&job.pages, &job.range));
        queue.jobs = left.into();
        queue.bytes -= gone.iter().map(|job| job.pages.bytes(job.range.len())).sum::<u64>();
        let stopped = queue.running.take_if(|(pages, range)| mine(pages, range)).is_some();
        let any = stopped || !gone.is_empty();
        (gone.into_iter().map(|job| (job.pages, job.range)).collect(), any)
    }

    /// Whether nobody has cancelled what is being written.
    fn is_wanted(&self) -> bool {
        self.queue.lock().running.is_some()
    }

    /// Since when the tier has not taken what it was to, if that is so.
    pub(super) fn refused(&self) -> Option<Instant> {
        self.queue.lock().refused
    }

    /// Waits until nothing waits and nothing is being written. Returns whether that came to be.
    pub(super) fn drain(&self, until: Instant) -> bool {
        let mut queue = self.queue.lock();
        while queue.threads > 0 && (queue.busy || !queue.jobs.is_empty()) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || queue.closing {
                return false;
            }
            queue = self.queue.wait_for(queue, left);
        }
        true
    }
}

impl Shared {
    /// Has pages written down that are on the tier above, or will be when `after` is done, if they
    /// are not on their way already.
    pub(super) fn write_down(
        self: &Arc<Self>,
        link: &Link,
        pages: &Pages,
        range: Range<usize>,
        after: After,
    ) {
        self.take_down(link, pages, range, after, false);
    }

    /// Likewise; with `leave` the tier above lets them go when they are there.
    pub(super) fn take_down(
        self: &Arc<Self>,
        link: &Link,
        pages: &Pages,
        range: Range<usize>,
        after: After,
        leave: bool,
    ) {
        if !link.takes(pages) {
            return;
        }
        // The table takes pages that end alike for the same.
        let claimed = if pages.scope.chained {
            self.table.claim(link.to, Phase::Storing, &pages.hashes, range)
        } else {
            vec![range]
        };
        for range in claimed {
            let taken = range.start + self.enqueue(link, pages, &range, after.clone(), leave);
            self.counts_of(link.to).dropped.add((range.end - taken) as u64);
            self.table.abandon(link.to, &pages.hashes, taken..range.end);
        }
    }

    /// Returns how many of the first pages there is room for.
    fn enqueue(
        self: &Arc<Self>,
        link: &Link,
        pages: &Pages,
        range: &Range<usize>,
        after: After,
        leave: bool,
    ) -> usize {
        let mut queue = link.queue.lock();
        let room = (link.most.saturating_sub(queue.bytes) / pages.page_bytes) as usize;
        let count = range.len().min(room);
        if queue.closing || count == 0 {
            return 0;
        }
        if !self.begin(link, &mut queue) {
            return 0;
        }
        queue.bytes += pages.bytes(count);
        let job = Job {
            pages: pages.clone(),
            range: range.start..range.start + count,
            after: vec![after],
            leave,
        };
        match queue.jobs.back_mut().filter(|last| job.follows(last)) {
            // A prompt that grows page by page is written in few pieces.
            Some(last) => {
                last.range.end = job.range.end;
                last.pages = job.pages;
                last.after.extend(job.after);
            }
            None => queue.jobs.push_back(job),
        }
        link.queue.wake_all();
        count
    }

    /// Sees to it that somebody looks how full the tier above is.
    pub(super) fn watch(self: &Arc<Self>, link: &Link) {
        self.begin(link, &mut link.queue.lock());
    }

    /// Starts the thread of a link, the first time. Returns whether there is one.
    fn begin(self: &Arc<Self>, link: &Link, queue: &mut Queue) -> bool {
        if queue.threads == 0 && !queue.closing {
            let (shared, to) = (Arc::clone(self), link.to);
            let name = format!("ritornello-{}", super::figures::tier_word(to));
            let thread = thread::Builder::new().name(name);
            queue.threads = usize::from(thread.spawn(move || shared.write_jobs(to)).is_ok());
        }
        queue.threads > 0
    }

    fn write_jobs(self: Arc<Self>, to: Tier) {
        let Some(link) = self.link(to) else { return };
        loop {
            let mut queue = link.queue.lock();
            let job = loop {
                if queue.closing {
                    queue.threads = 0;
                    queue.jobs.clear();
                    queue.bytes = 0;
                    link.queue.wake_all();
                    return;
                }
                if let Some(job) = queue.jobs.pop_front() {
                    break job;
                }
                if link.policy == WritePolicy::Back {
                    queue = link.queue.wait_for(queue, LOOK);
                    if queue.jobs.is_empty() && !queue.closing {
                        drop(queue);
                        self.clean(link);
                        queue = link.queue.lock();
                    }
                } else {
                    queue = link.queue.wait(queue);
                }
            };
            queue.busy = true;
            queue.running = Some((job.pages.clone(), job.range.clone()));
            drop(queue);
            let bytes = job.pages.bytes(job.range.len());
            let whole = self.write_job(link, &job);
            let mut queue = link.queue.lock();
            // What somebody stopped was not refused.
            queue.refused = (!whole && queue.running.is_some()).then(Instant::now);
            queue.bytes -= bytes;
            queue.busy = false;
            queue.running = None;
            link.queue.wake_all();
        }
    }

    /// Returns whether all of it is there now.
    fn write_job(self: &Arc<Self>, link: &Link, job: &Job) -> bool {
        let until = Instant::now() + PUT;
        for ticket in job.after.iter().filter_map(|after| after.put.as_ref()) {
            let _ = ticket.wait(Some(until.saturating_duration_since(Instant::now())));
        }
        self.slack.wait(SLACK);
        let (pages, range) = (&job.pages, job.range.clone());
        let there = match (link.to, &self.remote) {
            (Tier::Remote, Some(far)) => self.write_far(far, job),
            _ => self.write_shelf(link.to, job),
        };
        self.table.settle(link.to, &pages.hashes, range.start..range.start + there, &[]);
        self.table.abandon(link.to, &pages.hashes, range.start + there..range.end);
        if link.to != self.top().tier {
            self.arrived(link.to, pages, range.start..range.start + there);
        }
        if job.leave {
            self.leave(link, pages, range.start..range.start + there);
        }
        self.tidy();
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
        let left = |page| job.after.iter().find_map(|after| after.left.as_ref()?.page(page));
        let mut at = range.start;
        while at < range.end {
            let before = at;
            let rest = &mut buffer[(at - range.start) * size..];
            at += self.copy(below, pages, at..range.end, rest, control);
            while at < range.end
                && let Some(page) = left(at).filter(|page| page.len() == size)
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
    fn write_shelf(&self, to: Tier, job: &Job) -> usize {
        let (pages, range) = (&job.pages, job.range.clone());
        let Some(shelf) = self.shelf(to) else { return 0 };
        let counts = self.counts_of(to);
        let at_once = (COPY / pages.page_bytes).max(1) as usize;
        let mut buffer = Vec::new();
        let mut at = range.start;
        let rises = to == self.top().tier;
        while at < range.end && !self.is_closing() {
            if rises {
                self.slack.wait(SLACK);
                if !self.link(to).is_some_and(Link::is_wanted) {
                    break;
                }
            }
            let end = range.end.min(at + at_once);
            let keys = pages.refs(at..end);
            let control = by(WRITE);
            // Pages that are there need not be read.
            let there = shelf.store().exists(&pages.scope, &keys).unwrap_or_default();
            let mut there = there.iter().take_while(|there| **there).count();
            if there > 0 && !rises {
                // Another process may have written them: with this, the tier's `flush` covers them.
                let (stored, terms) = (&keys[..there], PutOptions::after(pages.before(at)));
                let stored = shelf.store().put_stored(&pages.scope, stored, &terms, &control);
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
            if !shelf.rate.wait_to_write(pages.bytes(came), &control) {
                counts.dropped.add(came as u64);
                break;
            }
            let slices: Vec<&[u8]> =
                buffer.chunks_exact(pages.page_bytes as usize).take(came).collect();
            let written = shelf.store().put_batch(
                &pages.scope,
                &keys[there..there + came],
                &BorrowedPages::new(&slices),
                &PutOptions::after(pages.before(at)),
                &control,
            );
            let written = match written {
                Ok(outcome) => outcome.pages,
                Err(error) => {
                    tracing::debug!(%error, ?to, "pages were not written down");
                    0
                }
            };
            if rises {
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
    fn write_far(&self, far: &Far, job: &Job) -> usize {
        let (pages, range) = (&job.pages, job.range.clone());
        let counts = self.counts_of(Tier::Remote);
        if pages.parent.is_some() {
            // Where in its prompt a page is decides in which object it lies.
            counts.dropped.add(range.len() as u64);
            return 0;
        }
        let most = OBJECTS * RemoteTier::object_pages(pages.page_bytes);
        let (mut at, mut buffer) = (0, Vec::new());
        while at < range.end && !self.is_closing() {
            let missing =
                with_prompt(pages, range.end, |prompt| far.tier.missing(prompt, at, until(WRITE)));
            let Ok(missing) = missing else {
                counts.dropped.add((range.end - at.max(range.start)) as u64);
                break;
            };
            at = missing.start;
            let end = missing.end.min(at + most);
            if at == end {
                break;
            }
            buffer.resize(pages.bytes(end - at) as usize, 0);
            let came = self.gather(Tier::Remote, job, at..end, &mut buffer, &by(WRITE));
            if at + came < end {
                counts.lost.add((range.end - range.start.max(at + came)) as u64);
            }
            if !far.rate.wait_to_write(pages.bytes(came), &by(WRITE)) {
                counts.dropped.add(came as u64);
                break;
            }
            let page = |page: usize| {
                let from = (page - at) * pages.page_bytes as usize;
                &buffer[from..from + pages.page_bytes as usize]
            };
            let before = far.tier.stats();
            let there = with_prompt(pages, at + came, |prompt| {
                far.tier.put(prompt, at..at + came, page, until(WRITE))
            })
            .unwrap_or(0);
            let after = far.tier.stats();
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
            && self.leave == last.leave
            && last.pages.hashes.get(end - 1) == self.pages.hashes.get(end - 1)
            && last.pages.len() == end
    }
}

fn until(long: Duration) -> Instant {
    Instant::now() + long
}

fn by(long: Duration) -> Control {
    Control { deadline: Some(until(long)), ..Control::default() }
}
