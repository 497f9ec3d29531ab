//! Leases the leading pages of a prompt that are on local tiers; in an unchained scope, every page
//! that is on a local tier.

use super::local_tier::LocalTier;
use super::lookup::TierLease;
use super::prompt::PromptPages;
use super::stats::tier_name;
use super::tier_set::TierSet;
use crate::gate::TierSpan;
use ritornello_format::residency::Tier;
use ritornello_format::{ErrorKind, Result};
use ritornello_store::LeaseNumber;
use std::time::Duration;

/// Maximum passes over the local tiers. More than one pass is needed if the pages of a prompt
/// alternate between the tiers.
const MAX_ROUNDS: usize = 4;

/// The local pages of a prompt: their tiers, and the leases, each with the index of its first page
/// (0 in an unchained scope).
#[derive(Default)]
pub(super) struct LocalPrefix {
    pub(super) spans: Vec<TierSpan>,
    /// In an unchained scope, the pages that are on no local tier, in order; `spans` skip them.
    pub(super) missing: Vec<usize>,
    /// In an unchained scope, the fastest tier of each page.
    pub(super) tiers: Vec<Option<Tier>>,
    leases: Vec<(usize, TierLease)>,
}

impl LocalPrefix {
    /// Leases the leading pages that are on local tiers; in an unchained scope, every page that is
    /// on a local tier.
    ///
    /// # Errors
    /// `Invalid` for an invalid key.
    pub(super) fn lease(tiers: &TierSet, pages: &PromptPages, ttl: Duration) -> Result<Self> {
        if !pages.scope.chained {
            return Self::lease_each(tiers, pages, ttl);
        }
        let keys = pages.refs(0..pages.len());
        let mut all = Self::default();
        let mut at = 0;
        // For each tier, the page at which its last answer ended.
        let mut ended = vec![None; tiers.local.len()];
        for _ in 0..MAX_ROUNDS {
            let before = at;
            for (tier, ended) in tiers.local.iter().zip(&mut ended) {
                if at == keys.len() {
                    break;
                }
                // The tier lacks this page. Another call would count the same misses again.
                if *ended == Some(at) {
                    continue;
                }
                let leased = answered(tier, tier.store().lease(&pages.scope, &keys[at..], ttl))?;
                let Some(leased) = leased else { continue };
                all.keep_lease(at, tier, leased.lease);
                all.add_span(tier.kind, leased.pages);
                at += leased.pages;
                *ended = Some(at);
            }
            if at == before || at == keys.len() || tiers.local.len() == 1 {
                break;
            }
        }
        Ok(all)
    }

    /// Leases each page on the fastest local tier that has it.
    fn lease_each(tiers: &TierSet, pages: &PromptPages, ttl: Duration) -> Result<Self> {
        let mut all = Self {
            missing: (0..pages.len()).collect(),
            tiers: vec![None; pages.len()],
            ..Self::default()
        };
        for tier in &tiers.local {
            if all.missing.is_empty() {
                break;
            }
            let keys: Vec<&[u8]> = all.missing.iter().map(|page| &*pages.keys[*page]).collect();
            let store = tier.store();
            let leased = answered(tier, store.lease(&pages.scope, &keys, ttl))?;
            let Some(leased) = leased else { continue };
            // The lease covers every page present, whereas `leased.pages` counts the leading pages
            // only.
            all.keep_lease(0, tier, leased.lease);
            let present = match leased {
                leased if leased.pages == keys.len() => Some(vec![true; keys.len()]),
                leased if leased.lease == LeaseNumber::default() => None,
                _ => answered(tier, store.exists(&pages.scope, &keys))?,
            };
            let Some(present) = present else { continue };
            let mut present = present.into_iter();
            let found = &mut all.tiers;
            all.missing.retain(|page| {
                let is_present = present.next() == Some(true);
                found[*page] = is_present.then_some(tier.kind);
                !is_present
            });
        }
        for tier in all.tiers.clone().into_iter().flatten() {
            all.add_span(tier, 1);
        }
        Ok(all)
    }

    fn keep_lease(&mut self, at: usize, tier: &LocalTier, lease: LeaseNumber) {
        if lease != LeaseNumber::default() {
            self.leases.push((at, TierLease { tier: tier.kind, lease }));
        }
    }

    fn add_span(&mut self, tier: Tier, pages: usize) {
        match self.spans.last_mut() {
            _ if pages == 0 => {}
            Some(last) if last.tier == tier => last.pages += pages,
            _ => self.spans.push(TierSpan { tier, pages }),
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.spans.iter().map(|span| span.pages).sum()
    }

    /// Releases the leases that begin at page `load` or later. Returns the remaining leases.
    pub(super) fn keep_leases(self, tiers: &TierSet, load: usize) -> Vec<TierLease> {
        let (kept, released): (Vec<_>, _) = self.leases.into_iter().partition(|(at, _)| *at < load);
        for (_, lease) in released {
            // If the release fails, the lease expires.
            let _ = tiers.release(lease);
        }
        kept.into_iter().map(|(_, lease)| lease).collect()
    }
}

/// Returns the answer of a tier. Logs an error that is not `Invalid`, and returns `None` for it.
///
/// # Errors
/// `Invalid` for an invalid key.
fn answered<T>(tier: &LocalTier, answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.kind() == ErrorKind::Invalid => Err(error),
        Err(error) => {
            tracing::debug!(%error, tier = tier_name(tier.kind), "a tier did not answer a lookup");
            Ok(None)
        }
    }
}
