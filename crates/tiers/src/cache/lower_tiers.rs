//! The tiers below the first: the write policy of each decides which pages it receives.

use super::pending_put::{PendingPut, Spilled};
use super::prompt::PromptPages;
use super::tier_policies::WritePolicy;
use super::tier_set::TierSet;
use super::tier_writer::{BatchEnd, TierWriter};
use crate::gate::TierSpan;
use ritornello_format::residency::Tier;
use ritornello_format::{Error, Result};
use ritornello_store::Ticket;
use ritornello_volume::staging::StagedPages;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct LowerTiers {
    tiers: Arc<TierSet>,
    /// The writers, fastest tier first.
    pub(super) writers: Vec<Arc<TierWriter>>,
}

impl LowerTiers {
    /// Creates the writers of the lower tiers. `policies` gives the write policy of each tier; at
    /// most `max_bytes` wait to be written to one tier.
    pub(super) fn new(
        tiers: &Arc<TierSet>,
        policies: &[(Tier, WritePolicy)],
        max_bytes: u64,
    ) -> Self {
        let lower: Vec<Tier> = tiers.kinds().skip(1).collect();
        let mut writers = Vec::<Arc<TierWriter>>::new();
        // The loop begins with the lowest tier, because each writer holds the writer below it.
        for to in lower.into_iter().rev() {
            let policy = policies.iter().find(|(tier, _)| *tier == to);
            let policy = policy.map_or(WritePolicy::Never, |(_, policy)| *policy);
            let below = writers.last().cloned();
            writers.push(TierWriter::new(tiers, (to, policy), max_bytes, below));
        }
        writers.reverse();
        Self { tiers: Arc::clone(tiers), writers }
    }

    /// Queues writes of the pages of a put to the write-through tiers, and records the pages as
    /// dirty if the second tier is write-back. `ticket` is the put to the first tier, for whose end
    /// the writes wait.
    pub(super) fn put(
        &self,
        pages: &PromptPages,
        range: Range<usize>,
        ticket: &Ticket,
        spilled: &Arc<Spilled>,
    ) {
        if let Some(below) = self.writers.first() {
            below.arrived_above(pages, range.clone());
        }
        for writer in &self.writers {
            // The engine may have computed these pages because a lower tier has evicted them.
            // Remove the tier's entries from the page table, so that the pages are written again.
            writer.forget(pages, range.clone());
            if writer.policy == WritePolicy::WriteThrough {
                let completion = Some(ticket.completion());
                let put = PendingPut { completion, spilled: Some(Arc::clone(spilled)) };
                writer.write(pages, range.clone(), put);
            }
        }
    }

    /// Spills pages `first..` of a prompt, for which the first tier has no space: the pages stay in
    /// staging until the lower tiers have written them. If more than half of staging is in use, the
    /// pages are dropped instead, because new puts need the memory more.
    pub(super) fn spill(
        &self,
        spilled: &Arc<Spilled>,
        pages: &PromptPages,
        first: usize,
        staged: StagedPages,
    ) {
        let staging = self.tiers.first().store().staging().stats();
        if staging.in_use > staging.capacity / 2 {
            return;
        }
        spilled.keep(first, staged);
        // A write-back tier receives pages when the tier above is nearly full. Spilled pages never
        // enter the tier above, so they are written now. The job of a write-through tier covers the
        // whole put and finds the spilled pages; a selective tier does not receive them.
        if let Some(writer) =
            self.writers.first().filter(|writer| writer.policy == WritePolicy::WriteBack)
        {
            let range = first..pages.len();
            writer.forget(pages, range.clone());
            let put = PendingPut { completion: None, spilled: Some(Arc::clone(spilled)) };
            writer.write(pages, range, put);
        }
    }

    /// Queues writes of pages that a prefetch has put to the first tier: to each local tier below
    /// the first whose policy is write-through.
    pub(super) fn fetched(&self, pages: &PromptPages, range: &Range<usize>) {
        for writer in self.writers.iter().filter(|writer| writer.to != Tier::Remote) {
            if writer.policy == WritePolicy::WriteThrough {
                writer.forget(pages, range.clone());
                writer.write(pages, range.clone(), PendingPut::default());
            }
        }
    }

    /// Records in the page table the tiers on which a lookup found the leading pages, if a tier is
    /// selective or write-back. Queues writes to selective tiers of the pages that were found often
    /// enough.
    pub(super) fn found(&self, pages: &PromptPages, spans: &[TierSpan]) {
        let by_use = |policy| matches!(policy, WritePolicy::Selective(_) | WritePolicy::WriteBack);
        if !self.writers.iter().any(|writer| by_use(writer.policy)) {
            return;
        }
        let mut at = 0;
        for span in spans {
            self.tiers.mark_present(span.tier, pages, at..at + span.pages);
            at += span.pages;
        }
        let _ = self.tiers.table.walk(&pages.hashes);
        for writer in &self.writers {
            if let WritePolicy::Selective(times) = writer.policy {
                let often = self.tiers.table.hot_prefix(&pages.hashes, times);
                writer.write(pages, 0..often.min(at), PendingPut::default());
            }
        }
        self.tiers.trim_table();
    }

    /// Writes all dirty pages, and waits for all queued writes.
    ///
    /// # Errors
    /// `Retry` if a tier does not finish its writes by `deadline`.
    pub(super) fn flush(&self, deadline: Instant) -> Result<()> {
        for writer in &self.writers {
            while writer.write_back_batch(false) != BatchEnd::AllQueued
                && writer.queue.wait_until_empty(deadline)
            {}
            if !writer.queue.wait_until_empty(deadline) {
                return Err(Error::retry("queued writes are not finished in time: flush again"));
            }
        }
        Ok(())
    }
}
