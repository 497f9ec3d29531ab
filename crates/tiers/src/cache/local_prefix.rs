//! The leading pages of a prompt that are on local tiers, leased.

use super::lookup::TierLease;
use super::prompt::PromptPages;
use super::stats::tier_name;
use super::tier_set::TierSet;
use crate::gate::TierSpan;
use ritornello_format::{ErrorKind, Result};
use ritornello_store::LeaseNumber;
use std::time::Duration;

/// Maximum passes over the local tiers. Each pass leases one more span of a prompt whose pages
/// alternate between the tiers.
const MAX_ROUNDS: usize = 4;

/// The local pages of a prompt: their tiers, and the leases, each with the index of its first page.
#[derive(Default)]
pub(super) struct LocalPrefix {
    pub(super) spans: Vec<TierSpan>,
    leases: Vec<(usize, TierLease)>,
}

impl LocalPrefix {
    /// Leases the leading pages that are on local tiers.
    ///
    /// # Errors
    /// `Invalid` for an invalid key.
    pub(super) fn lease(tiers: &TierSet, pages: &PromptPages, ttl: Duration) -> Result<Self> {
        let keys = pages.refs(0..pages.len());
        let mut all = Self::default();
        let mut at = 0;
        for _ in 0..MAX_ROUNDS {
            let before = at;
            for tier in &tiers.local {
                if at == keys.len() {
                    break;
                }
                let leased = match tier.store().lease(&pages.scope, &keys[at..], ttl) {
                    Ok(leased) => leased,
                    Err(error) if error.kind() == ErrorKind::Invalid => {
                        return Err(error);
                    }
                    Err(error) => {
                        tracing::debug!(%error, tier = tier_name(tier.kind), "a tier did not answer");
                        continue;
                    }
                };
                if leased.lease != LeaseNumber::default() {
                    all.leases.push((at, TierLease { tier: tier.kind, lease: leased.lease }));
                }
                match all.spans.last_mut() {
                    _ if leased.pages == 0 => {}
                    Some(last) if last.tier == tier.kind => last.pages += leased.pages,
                    _ => all.spans.push(TierSpan { tier: tier.kind, pages: leased.pages }),
                }
                at += leased.pages;
            }
            if at == before || at == keys.len() || tiers.local.len() == 1 {
                break;
            }
        }
        Ok(all)
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
