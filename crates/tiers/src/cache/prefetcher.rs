//! Prefetch: fetches pages of a prompt from the remote before the engine computes the request.
//!
//! A few threads run prefetches, each thread one prompt at a time. A thread asks the remote how
//! many leading pages the remote has, and the gate how many of these are worth fetching. It fetches
//! these pages in order, until a page fails or the prefetch is cancelled. In an unchained scope a
//! thread asks for every missing page, and skips pages that fail. No caller waits: repeated lookups
//! report the progress.

use super::fetch::Fetch;
use super::local_prefix::LocalPrefix;
use super::lookup::LookupOptions;
use super::lower_tiers::LowerTiers;
use super::prefetch::{Prefetch, Stage};
use super::prompt::PromptPages;
use super::stats::{PrefetchCounters, PrefetchStats};
use super::tier_set::{RemoteHandle, TierSet};
use crate::gate::TierSpan;
use parking_lot::Mutex;
use ritornello_format::residency::Tier;
use ritornello_format::{PageHash, Result};
use ritornello_volume::{Job, ThreadPool};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum prefetches that run concurrently, and maximum queued prefetches.
const THREADS: usize = 4;
const MAX_QUEUED: usize = 256;
/// Maximum tracked prefetches. If `STALE_SWEEP_AT` or more prefetches are tracked, a new prefetch
/// first removes the stale prefetches.
const MAX_TRACKED: usize = 2048;
const STALE_SWEEP_AT: usize = 128;
/// Timeout of the queries that ask the remote which pages of one prompt it has, all together.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The prefetches of a cache and their threads.
#[derive(Debug)]
pub(super) struct Prefetcher {
    tiers: Arc<TierSet>,
    lower: Arc<LowerTiers>,
    /// Tracked prefetches, by [`PromptPages::name`].
    known: Mutex<HashMap<PageHash, Arc<Prefetch>>>,
    /// A prefetch holds this lock while it decides how much to fetch, so that two prefetches do not
    /// count on the same free space of the first tier.
    deciding: Mutex<()>,
    threads: ThreadPool<PrefetchJob>,
    counts: PrefetchCounters,
}

struct PrefetchJob {
    prefetcher: Arc<Prefetcher>,
    prefetch: Arc<Prefetch>,
}

impl Job for PrefetchJob {
    fn run(self) {
        if let Some(remote) = &self.prefetcher.tiers.remote {
            self.prefetcher.run(remote, &self.prefetch);
        }
    }
}

impl Prefetcher {
    pub(super) fn new(tiers: &Arc<TierSet>, lower: &Arc<LowerTiers>) -> Arc<Self> {
        Arc::new(Self {
            tiers: Arc::clone(tiers),
            lower: Arc::clone(lower),
            known: Mutex::default(),
            deciding: Mutex::default(),
            threads: ThreadPool::new("ritornello-prefetch", THREADS, MAX_QUEUED),
            counts: PrefetchCounters::default(),
        })
    }

    pub(super) fn get(&self, name: PageHash) -> Option<Arc<Prefetch>> {
        self.known.lock().get(&name).cloned()
    }

    /// Starts the prefetch of a prompt. Returns `None` if the prompt has no pages, if too many
    /// prefetches are queued or tracked, or if the threads have been closed or cannot be started.
    pub(super) fn start(
        self: &Arc<Self>,
        pages: &PromptPages,
        options: LookupOptions,
        local: &LocalPrefix,
    ) -> Option<Arc<Prefetch>> {
        let name = pages.name()?;
        for stale in self.sweep_stale() {
            self.take_fetched(&stale);
        }
        let prefetch = Arc::new(Prefetch::new(pages.clone(), options, local));
        let mut known = self.known.lock();
        let job = PrefetchJob { prefetcher: Arc::clone(self), prefetch: Arc::clone(&prefetch) };
        if known.len() >= MAX_TRACKED || self.threads.submit(job).is_err() {
            self.counts.queue_full.add(1);
            return None;
        }
        known.insert(name, Arc::clone(&prefetch));
        self.counts.started.add(1);
        Some(prefetch)
    }

    /// Cancels the prefetch of a prompt and returns true, if it is queued or running; the thread
    /// that runs it counts the cancellation. If the prefetch has ended, releases its leases and
    /// returns false.
    pub(super) fn cancel(&self, name: PageHash) -> bool {
        let mut known = self.known.lock();
        let Some(found) = known.get(&name).cloned() else { return false };
        if matches!(found.stage(), Stage::Done { .. }) {
            drop(known);
            self.take_fetched(&found);
            return false;
        }
        known.remove(&name);
        found.cancel();
        if !self.threads.remove(|job| Arc::ptr_eq(&job.prefetch, &found)).is_empty() {
            self.counts.cancelled.add(1);
        }
        true
    }

    /// Takes the number of pages fetched, which is reported once (zero before the prefetch has
    /// ended), and releases the leases on pages fetched so far.
    pub(super) fn take_fetched(&self, job: &Prefetch) -> usize {
        let (fetched, leases) = job.take_fetched();
        for lease in leases {
            // If the release fails, the lease expires.
            let _ = self.tiers.first().store().release(lease);
        }
        fetched
    }

    /// Cancels all prefetches and stops the threads.
    pub(super) fn close(&self) {
        let known = self.known.lock();
        known.values().for_each(|prefetch| prefetch.cancel());
        self.threads.close();
    }

    /// Waits until the threads of a closed prefetcher have ended, at most until `deadline`.
    pub(super) fn wait_ended(&self, deadline: Instant) {
        self.threads.wait_ended(deadline);
    }

