//! The tree of pieces that all policies share: which pages exist, which pages they follow, and
//! which pages may be evicted.

use super::eviction_policy::{Arrival, EvictionPolicy};
use super::fold::{Folding, table_bytes};
use super::pieces::{NONE, POLICY_GENERATIONS, Piece, Pieces};
use super::{Resident, Used};
use capacity::CapacityEstimate;
use protected::ProtectedPieces;
use ritornello_index::RunId;
use std::collections::HashMap;

mod capacity;
mod protected;
mod victims;

/// Length, in units, of the chunks that eviction cuts off the ends of runs: 16 MiB. A cut of whole
/// chunks is rounded up to whole pages. Smaller chunks fragment the free space, larger chunks evict
/// more than needed. In a space that is 95 % full, the mean number of extents of runs with
/// different page lengths is 1.3 to 1.8 with this length, 1.5 to 1.9 with a quarter of it
/// (`crates/volume/src/space/steady.rs`, test `runs_have_few_extents_in_steady_state`).
pub(super) const CHUNK_UNITS: u32 = 4096;
/// Minimum length in chunks of the pieces into which uses split runs. Pieces are evicted one by
/// one, and the space of a short piece holds no complete run. If uses end at arbitrary pages, runs
/// take a mean of 2.1 to 2.5 extents without this limit, and of 1.0 to 1.5 with it
/// (`crates/store/tests/steady.rs`, test `runs_take_few_extents`). With the limit, unused pages of
/// less than twice this length may stay with the used pages before them.
const SPLIT_CHUNKS: u32 = 2;
/// A use may split a run only while the number of pieces is less than twice the number of runs plus
/// this number.
const SPLITS_SPARE: usize = 1024;
/// Maximum pieces that one call moves to a new policy.
const MOVED_PER_CALL: usize = 32;

/// Pieces of runs as a tree, with the policy that orders them.
///
/// A run is one piece at first. A run is split after a page that another run follows, so that
/// children always follow the last page of a piece, and a piece without children may be evicted. A
/// run is also split near the end of a use that covers a part of it, so that later pages do not
/// count as used. Pieces that are used together again are merged.
///
/// [`Tree::follow`] switches to a different policy. Each later admission, use and eviction moves a
/// few pieces to the new policy, so that no call takes long. The warmest pieces move first, and
/// each becomes the oldest piece of the new policy, which keeps the order of use. Victims are
/// chosen among the pieces that have not moved, as long as there are any.
///
/// Invariants: a piece is *listed* while a list of a policy holds it. Between calls, a piece that
/// is not listed has children or waits in `protected`, also for some time after its protection
/// ended. A listed piece with the current `policy_generation` is in a list of `policy`, any other
/// listed piece in a list of `previous_policy`. `last` names the last piece of every run, from
/// which `up` leads to the earlier pieces.
#[derive(Debug)]
pub(super) struct Tree {
    pieces: Pieces,
    last: HashMap<RunId, u32, Folding>,
    /// Runs that were admitted before their parents, by parent. At opening, runs are admitted in
    /// the order of their last use, and may precede their parents.
    orphans: HashMap<RunId, Vec<(RunId, u32)>, Folding>,
    policy: Box<dyn EvictionPolicy>,
    previous_policy: Option<Box<dyn EvictionPolicy>>,
    /// Number of switches to another policy so far, modulo [`POLICY_GENERATIONS`].
    policy_generation: u8,
    units: u64,
    pages: u64,
    capacity: CapacityEstimate,
    protected: ProtectedPieces,
    chunk_units: u32,
}

