//! Prefetching: pages of a prompt that lie on the remote are brought to this machine, before the
//! request that wants them is computed.
//!
//! A few threads do it, one prompt each at a time. They ask the remote how far the prompt is there,
//! the gate how much of that is worth it, and bring that from the front, until a page does not come or
//! somebody says stop. Nobody waits for them: who asks again hears how far they are.

use super::find::Wish;
use super::policy::{LONGEST, WritePolicy};
use super::prompt::Pages;
use super::shared::{Far, Shared, with_prompt};
use super::writer::After;
use crate::Phase;
use crate::gate::Stretch;
use crate::remote::RemoteTier;
use parking_lot::Mutex;
use ritornello_format::PageHash;
use ritornello_format::residency::Tier;
use ritornello_store::{LeaseNumber, PutOptions};
use ritornello_volume::Parked;
use ritornello_volume::memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Prompts at once, and those that wait.
const THREADS: usize = 4;
const WAITING: usize = 256;
/// Prompts that are known at once, how many of them may be stale, and for how long an outcome that
/// somebody was told answers for the remote.
const KNOWN: usize = 2048;
const FEW: usize = 128;
const FRESH: Duration = Duration::from_secs(5);
/// One question to the remote, and one read from it once it is its turn.
const ASK: Duration = Duration::from_secs(5);
const READ: Duration = Duration::from_secs(10);
/// What came finds room on the first tier in this time, or nowhere.
const LAND: Duration = Duration::from_secs(1);
/// What came and nobody asked for has its room, and its answer holds, for so long.
const KEEP: Duration = Duration::from_secs(10);
/// Objects that are read at once.
const OBJECTS: usize = 4;
/// How often one that waits for pages which another prefetch brings looks for them.
const LOOK: Duration = Duration::from_millis(10);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Prefetches {
    state: Parked<State>,
    /// Held while one is decided about, so that no two take the same room.
    deciding: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// By the last page of their prompt.
    known: HashMap<PageHash, Arc<Prefetch>>,
    queue: VecDeque<Arc<Prefetch>>,
    threads: usize,
    idle: usize,
    closing: bool,
}

/// That of one prompt.
#[derive(Debug)]
pub(super) struct Prefetch {
    pages: Pages,
    wish: Wish,
    /// What this machine has of it.
    pub(super) local: Vec<Stretch>,
    pub(super) since: Instant,
    stage: Mutex<Stage>,
    /// How long the gate expects it to take.
    expected: Mutex<Duration>,
    /// What keeps on the first tier what came.
    kept: Mutex<Vec<LeaseNumber>>,
    /// Whether somebody was told what came of it.
    heard: AtomicBool,
    cancelled: Arc<AtomicBool>,
}

/// How far it is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// The remote has not said what it has.
    Asking,
    /// So many pages of so many have come.
    Fetching { came: usize, of: usize },
    /// Since when it is over, how many leading pages the remote has, and how many were brought.
    Over { at: Instant, known: usize, brought: usize },
}

/// What one was doing when it was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    Waiting,
    Running,
}

impl Prefetch {
    pub(super) fn stage(&self) -> Stage {
        *self.stage.lock()
    }

    /// Whether it is over for so long that the remote is to be asked again.
    pub(super) fn is_stale(&self) -> bool {
        let lasts = if self.heard.load(Ordering::Acquire) { FRESH } else { KEEP };
        matches!(self.stage(), Stage::Over { at, .. } if at.elapsed() >= lasts)
    }

    pub(super) fn expected(&self) -> Duration {
        *self.expected.lock()
    }

    /// Bytes of a page in all its objects, each of which has a prefetch of its own.
    fn page_bytes(&self) -> u64 {
        self.wish.page_bytes.max(self.pages.page_bytes)
    }

    /// Bytes on the first tier that no other prompt can have: on their way, or waiting to be asked
    /// for, in all objects.
    fn landing(&self) -> u64 {
        let pages = match self.stage() {
            Stage::Fetching { of, .. } => of,
            Stage::Over { at, brought, .. } if at.elapsed() < KEEP => brought,
            _ => 0,
        };
        (pages as u64).saturating_mul(self.page_bytes())
    }

