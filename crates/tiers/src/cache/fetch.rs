//! The fetch of pages of one prompt from the remote to the first tier.

use super::lower_tiers::LowerTiers;
use super::prefetch::{Prefetch, Stage};
use super::prompt::PromptPages;
use super::stats::PrefetchCounters;
use super::tier_policies::MAX_LOOKUP_WAIT;
use super::tier_set::{RemoteHandle, TierSet};
use crate::Residence;
use crate::remote::{group_pages, step_pages};
use ritornello_format::residency::Tier;
use ritornello_store::{LeaseNumber, PutOptions, time_limit};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Minimum timeout of one read from the remote ([`time_limit`]), and of the wait for pages that
/// another prefetch is fetching.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum timeout of a put of fetched pages to the first tier
/// ([`Store::time_limit`](ritornello_store::Store::time_limit)).
const STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum duration of a step at the remote's rate limit. A step fetches the pages that a prefetch
/// requests together. A step of a single page may take longer. At most four prefetches run at a
/// time, and they share the rate limit, so a step may wait for three other steps; four steps end
/// within [`MAX_LOOKUP_WAIT`] and [`READ_TIMEOUT`].
const STEP_DURATION: Duration = Duration::from_secs(1);
/// Interval at which a prefetch checks whether another prefetch has stored pages.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A running prefetch, after the gate has decided which pages to fetch.
pub(super) struct Fetch<'a> {
    pub(super) tiers: &'a TierSet,
    pub(super) lower: &'a LowerTiers,
    pub(super) remote: &'a RemoteHandle,
    pub(super) job: &'a Prefetch,
    pub(super) counts: &'a PrefetchCounters,
}