impl Tree {
    pub(super) fn new(policy: Box<dyn EvictionPolicy>, chunk_units: u32) -> Self {
        Self {
            pieces: Pieces::new(),
            last: HashMap::default(),
            orphans: HashMap::default(),
            policy,
            previous_policy: None,
            policy_generation: 0,
            units: 0,
            pages: 0,
            capacity: CapacityEstimate::default(),
            protected: ProtectedPieces::default(),
            chunk_units: chunk_units.max(1),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.last.len()
    }

    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    pub(super) fn pages_when_full(&self) -> u64 {
        self.capacity.pages()
    }

    pub(super) fn knows(&self, run: RunId) -> bool {
        self.last.contains_key(&run)
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = RunId> {
        self.last.keys().copied()
    }

    /// Whether pieces are still moving to a new policy.
    pub(super) fn is_moving(&self) -> bool {
        self.previous_policy.is_some()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let orders = [Some(&self.policy), self.previous_policy.as_ref()];
        self.pieces.memory_bytes()
            + self.protected.memory_bytes()
            + table_bytes(self.last.capacity(), size_of::<(RunId, u32)>())
            + orders.iter().flatten().map(|policy| policy.memory_bytes()).sum::<usize>()
    }

    /// Begins to switch to another policy. No switch may be in progress.
    pub(super) fn follow(&mut self, mut policy: Box<dyn EvictionPolicy>) {
        debug_assert!(self.previous_policy.is_none());
        policy.set_capacity(self.capacity.units(), self.capacity.keys());
        self.previous_policy = Some(std::mem::replace(&mut self.policy, policy));
        self.policy_generation = (self.policy_generation + 1) % POLICY_GENERATIONS;
    }

    /// Moves at most [`MOVED_PER_CALL`] pieces from the previous policy to the current policy.
    fn move_some(&mut self) {
        for _ in 0..MOVED_PER_CALL {
            let Some(previous) = &mut self.previous_policy else { return };
            match previous.warmest() {
                Some(slot) => {
                    previous.unlink(&mut self.pieces, slot);
                    self.inherit(slot);
                }
                None => self.previous_policy = None,
            }
        }
    }

    /// Lists a piece that moved from the previous policy.
    fn inherit(&mut self, slot: u32) {
        self.pieces[slot].set_policy_generation(self.policy_generation);
        self.policy.insert(&mut self.pieces, slot, Arrival::Inherited);
    }

    fn unlink(&mut self, slot: u32) {
        if !self.pieces[slot].is_listed() {
            return;
        }
        if self.pieces[slot].policy_generation() == self.policy_generation {
            self.policy.unlink(&mut self.pieces, slot);
        } else if let Some(previous) = &mut self.previous_policy {
            previous.unlink(&mut self.pieces, slot);
        }
    }

    /// Lists a piece again that [`Self::victims`] unlinked because it was protected or had
    /// children.
    fn relist(&mut self, slot: u32) {
        let generation = self.pieces[slot].policy_generation();
        let before = (self.policy_generation + POLICY_GENERATIONS - 1) % POLICY_GENERATIONS;
        match &mut self.previous_policy {
            _ if generation == self.policy_generation => self.policy.relist(&mut self.pieces, slot),
            Some(previous) if generation == before => previous.relist(&mut self.pieces, slot),
            _ => self.inherit(slot),
        }
    }

    fn list_after(&mut self, listed: u32, slot: u32) {
        let ours = self.pieces[slot].policy_generation() == self.policy_generation;
        match &mut self.previous_policy {
            Some(previous) if !ours => previous.list_after(&mut self.pieces, listed, slot),
            _ => self.policy.list_after(&mut self.pieces, listed, slot),
        }
    }

    fn shrunk(&mut self, slot: u32, units: u64) {
        let piece = &self.pieces[slot];
        if !piece.is_listed() {
            return;
        }
        match &mut self.previous_policy {
            Some(previous) if piece.policy_generation() != self.policy_generation => {
                previous.shrunk(piece, units)
            }
            _ => self.policy.shrunk(piece, units),
        }
    }

    pub(super) fn admit(&mut self, resident: &Resident) {
        self.move_some();
        self.remove(resident.run);
        let Resident { run, key, parent, pages, page_units, header_units } = *resident;
        let up = parent.and_then(|parent| self.attach(parent)).unwrap_or(NONE);
        if up == NONE
            && let Some((before, page)) = parent
        {
            self.orphans.entry(before).or_default().push((run, page));
        }
        let mut piece = Piece::new(run, pages, page_units, header_units);
        let units = piece.units();
        let mut known = self.policy.recall(key, units);
        let mut continues = false;
        if up != NONE {
            let before = &self.pieces[up];
            // A long put becomes several runs. If the policy remembers an eviction of its first
            // run, its later runs count as remembered too.
            known |= before.is_known() && before.uses == 0;
            continues = before.uses > 0 && before.children == 1;
        }
        piece.up = up;
        piece.set_known(known);
        piece.set_policy_generation(self.policy_generation);
        let slot = self.pieces.add(piece);
        self.last.insert(run, slot);
        self.units += units;
        self.pages += u64::from(pages);
        self.policy.insert(&mut self.pieces, slot, Arrival::New { known, continues });
        if !self.orphans.is_empty() {
            let orphans = self.orphans.remove(&run).unwrap_or_default();
            orphans.into_iter().for_each(|(child, page)| self.link(child, run, page));
            if self.orphans.is_empty() {
                self.orphans = HashMap::default();
            }
        }
    }

    pub(super) fn link(&mut self, run: RunId, parent: RunId, page: u32) {
        if run == parent || !self.knows(parent) {
            return;
        }
        let Some(&slot) = self.last.get(&run) else { return };
        let mut first = slot;
        while let Some(before) = self.before(first) {
            first = before;
        }
        if self.pieces[first].up == NONE
            && let Some(up) = self.attach((parent, page))
        {
            self.pieces[first].up = up;
        }
    }

    /// The previous piece in the same run.
    fn before(&self, slot: u32) -> Option<u32> {
        let piece = &self.pieces[slot];
        (piece.start > 0 && piece.up != NONE).then_some(piece.up)
    }

    /// Returns the piece that ends with a page, splitting a piece if need be. Counts one more child
    /// of the returned piece.
    fn attach(&mut self, (run, page): (RunId, u32)) -> Option<u32> {
        let mut slot = *self.last.get(&run)?;
        while self.pieces[slot].start > page {
            slot = self.before(slot)?;
        }
        if page + 1 < self.pieces[slot].end() {
            slot = self.split(slot, page + 1);
        }
        self.pieces[slot].children += 1;
        Some(slot)
    }

    /// Makes the pages before `at` a separate piece. Returns the new piece's slot.
    fn split(&mut self, slot: u32, at: u32) -> u32 {
        let tail = &mut self.pieces[slot];
        let units = tail.units();
        let mut head = Piece::new(tail.run, at - tail.start, tail.page_units, 0);
        head.header_units = tail.header_units;
        (head.up, head.start, head.children) = (tail.up, tail.start, 1);
        (head.stamp, head.queue, head.uses) = (tail.stamp, tail.queue, tail.uses);
        head.set_known(tail.is_known());
        head.set_policy_generation(tail.policy_generation());
        tail.pages = tail.end() - at;
        tail.start = at;
        let (lost, listed) = (units - tail.units(), tail.is_listed());
        let head = self.pieces.add(head);
        self.pieces[slot].up = head;
        if listed {
            self.shrunk(slot, lost);
            self.list_after(slot, head);
        }
        head
    }

    /// Merges a piece with the previous piece of the run, if the same policy lists both with equal
    /// `queue` and `stamp`, their uses are equal or both at least two, and no other piece follows
    /// the previous piece. Returns whether the pieces were merged.
    fn merge(&mut self, slot: u32) -> bool {
        let Some(before) = self.before(slot) else { return false };
        let (head, tail) = (&self.pieces[before], &self.pieces[slot]);
        // No policy distinguishes two uses from more uses.
        let standing = |piece: &Piece| {
            (piece.queue, piece.stamp, piece.uses.min(2), piece.policy_generation())
        };
        if head.children > 1
            || !head.is_listed()
            || !tail.is_listed()
            || standing(head) != standing(tail)
        {
            return false;
        }
        let (start, pages, up) = (head.start, head.pages, head.up);
        self.unlink(slot);
        let tail = &mut self.pieces[slot];
        (tail.start, tail.pages, tail.up) = (start, pages + tail.pages, up);
        self.list_after(before, slot);
        self.unlink(before);
        self.pieces[before].children = 0;
        self.pieces.remove(before);
        true
    }

    pub(super) fn hit(&mut self, path: &[Used]) {
        self.move_some();
        for used in path.iter().rev() {
            let Some(&last) = self.last.get(&used.run) else { continue };
            // `behind` is the piece after `slot` in the run; `None` if this use did not cover that
            // piece.
            let (mut slot, mut behind) = (last, None);
            loop {
                let piece = &self.pieces[slot];
                if piece.start < used.pages {
                    let end = self.end_of_use(piece, used.pages);
                    if end < piece.end() && self.may_split() {
                        slot = self.split(slot, end);
                    }
                    self.touch(slot);
                    if behind.is_some_and(|behind| self.merge(behind)) {
                        slot = behind.unwrap_or(slot);
                    }
                    behind = Some(slot);
                }
                match self.before(slot) {
                    Some(before) => slot = before,
                    None => break,
                }
            }
        }
    }

    /// Returns the page at which to split `piece` after a use of the leading `pages` pages of its
    /// run, or the piece's end if the piece is not to be split. The page is a multiple of the
    /// length of [`SPLIT_CHUNKS`] chunks, and at least this length of the piece remains after it.
    fn end_of_use(&self, piece: &Piece, pages: u32) -> u32 {
        let least = (self.chunk_units.saturating_mul(SPLIT_CHUNKS) / piece.page_units).max(1);
        let end = pages.div_ceil(least).saturating_mul(least);
        if end.saturating_add(least) > piece.end() { piece.end() } else { end }
    }

    fn may_split(&self) -> bool {
        self.pieces.len() < 2 * self.last.len() + SPLITS_SPARE
    }

    fn touch(&mut self, slot: u32) {
        let piece = &mut self.pieces[slot];
        piece.uses = piece.uses.saturating_add(1);
        let (listed, ours) =
            (piece.is_listed(), piece.policy_generation() == self.policy_generation);
        if !ours {
            self.unlink(slot);
            self.inherit(slot);
        } else if !listed {
            self.policy.relist(&mut self.pieces, slot);
        }
        self.policy.touch(&mut self.pieces, slot);
    }

    pub(super) fn shrink(&mut self, run: RunId, pages: u32) {
        let Some(&slot) = self.last.get(&run) else { return };
        let owed = &mut self.pieces[slot].owed;
        let repaid = pages.min(*owed);
        *owed -= repaid;
        let mut left = pages - repaid;
        while left > 0 {
            let Some(&slot) = self.last.get(&run) else { return };
            let removed = left.min(self.pieces[slot].pages);
            self.take_off(slot, removed);
            left -= removed;
        }
    }

    pub(super) fn remove(&mut self, run: RunId) {
        while let Some(&slot) = self.last.get(&run) {
            self.take_off(slot, self.pieces[slot].pages);
        }
    }

    /// Removes the last `removed` pages of a run's last piece. Returns their units.
    fn take_off(&mut self, slot: u32, removed: u32) -> u64 {
        let piece = &self.pieces[slot];
        let (run, up, owed) = (piece.run, piece.up, piece.owed);
        self.pages -= u64::from(removed);
        if removed < piece.pages {
            let units = u64::from(removed) * u64::from(piece.page_units);
            self.units -= units;
            self.pieces[slot].pages -= removed;
            self.shrunk(slot, units);
            return units;
        }
        let units = piece.units();
        self.units -= units;
        match self.before(slot) {
            Some(before) => {
                self.pieces[before].owed += owed;
                self.last.insert(run, before);
            }
            None => drop(self.last.remove(&run)),
        }
        self.unlink(slot);
        self.pieces.remove(slot);
        self.detach(up);
        units
    }

    /// Subtracts one from the number of children of `up`. After its last child, frees `up` if it
    /// was removed, or lists it if it is not listed.
    fn detach(&mut self, up: u32) {
        if up == NONE {
            return;
        }
        let piece = &mut self.pieces[up];
        piece.children -= 1;
        if piece.children > 0 {
            return;
        }
        if piece.is_removed() {
            self.pieces.remove(up);
        } else if !piece.is_listed() {
            self.relist(up);
        }
    }
}

#[cfg(test)]
mod tests;