    /// Bytes of this object that are still to come.
    fn outstanding(&self) -> u64 {
        match self.stage() {
            Stage::Fetching { came, of } => self.pages.bytes(of - came),
            _ => 0,
        }
    }

    fn local_pages(&self) -> usize {
        self.local.iter().map(|stretch| stretch.pages).sum()
    }
}

impl Prefetches {
    pub(super) fn get(&self, name: PageHash) -> Option<Arc<Prefetch>> {
        self.state.lock().known.get(&name).cloned()
    }

    /// Bytes that other prompts than this one take up, and bytes of this one that are to come.
    fn beside(&self, prompt: &Pages) -> (u64, u64) {
        let (mut others, mut own) = (HashMap::<&[u8], u64>::new(), 0);
        let state = self.state.lock();
        for job in state.known.values() {
            match job.pages.keys.last() {
                key if key == prompt.keys.last() => own += job.outstanding(),
                Some(key) => {
                    let most = others.entry(key).or_default();
                    *most = job.landing().max(*most);
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

    /// Stops that of a prompt, if there is one to stop. A thread that works on it counts it.
    pub(super) fn cancel(&self, name: PageHash) -> Option<Stopped> {
        let mut state = self.state.lock();
        let found = state.known.get(&name).cloned()?;
        if matches!(found.stage(), Stage::Over { .. }) {
            return None;
        }
        state.known.remove(&name);
        found.cancelled.store(true, Ordering::Release);
        let waiting = state.queue.len();
        state.queue.retain(|other| !Arc::ptr_eq(other, &found));
        Some(if state.queue.len() < waiting { Stopped::Waiting } else { Stopped::Running })
    }

    /// Tells the threads to end.
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
    /// Forgets what says nothing any more, and returns it: it may still keep something.
    fn forget(&mut self) -> Vec<Arc<Prefetch>> {
        if self.known.len() < FEW {
            return Vec::new();
        }
        self.known.extract_if(|_, job| job.is_stale()).map(|(_, job)| job).collect()
    }
}

impl Shared {
    /// Starts that of a prompt. `None` if it cannot be now.
    pub(super) fn prefetch(
        self: &Arc<Self>,
        pages: &Pages,
        wish: Wish,
        local: Vec<Stretch>,
    ) -> Option<Arc<Prefetch>> {
        let name = pages.name()?;
        let counts = &self.counts.prefetch;
        let forgotten = self.prefetches.state.lock().forget();
        for job in &forgotten {
            self.take_brought(job);
        }
        let mut state = self.prefetches.state.lock();
        if state.closing || state.queue.len() >= WAITING || state.known.len() >= KNOWN {
            counts.refused.add(1);
            return None;
        }
        if state.idle <= state.queue.len() && state.threads < THREADS {
            let shared = Arc::clone(self);
            let thread = thread::Builder::new().name("ritornello-fetch".to_owned());
            if thread.spawn(move || shared.prefetch_jobs()).is_ok() {
                state.threads += 1;
            }
        }
        let started = Arc::new(Prefetch {
            pages: pages.clone(),
            wish,
            local,
            since: Instant::now(),
            stage: Mutex::new(Stage::Asking),
            expected: Mutex::default(),
            kept: Mutex::default(),
            heard: AtomicBool::new(false),
            cancelled: Arc::default(),
        });
        state.known.insert(name, Arc::clone(&started));
        state.queue.push_back(Arc::clone(&started));
        counts.started.add(1);
        self.prefetches.state.wake_one();
        Some(started)
    }

    /// How many pages were brought, for whoever asks first when it is over, and holds what is there.
    pub(super) fn take_brought(&self, job: &Prefetch) -> usize {
        let brought = match &mut *job.stage.lock() {
            Stage::Over { brought, .. } => {
                job.heard.store(true, Ordering::Release);
                std::mem::take(brought)
            }
            _ => 0,
        };
        for lease in std::mem::take(&mut *job.kept.lock()) {
            // It runs out by itself.
            let _ = self.top().store().release(lease);
        }
        brought
    }

    fn prefetch_jobs(self: Arc<Self>) {
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
            if let Some(far) = &self.remote {
                self.bring(far, &job);
            }
            state = self.prefetches.state.lock();
        }
    }

    fn bring(self: &Arc<Self>, far: &Far, job: &Prefetch) {
        let counts = &self.counts.prefetch;
        let (pages, local) = (&job.pages, job.local_pages());
        let answer =
            with_prompt(pages, pages.len(), |prompt| far.tier.probe(prompt, Instant::now() + ASK));
        let known = *answer.as_ref().unwrap_or(&0);
        let wanted = {
            let _alone = self.prefetches.deciding.lock();
            let wanted = self.worth(job, known);
            if wanted > local {
                *job.stage.lock() = Stage::Fetching { came: 0, of: wanted - local };
            }
            wanted
        };
        let (came, count) = if answer.is_err() {
            (0, &counts.failed)
        } else if wanted <= local {
            (0, &counts.declined)
        } else {
            self.note(Tier::Remote, pages, 0..known);
            match self.fetch(far, job, local..wanted) {
                came if came == wanted - local => (came, &counts.completed),
                came if job.cancelled.load(Ordering::Acquire) => (came, &counts.cancelled),
                came => (came, &counts.failed),
            }
        };
        *job.stage.lock() = Stage::Over { at: Instant::now(), known, brought: came };
        count.add(1);
        if job.cancelled.load(Ordering::Acquire) {
            // Nobody will ask for it.
            self.take_brought(job);
        }
        self.tidy();
    }

    /// Up to which page it is worth to bring what the remote has, and there is room for.
    fn worth(&self, job: &Prefetch, known: usize) -> usize {
        let local = job.local_pages();
        if known <= local {
            return local;
        }
        let mut found = job.local.clone();
        found.push(Stretch { tier: Tier::Remote, pages: known - local });
        let (others, own) = self.prefetches.beside(&job.pages);
        let mut queued = self.queued();
        // All objects of a page are in the estimate already.
        let remote = &mut queued[Tier::Remote as usize];
        *remote = remote.saturating_sub(own);
        let wanted = match self.decide(&job.pages, &found, &job.wish, queued) {
            Some((pages, decision)) => {
                *job.expected.lock() = decision.load;
                pages
            }
            None => known,
        };
        // Prompts that push each other out are brought in vain, all of them.
        let room = (self.top().capacity / 4 * 3).saturating_sub(others);
        let needs = (wanted.saturating_sub(local) as u64).saturating_mul(job.page_bytes());
        if needs > room { local } else { wanted }
    }

    /// Returns how many of the first pages of `range` are on this machine then.
    fn fetch(self: &Arc<Self>, far: &Far, job: &Prefetch, range: Range<usize>) -> usize {
        let (pages, top) = (&job.pages, self.top());
        let group = RemoteTier::object_pages(pages.page_bytes);
        self.table.forget(top.tier, &pages.hashes, range.start..pages.len());
        // What has come since the prompt was looked for, with another that begins like it.
        let keys = pages.refs(range.clone());
        let mut at = range.start + top.store().probe(&pages.scope, &keys).unwrap_or(0);
        while at < range.end {
            let end = range.end.min((at / group + OBJECTS) * group);
            let claimed = self.table.claim(top.tier, Phase::Loading, &pages.hashes, at..end);
            let mut mine = claimed.into_iter().peekable();
            while at < end && !job.cancelled.load(Ordering::Acquire) {
                let wanted;
                (at, wanted) = match mine.next_if(|mine| mine.start == at) {
                    Some(mine) => (self.fetch_piece(far, job, mine.clone()), mine.end),
                    None => {
                        let others = at..mine.peek().map_or(end, |mine| mine.start);
                        (self.await_others(far, job, others.clone()), others.end)
                    }
                };
                let came = at - range.start;
                *job.stage.lock() = Stage::Fetching { came, of: range.len() };
                if at < wanted {
                    break;
                }
            }
            mine.for_each(|left| self.table.abandon(top.tier, &pages.hashes, left));
            if at < end {
                break;
            }
        }
        at - range.start
    }

    /// Brings pages that were claimed. Returns the page before which all have come.
    fn fetch_piece(self: &Arc<Self>, far: &Far, job: &Prefetch, range: Range<usize>) -> usize {
        let (pages, top) = (&job.pages, self.top());
        let bytes = pages.bytes(range.len());
        let loading = self.slack.load(Tier::Remote, bytes);
        let begun = Instant::now();
        let control = Control {
            deadline: Some(begun + LONGEST),
            cancelled: Some(Arc::clone(&job.cancelled)),
            ..Control::default()
        };
        let mut buffer = vec![0; bytes as usize];
        let others = far.rate.wait(bytes, &control);
        let came = others.map_or(0, |_| {
            with_prompt(pages, pages.len(), |prompt| {
                far.tier.get(prompt, range.clone(), &mut buffer, Instant::now() + READ)
            })
            .unwrap_or(0)
        });
        drop(loading);
        let took = begun.elapsed().saturating_sub(others.unwrap_or_default());
        self.measured(Tier::Remote, came as u64, pages.bytes(came), took);
        let slices: Vec<&[u8]> =
            buffer.chunks_exact(pages.page_bytes as usize).take(came).collect();
        let keys = pages.refs(range.start..range.start + came);
        let stored = top.store().put_batch(
            &pages.scope,
            &keys,
            &BorrowedPages::new(&slices),
            &PutOptions::after(pages.before(range.start)),
            &Control { deadline: Some(Instant::now() + LAND), ..Control::default() },
        );
        let stored = range.start + stored.map_or(0, |outcome| outcome.pages);
        let keys = pages.refs(range.start..stored);
        if let Ok(leased) = top.store().lease(&pages.scope, &keys, LONGEST)
            && leased.lease != LeaseNumber::default()
        {
            job.kept.lock().push(leased.lease);
        }
        top.rate.charge(pages.bytes(stored - range.start));
        self.counts.prefetch.pages.add((stored - range.start) as u64);
        self.counts.prefetch.bytes.add(pages.bytes(stored - range.start));
        self.table.settle(top.tier, &pages.hashes, range.start..stored, &[]);
        self.table.abandon(top.tier, &pages.hashes, stored..range.end);
        // What came from the remote goes to the tiers between as what an engine put does.
        for link in self.links.iter().filter(|link| link.to != Tier::Remote) {
            if link.policy == WritePolicy::Through {
                self.table.forget(link.to, &pages.hashes, range.start..stored);
                self.write_down(link, pages, range.start..stored, After::default());
            }
        }
        stored
    }

    /// Waits for pages that another prefetch brings, and brings those that it gave up. Returns the page
    /// before which all are there.
    fn await_others(self: &Arc<Self>, far: &Far, job: &Prefetch, range: Range<usize>) -> usize {
        let until = Instant::now() + READ;
        let (pages, top) = (&job.pages, self.top());
        let mut at = range.start;
        loop {
            let keys = pages.refs(at..range.end);
            at += top.store().probe(&pages.scope, &keys).unwrap_or(0);
            let stop = Instant::now() >= until || job.cancelled.load(Ordering::Acquire);
            if at == range.end || stop {
                return at;
            }
            let given_up = self.table.claim(top.tier, Phase::Loading, &pages.hashes, at..range.end);
            let mut given_up = given_up.into_iter().peekable();
            if let Some(mine) = given_up.next_if(|mine| mine.start == at) {
                at = self.fetch_piece(far, job, mine.clone());
                given_up.for_each(|left| self.table.abandon(top.tier, &pages.hashes, left));
                if at < mine.end {
                    return at;
                }
                continue;
            }
            given_up.for_each(|left| self.table.abandon(top.tier, &pages.hashes, left));
            thread::sleep(LOOK);
        }
    }
}
