//! Least recently used first.

use super::order::Order;
use super::tails::Tails;
use super::{Eviction, Holdings, Resident, Used, Victim};
use ritornello_index::RunId;
use std::collections::HashMap;

/// A run is cut in chunks of about this many units (16 MiB): smaller ones leave free space in
/// more pieces, larger ones lose more than is wanted. At 95 % full, runs of mixed shapes take 1.3
/// to 1.8 extents with it, 1.5 to 1.9 with a quarter of it (`ritornello_volume::space`, test
/// `runs_stay_whole_at_steady_state`).
const CHUNK_UNITS: u32 = 4096;

/// Evicts what was used longest ago.
///
/// Runs are listed by last use. A use of a sequence touches its runs leaf first, so that a run is
/// always listed before those it hangs from, where it was not put or linked behind their back.
/// Where it was, the run that others hang from is set aside when its turn comes, and takes the next
/// turn once they are gone.
///
/// Invariants: `slots` and `by_run` hold the same runs; a run that is not listed has only pages
/// that others hang from.
#[derive(Debug)]
pub struct Lru {
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    by_run: HashMap<RunId, u32>,
    order: Order,
    tails: Tails,
    chunk_units: u32,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    resident: Resident,
    /// Pages that were taken off when the run became a victim, and that the store has yet to
    /// report.
    owed: u32,
}

impl Default for Lru {
    fn default() -> Self {
        Self::new()
    }
}

impl Lru {
    /// Without any runs.
    #[must_use]
    pub fn new() -> Self {
        Self::with_chunk(CHUNK_UNITS)
    }

    /// Cuts runs in chunks of about `chunk_units` units; what is left smaller than that goes, too.
    #[must_use]
    pub fn with_chunk(chunk_units: u32) -> Self {
        Self {
            slots: Vec::new(),
            vacant: Vec::new(),
            by_run: HashMap::new(),
            order: Order::new(),
            tails: Tails::default(),
            chunk_units: chunk_units.max(1),
        }
    }

    fn touch(&mut self, run: RunId) {
        if let Some(&slot) = self.by_run.get(&run) {
            self.order.unlink(slot);
            self.order.push_newest(slot);
        }
    }

    /// Forgets a run that is listed or set aside.
    fn forget(&mut self, slot: u32) {
        let Resident { run, parent, .. } = self.slots[slot as usize].resident;
        self.order.unlink(slot);
        self.by_run.remove(&run);
        self.vacant.push(slot);
        if let Some(parent) = parent {
            self.detach(parent);
        }
    }

    /// Nothing holds page `parent` on behalf of one run any more.
    fn detach(&mut self, parent: (RunId, u32)) {
        self.tails.detach(parent);
        let Some(&slot) = self.by_run.get(&parent.0) else { return };
        let pages = self.slots[slot as usize].resident.pages;
        if !self.order.is_listed(slot) && self.tails.held(parent.0) < pages {
            // It was set aside when it was older than anything listed.
            self.order.push_oldest(slot);
        }
    }

    /// Cuts the run in `slot`, for about `units` units, as far as nothing hangs from it.
    fn cut(&mut self, slot: u32, units: u64) -> Option<Victim> {
        let Resident { run, pages, page_units, header_units, .. } =
            self.slots[slot as usize].resident;
        let held = self.tails.held(run).min(pages);
        if held == pages && pages > 0 {
            return None;
        }
        let (page, chunk) = (u64::from(page_units.max(1)), u64::from(self.chunk_units));
        let wanted = units.div_ceil(chunk).saturating_mul(chunk).div_ceil(page);
        let mut keep = u64::from(pages).saturating_sub(wanted);
        if keep * page < chunk {
            keep = 0;
        }
        // At most `pages`, so it fits.
        let keep = (keep as u32).max(held);
        let gone = pages - keep;
        let mut units = u64::from(gone) * page;
        if keep == 0 {
            units += u64::from(header_units);
            self.forget(slot);
        } else {
            let slot = &mut self.slots[slot as usize];
            slot.resident.pages = keep;
            slot.owed += gone;
        }
        Some(Victim { run, keep_pages: keep, units })
    }
}

impl Eviction for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn admit(&mut self, resident: &Resident) {
        self.remove(resident.run);
        let entry = Slot { resident: *resident, owed: 0 };
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = entry;
                slot
            }
            None => {
                self.slots.push(entry);
                // Four billion runs do not fit into memory.
                (self.slots.len() - 1) as u32
            }
        };
        self.by_run.insert(resident.run, slot);
        self.order.push_newest(slot);
        if let Some(parent) = resident.parent {
            self.tails.attach(parent);
        }
    }

    fn link(&mut self, run: RunId, parent: RunId, page: u32) {
        if let Some(&slot) = self.by_run.get(&run) {
            let known = &mut self.slots[slot as usize].resident.parent;
            if known.is_none() && run != parent {
                *known = Some((parent, page));
                self.tails.attach((parent, page));
            }
        }
    }

    fn hit(&mut self, path: &[Used]) {
        path.iter().rev().for_each(|used| self.touch(used.run));
    }

    fn shrink(&mut self, run: RunId, pages: u32) {
        if let Some(&slot) = self.by_run.get(&run) {
            let Slot { resident, owed } = &mut self.slots[slot as usize];
            let settled = pages.min(*owed);
            *owed -= settled;
            resident.pages = resident.pages.saturating_sub(pages - settled);
        }
    }

    fn remove(&mut self, run: RunId) {
        if let Some(&slot) = self.by_run.get(&run) {
            self.forget(slot);
        }
    }

    fn victims(&mut self, units: u64, holdings: &dyn Holdings) -> Vec<Victim> {
        let mut victims = Vec::new();
        let mut left = units;
        let mut passed = Vec::new();
        while left > 0 {
            let Some(slot) = self.order.oldest() else { break };
            if holdings.is_pinned(self.slots[slot as usize].resident.run) {
                self.order.unlink(slot);
                passed.push(slot);
                continue;
            }
            match self.cut(slot, left) {
                Some(victim) => {
                    left = left.saturating_sub(victim.units);
                    victims.push(victim);
                }
                None => self.order.unlink(slot),
            }
        }
        // The pinned ones keep their places. (One that lost a child meanwhile was passed twice.)
        for slot in passed.into_iter().rev() {
            self.order.unlink(slot);
            self.order.push_oldest(slot);
        }
        debug_assert_eq!(self.by_run.len() + self.vacant.len(), self.slots.len());
        victims
    }

    fn len(&self) -> usize {
        self.by_run.len()
    }
}
