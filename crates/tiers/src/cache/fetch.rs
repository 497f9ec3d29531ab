//! The fetch of pages of one prompt from the remote to the first tier.

use super::lower_tiers::LowerTiers;
use super::prefetch::{Prefetch, Stage};
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
/// Timeout of a put of fetched pages to the first tier.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which a prefetch checks whether another prefetch has stored pages.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A running prefetch whose pages are worth fetching.
pub(super) struct Fetch<'a> {
    pub(super) tiers: &'a TierSet,
    pub(super) lower: &'a LowerTiers,
    pub(super) remote: &'a RemoteHandle,
    pub(super) job: &'a Prefetch,
    pub(super) counts: &'a PrefetchCounters,
}

impl Fetch<'_> {
    /// Fetches `range`. Returns the number of leading pages of `range` that are now on the first
    /// tier.
    pub(super) fn run(&self, range: Range<usize>) -> usize {
        let Self { tiers, job, .. } = *self;
        let (pages, first_tier) = (&job.pages, tiers.first());
        let group = group_pages(pages.page_bytes);
        let step = step_pages(pages.page_bytes);
        tiers.table.forget(first_tier.kind, &pages.hashes, range.start..pages.len());
        // A prefetch of a prompt with the same beginning may have fetched pages since the lookup.
        let keys = pages.refs(range.clone());
        let mut at = range.start + first_tier.store().probe(&pages.scope, &keys).unwrap_or(0);
        while at < range.end {
            let end = range.end.min(at / group * group + step);
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

    /// Fetches pages claimed by this prefetch. Returns the end of the pages that were stored on the
    /// first tier.
    fn fetch_claimed(&self, range: Range<usize>) -> usize {
        let Self { tiers, remote, job, .. } = *self;
        let (pages, first_tier) = (&job.pages, tiers.first());
        let bytes = pages.bytes(range.len());
        let loading = tiers.loads.begin(Tier::Remote, bytes);
        let begun = Instant::now();
        let control = Control {
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
            job.keep(leased.lease);
        }
        first_tier.rate.reserve(pages.bytes(stored - range.start));
        self.counts.pages.add((stored - range.start) as u64);
        self.counts.bytes.add(pages.bytes(stored - range.start));
        tiers.table.mark_present(first_tier.kind, &pages.hashes, range.start..stored, &[]);
        tiers.table.abandon(first_tier.kind, &pages.hashes, stored..range.end);
        self.lower.fetched(pages, &(range.start..stored));
        stored
    }

    /// Waits for pages that another prefetch is fetching, and fetches pages that the other prefetch
    /// abandons. Returns the end of the pages that are stored.
    fn await_others(&self, range: Range<usize>) -> usize {
        let Self { tiers, job, .. } = *self;
        let (pages, first_tier) = (&job.pages, tiers.first());
        let bytes = pages.bytes(range.len());
        let until = Instant::now() + time_limit(bytes, READ_TIMEOUT, None);
        let mut at = range.start;
        loop {
            let keys = pages.refs(at..range.end);
            at += first_tier.store().probe(&pages.scope, &keys).unwrap_or(0);
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