    pub(super) fn stats(&self) -> PrefetchStats {
        self.counts.stats(self.threads.pending() as u64)
    }

    /// Removes stale prefetches and returns them, so that their leases can be released.
    fn sweep_stale(&self) -> Vec<Arc<Prefetch>> {
        let mut known = self.known.lock();
        if known.len() < STALE_SWEEP_AT {
            return Vec::new();
        }
        known.extract_if(|_, job| job.is_stale()).map(|(_, job)| job).collect()
    }

    /// Returns the bytes reserved for other prompts, and the bytes still to fetch for `job`'s
    /// prompt. In chained scopes the last key identifies a prompt in all scopes that hold parts of
    /// its pages, and the reserved bytes of a prompt cover all these scopes. In unchained scopes
    /// each list of keys counts as a separate prompt, so a page of two lists counts twice.
    fn usage_beside(&self, job: &Prefetch) -> (u64, u64) {
        let (mut others, mut separate, mut own) = (HashMap::<&[u8], u64>::new(), 0_u64, 0);
        let chained = job.pages.scope.chained;
        let known = self.known.lock();
        for other in known.values() {
            let last = other.pages.keys.last();
            let is_own = match chained && other.pages.scope.chained {
                true => last == job.pages.keys.last(),
                false => std::ptr::eq(&raw const **other, job),
            };
            match last {
                _ if is_own => own += other.remaining_bytes(),
                Some(key) if other.pages.scope.chained => {
                    let most = others.entry(key).or_default();
                    *most = other.reserved_bytes().max(*most);
                }
                _ => separate = separate.saturating_add(other.reserved_bytes()),
            }
        }
        (others.into_values().fold(separate, u64::saturating_add), own)
    }

    fn run(&self, remote: &RemoteHandle, job: &Prefetch) {
        let (tiers, counts) = (&*self.tiers, &self.counts);
        let (pages, local) = (&job.pages, job.local_pages());
        let deadline = Instant::now() + PROBE_TIMEOUT;
        // The pages on the remote that this machine lacks.
        let answer: Result<Vec<usize>> = if pages.scope.chained {
            let known = pages.lend(pages.len(), |prompt| remote.tier.probe(prompt, deadline));
            known.map(|known| (local..known).collect())
        } else {
            let asked = pages.select(&job.missing);
            let present = asked.lend(asked.len(), |prompt| remote.tier.present(prompt, deadline));
            present.map(|present| {
                let found = job.missing.iter().zip(present).filter(|(_, present)| *present);
                found.map(|(page, _)| *page).collect()
            })
        };
        let found = answer.as_deref().unwrap_or_default();
        let known = local + found.len();
        let worthwhile = {
            let _alone = self.deciding.lock();
            let worthwhile = self.pages_worth_fetching(job, known) - local;
            if worthwhile > 0 {
                job.set_stage(Stage::Fetching { fetched: 0, of: worthwhile });
            }
            worthwhile
        };
        let (fetched, count) = if answer.is_err() {
            (0, &counts.failed)
        } else if worthwhile == 0 {
            (0, &counts.not_worthwhile)
        } else {
            let fetch = Fetch { tiers, lower: &self.lower, remote, job, counts };
            let fetched = if pages.scope.chained {
                tiers.mark_present(Tier::Remote, pages, 0..known);
                fetch.run(local..local + worthwhile)
            } else {
                fetch.run_each(&found[..worthwhile])
            };
            match fetched {
                fetched if fetched == worthwhile => (fetched, &counts.completed),
                fetched if job.is_cancelled() => (fetched, &counts.cancelled),
                fetched => (fetched, &counts.failed),
            }
        };
        job.set_stage(Stage::Done { at: Instant::now(), known, fetched });
        count.add(1);
        if job.is_cancelled() {
            // No lookup takes the result of a cancelled prefetch, so this call releases its leases.
            self.take_fetched(job);
        }
        tiers.trim_table();
    }

    /// Returns how many leading pages are worth having on this machine, according to the gate: at
    /// least the local pages. In an unchained scope the gate treats the `known` pages as leading
    /// pages, local pages first. Prefetched pages of all prompts may fill three quarters of the
    /// capacity that the tier list gives the first tier; without a capacity there is no such limit.
    /// If the pages to fetch do not fit, returns the number of local pages.
    fn pages_worth_fetching(&self, job: &Prefetch, known: usize) -> usize {
        let local = job.local_pages();
        if known <= local {
            return local;
        }
        let mut found = job.local.clone();
        found.push(TierSpan { tier: Tier::Remote, pages: known - local });
        let (others, own) = self.usage_beside(job);
        let mut queued = self.tiers.pending_load_bytes();
        // The gate counts this prompt's bytes in all scopes as bytes to load, so they must not
        // count as queued as well.
        let remote = &mut queued[Tier::Remote as usize];
        *remote = remote.saturating_sub(own);
        let (page_bytes, gate) = (job.pages.page_bytes, &self.tiers.gate);
        let worthwhile = match gate.decide(page_bytes, &found, &job.options, queued) {
            Some((pages, decision)) => {
                job.set_expected(decision.load);
                pages
            }
            None => known,
        };
        // Without this limit, concurrent prompts could evict each other's fetched pages before any
        // of them is loaded.
        let room = (self.tiers.first().capacity / 4 * 3).saturating_sub(others);
        let needs = (worthwhile.saturating_sub(local) as u64).saturating_mul(job.page_bytes());
        if needs > room { local } else { worthwhile.max(local) }
    }
}