impl Fetch<'_> {
    /// Returns the number of pages that are fetched in one step: as many as the remote reads
    /// concurrently, or fewer if its rate limit does not let them through in [`STEP_DURATION`]; at
    /// least one.
    fn step_pages(&self) -> usize {
        let page_bytes = self.job.pages.page_bytes;
        let within = self.remote.rate.bytes_in(STEP_DURATION) / page_bytes.max(1);
        step_pages(page_bytes).min(usize::try_from(within).unwrap_or(usize::MAX)).max(1)
    }

    /// Fetches pages `range`. Returns the number of leading pages of `range` that are now on the
    /// first tier.
    pub(super) fn run(&self, range: Range<usize>) -> usize {
        let Self { tiers, job, .. } = *self;
        let (pages, first_tier) = (&job.pages, tiers.first());
        let step = self.step_pages();
        // If an object has pages in two steps, each of the steps requests a part of it. To divide
        // few objects, all steps but the last end at a multiple of `group`: the length of a full
        // object in pages or, if a step is shorter, a power of two that divides this length.
        let group = group_pages(pages.page_bytes).min(1 << step.ilog2());
        tiers.table.forget(first_tier.kind, &pages.hashes, range.start..pages.len());
        // A prefetch of a prompt with the same beginning may have fetched pages since the lookup.
        let keys = pages.refs(range.clone());
        let mut at =
            range.start + first_tier.store().present_prefix(&pages.scope, &keys).unwrap_or(0);
        while at < range.end {
            let end = range.end.min((at / group + step / group) * group);
            let claimed =
                tiers.table.claim(first_tier.kind, Residence::Loading, &pages.hashes, at..end);
            let mut claims = claimed.into_iter().peekable();
            while at < end && !job.is_cancelled() {
                let range_end;
                (at, range_end) = match claims.next_if(|claim| claim.start == at) {
                    Some(claim) => (self.fetch_claimed(claim.clone()), claim.end),
                    None => {
                        let unclaimed = at..claims.peek().map_or(end, |claim| claim.start);
                        (self.await_others(unclaimed.clone()), unclaimed.end)
                    }
                };
                let fetched = at - range.start;
                job.set_stage(Stage::Fetching { fetched, of: range.len() });
                if at < range_end {
                    break;
                }
            }
            claims.for_each(|left| tiers.table.abandon(first_tier.kind, &pages.hashes, left));
            if at < end {
                break;
            }
        }
        at - range.start
    }

    /// Fetches the pages `wanted` of an unchained scope, and skips pages that fail. Returns the
    /// number of pages of `wanted` that are now on the first tier.
    pub(super) fn run_each(&self, wanted: &[usize]) -> usize {
        let Self { tiers, job, .. } = *self;
        let (all, first_tier) = (&job.pages, tiers.first());
        // In the page table each page is a separate prompt.
        let hash = |page: usize| &all.hashes[page..=page];
        for page in wanted {
            tiers.table.forget(first_tier.kind, hash(*page), 0..1);
        }
        let (mut left, mut failed) = (wanted.to_vec(), 0);
        let step = self.step_pages();
        // This prefetch ends if it stores no page within the time that one of its steps may take,
        // for example while another prefetch has claimed the pages.
        let others_timeout = time_limit(all.bytes(wanted.len().min(step)), READ_TIMEOUT, None);
        let mut until = Instant::now() + others_timeout;
        while !left.is_empty() && Instant::now() < until && !job.is_cancelled() {
            // Another prefetch may have fetched some of the pages, or may be fetching them.
            let keys = all.select(&left);
            let keys = keys.refs(0..keys.len());
            let present = first_tier.store().exists(&all.scope, &keys).unwrap_or_default();
            let mut present = present.into_iter();
            left.retain(|_| present.next() != Some(true));
            let claim = |page: &usize| {
                let (how, page) = (Residence::Loading, hash(*page));
                !tiers.table.claim(first_tier.kind, how, page, 0..1).is_empty()
            };
            let claimed: Vec<usize> = left.iter().copied().filter(claim).take(step).collect();
            if claimed.is_empty() {
                thread::sleep(POLL_INTERVAL);
                continue;
            }
            let pages = all.select(&claimed);
            let (arrived, stored) = self.transfer(&pages, 0..pages.len());
            for (at, page) in claimed.iter().enumerate() {
                match at < stored {
                    true => drop(tiers.table.mark_present(first_tier.kind, hash(*page), 0..1, &[])),
                    false => tiers.table.abandon(first_tier.kind, hash(*page), 0..1),
                }
            }
            left.retain(|page| !claimed[..stored].contains(page));
            if stored < arrived {
                break;
            }
            if let Some(page) = claimed.get(arrived) {
                left.retain(|left| left != page);
                failed += 1;
            }
            if stored > 0 {
                until = Instant::now() + others_timeout;
            }
            let fetched = wanted.len() - left.len() - failed;
            job.set_stage(Stage::Fetching { fetched, of: wanted.len() });
        }
        wanted.len() - left.len() - failed
    }

    /// Fetches pages claimed by this prefetch. Returns the end of the pages that were stored on the
    /// first tier.
    fn fetch_claimed(&self, range: Range<usize>) -> usize {
        let (tiers, pages) = (self.tiers, &self.job.pages);
        let first_tier = tiers.first().kind;
        let (_, stored) = self.transfer(pages, range.clone());
        let stored = range.start + stored;
        tiers.table.mark_present(first_tier, &pages.hashes, range.start..stored, &[]);
        tiers.table.abandon(first_tier, &pages.hashes, stored..range.end);
        stored
    }

    /// Fetches pages `range` and puts them to the first tier. Returns how many leading pages of
    /// `range` were fetched, and how many are now on the first tier.
    fn transfer(&self, pages: &PromptPages, range: Range<usize>) -> (usize, usize) {
        let Self { tiers, remote, job, .. } = *self;
        let first_tier = tiers.first();
        let bytes = pages.bytes(range.len());
        let loading = tiers.loads.begin(Tier::Remote, bytes);
        let begun = Instant::now();
        let control = Control {
            // Limits the wait for the rate, because no lookup waits longer for pages.
            deadline: Some(begun + MAX_LOOKUP_WAIT),
            cancelled: Some(Arc::clone(&job.cancelled)),
            ..Control::default()
        };
        let mut buffer = vec![0; bytes as usize];
        let waited = remote.rate.wait(bytes, &control);
        let fetched = waited.map_or(0, |_| {
            pages
                .lend(pages.len(), |prompt| {
                    remote.tier.get(
                        prompt,
                        range.clone(),
                        &mut buffer,
                        Instant::now() + time_limit(bytes, READ_TIMEOUT, None),
                    )
                })
                .unwrap_or(0)
        });
        drop(loading);
        let took = begun.elapsed().saturating_sub(waited.unwrap_or_default());
        tiers.record_load(Tier::Remote, fetched as u64, pages.bytes(fetched), took);
        let slices: Vec<&[u8]> =
            buffer.chunks_exact(pages.page_bytes as usize).take(fetched).collect();
        let keys = pages.refs(range.start..range.start + fetched);
        let timeout = first_tier.store().time_limit(pages.bytes(fetched), STORE_TIMEOUT, true);
        let stored = first_tier.store().put_batch(
            &pages.scope,
            &keys,
            &BorrowedPages::new(&slices),
            &PutOptions::after(pages.before(range.start)),
            &Control { deadline: Some(Instant::now() + timeout), ..control },
        );
        let stored = range.start + stored.map_or(0, |outcome| outcome.pages);
        let keys = pages.refs(range.start..stored);
        // Lease the pages for the longest wait of a lookup, so that they are not evicted before the
        // lookup ends. If no lookup takes the lease, the lease expires.
        if let Ok(leased) = first_tier.store().lease(&pages.scope, &keys, MAX_LOOKUP_WAIT)
            && leased.lease != LeaseNumber::default()
        {
            job.keep(leased.lease);
        }
        first_tier.rate.reserve(pages.bytes(stored - range.start));
        self.counts.pages.add((stored - range.start) as u64);
        self.counts.bytes.add(pages.bytes(stored - range.start));
        self.lower.fetched(pages, &(range.start..stored));
        (fetched, stored - range.start)
    }

    /// Waits for pages that another prefetch is fetching, and fetches pages that the other prefetch
    /// abandons. Ends when all pages of `range` are on the first tier, a fetch fails, the time that
    /// a read of `range` may take has passed, or the prefetch is cancelled. Returns the end of the
    /// leading pages of `range` that are on the first tier.
    fn await_others(&self, range: Range<usize>) -> usize {
        let Self { tiers, job, .. } = *self;
        let (pages, first_tier) = (&job.pages, tiers.first());
        let bytes = pages.bytes(range.len());
        let until = Instant::now() + time_limit(bytes, READ_TIMEOUT, None);
        let mut at = range.start;
        loop {
            let keys = pages.refs(at..range.end);
            at += first_tier.store().present_prefix(&pages.scope, &keys).unwrap_or(0);
            let stop = Instant::now() >= until || job.is_cancelled();
            if at == range.end || stop {
                return at;
            }
            let abandoned = tiers.table.claim(
                first_tier.kind,
                Residence::Loading,
                &pages.hashes,
                at..range.end,
            );
            let mut abandoned = abandoned.into_iter().peekable();
            if let Some(claim) = abandoned.next_if(|claim| claim.start == at) {
                at = self.fetch_claimed(claim.clone());
                abandoned
                    .for_each(|left| tiers.table.abandon(first_tier.kind, &pages.hashes, left));
                if at < claim.end {
                    return at;
                }
                continue;
            }
            abandoned.for_each(|left| tiers.table.abandon(first_tier.kind, &pages.hashes, left));
            thread::sleep(POLL_INTERVAL);
        }
    }
}
