//! Chooses victims: cuts pages off the ends of pieces that have no children.

use super::super::pieces::Piece;
use super::super::{EvictionContext, Victim};
use super::Tree;

/// Maximum protected pieces that a call passes over and, at its end, lists again. Further protected
/// pieces move to the queue `protected`, of which each call first examines at most this number.
const EXAMINED_MAX: usize = 64;
/// Maximum pieces of the queue `protected` that a call examines if no other victim is left.
const EXAMINED_LAST: usize = 4096;

impl Tree {
    /// Chooses victims: see [`super::super::Eviction::victims`].
    pub(in super::super) fn victims(
        &mut self,
        units: u64,
        context: &dyn EvictionContext,
    ) -> Vec<Victim> {
        self.move_some();
        self.capacity.observe(self.units, self.pages, self.pieces.len());
        self.policy.set_capacity(self.capacity.units(), self.capacity.keys());
        let mut victims = Vec::new();
        let mut left = units;
        self.relist_unprotected(context, EXAMINED_MAX);
        let (mut passed, mut last) = (Vec::new(), false);
        while left > 0 {
            let previous =
                self.previous_policy.as_mut().and_then(|old| old.victim(&mut self.pieces));
            let Some(slot) = previous.or_else(|| self.policy.victim(&mut self.pieces)) else {
                if last {
                    break;
                }
                last = true;
                self.relist_unprotected(context, EXAMINED_LAST);
                continue;
            };
            if context.is_protected(self.pieces[slot].run) {
                self.unlink(slot);
                if passed.len() < EXAMINED_MAX {
                    passed.push(slot);
                } else {
                    self.protected.push(&mut self.pieces, slot);
                }
            } else if self.pieces[slot].children > 0 {
                self.unlink(slot);
            } else {
                let victim = self.cut(slot, left, units, context);
                left = left.saturating_sub(victim.units);
                victims.push(victim);
            }
        }
        // List the skipped pieces at their former positions. `passed` may name a piece twice: a
        // piece whose last child was removed in this call was listed and skipped again. Unlink it
        // first, so that it is listed once.
        for slot in passed.into_iter().rev() {
            self.unlink(slot);
            self.relist(slot);
        }
        victims
    }

    /// Lists queued pieces that are no longer protected, as the next victims.
    fn relist_unprotected(&mut self, context: &dyn EvictionContext, count: usize) {
        let unprotected = self.protected.unprotected(&mut self.pieces, context, count);
        unprotected.into_iter().rev().for_each(|slot| self.relist(slot));
    }

    /// Cuts pages off the end of a piece without children. `units` is what is left of the
    /// `requested` units of this eviction. The cut has `units` units, rounded up to a multiple of
    /// `Tree::chunk_units` (in the store [`super::CHUNK_UNITS`], 16 MiB) and then to whole pages.
    /// Cuts the piece completely if it is shorter, or if fewer than `chunk_units` or `requested`
    /// units would remain: the next call would take this remainder, and leave a hole too short for
    /// a run of the requested length.
    fn cut(
        &mut self,
        slot: u32,
        units: u64,
        requested: u64,
        context: &dyn EvictionContext,
    ) -> Victim {
        let Piece { run, start, pages, page_units, .. } = self.pieces[slot];
        let (page, chunk) = (u64::from(page_units), u64::from(self.chunk_units));
        let request = units.div_ceil(chunk).saturating_mul(chunk).div_ceil(page);
        let mut keep = u64::from(pages).saturating_sub(request);
        if keep * page < chunk.max(requested) {
            keep = 0;
        }
        // The cast loses no bits: `keep` is at most `pages`, a `u32`.
        let keep = keep as u32;
        let removed = pages - keep;
        let ours = self.pieces[slot].policy_generation() == self.policy_generation;
        let policy = match &mut self.previous_policy {
            Some(previous) if !ours => previous,
            _ => &mut self.policy,
        };
        let key = if policy.remembers() { context.page_key(run, start + keep) } else { 0 };
        policy.evicted(&self.pieces, slot, key, u64::from(removed) * page);
        self.pieces[slot].owed += removed;
        let units = self.take_off(slot, removed);
        Victim { run, keep_pages: start + keep, units }
    }
}
