//! Pieces of runs, and the lists of policies.

use ritornello_index::RunId;

/// The slot number that means "no piece".
pub(super) const NONE: u32 = u32::MAX;
/// The value of [`Piece::run`] in a removed piece.
const NO_RUN: RunId = RunId(u64::MAX);

/// Consecutive pages of a run, which a policy orders as a unit. The pieces that follow a piece, its
/// children, all follow its last page.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) run: RunId,
    /// The piece that this piece follows: the previous piece of the run, or the run's parent.
    pub(super) up: u32,
    /// Index of the first page in the run.
    pub(super) start: u32,
    /// Number of pages; zero for a removed piece.
    pub(super) pages: u32,
    /// Length of a page in units.
    pub(super) page_units: u32,
    /// Number of pages that were cut off the end as victims, and whose removal the store has not
    /// reported yet. Only the last piece of a run may have such pages.
    pub(super) owed: u32,
    /// Number of pieces that follow the last page.
    pub(super) children: u32,
    older: u32,
    newer: u32,
    /// A number that the policy keeps with the piece: `density` its step of last use; `s3fifo` its
    /// remaining passes through the main queue or, in the small queue, its uses (3 stands for 3 or
    /// more). Other policies ignore it.
    pub(super) stamp: u32,
    /// Length of the run's header in units.
    pub(super) header_units: u8,
    /// Names the list that holds the piece, among the lists of its policy: the list's number; for
    /// `density` the number of the piece's kind, which names the list together with `stamp`.
    pub(super) queue: u8,
    /// Number of uses since the piece was admitted; 255 stands for 255 or more.
    pub(super) uses: u8,
    flags: u8,
}

const LISTED: u8 = 1;
/// Set if the piece was admitted as remembered: see `Arrival::New::known`.
const KNOWN: u8 = 2;
/// Set while the piece is in the queue of protected pieces: see `tree::protected`.
const PROTECTED: u8 = 4;
/// The lowest of the bits that hold the number of the policy that lists the piece: see
/// [`Piece::policy_generation`].
const POLICY_GENERATION: u8 = 8;
/// A tree numbers the policies that it has followed, modulo this number.
pub(super) const POLICY_GENERATIONS: u8 = u8::MAX / POLICY_GENERATION + 1;

impl Piece {
    pub(super) fn new(run: RunId, pages: u32, page_units: u32, header_units: u32) -> Self {
        Self {
            run,
            up: NONE,
            start: 0,
            pages,
            page_units: page_units.max(1),
            owed: 0,
            children: 0,
            older: NONE,
            newer: NONE,
            stamp: 0,
            header_units: header_units.min(255) as u8,
            queue: 0,
            uses: 0,
            flags: 0,
        }
    }

    /// Length on disk, in units.
    pub(super) fn units(&self) -> u64 {
        let header = if self.start == 0 { self.header_units } else { 0 };
        u64::from(self.pages) * u64::from(self.page_units) + u64::from(header)
    }

    pub(super) fn end(&self) -> u32 {
        self.start + self.pages
    }

    pub(super) fn is_listed(&self) -> bool {
        self.flags & LISTED != 0
    }

    pub(super) fn is_known(&self) -> bool {
        self.flags & KNOWN != 0
    }

    pub(super) fn set_known(&mut self, known: bool) {
        self.flags = (self.flags & !KNOWN) | if known { KNOWN } else { 0 };
    }

    pub(super) fn is_protected(&self) -> bool {
        self.flags & PROTECTED != 0
    }

    pub(super) fn set_protected(&mut self, protected: bool) {
        self.flags = (self.flags & !PROTECTED) | if protected { PROTECTED } else { 0 };
    }

    /// The number of the policy that lists the piece, or listed it last, modulo
    /// [`POLICY_GENERATIONS`].
    pub(super) fn policy_generation(&self) -> u8 {
        self.flags / POLICY_GENERATION
    }

    pub(super) fn set_policy_generation(&mut self, generation: u8) {
        self.flags = (self.flags % POLICY_GENERATION) | (generation * POLICY_GENERATION);
    }

    /// Whether the piece is removed: its slot is vacant, or kept for its children.
    pub(super) fn is_removed(&self) -> bool {
        self.run == NO_RUN
    }
}

/// All pieces, by slot number.
#[derive(Debug)]
pub(super) struct Pieces {
    slots: Vec<Piece>,
    /// First vacant slot; `up` chains the vacant slots.
    vacant: u32,
    used: usize,
}

impl Pieces {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), vacant: NONE, used: 0 }
    }

    pub(super) fn add(&mut self, piece: Piece) -> u32 {
        self.used += 1;
        if self.vacant == NONE {
            self.slots.push(piece);
            // The cast loses no bits: memory does not hold four billion pieces.
            return (self.slots.len() - 1) as u32;
        }
        let slot = self.vacant;
        self.vacant = self[slot].up;
        self[slot] = piece;
        slot
    }

    /// Removes an unlisted piece. If no piece follows it, its slot may be reused. Otherwise the
    /// slot is kept, and the caller calls `remove` again when no piece follows any longer.
    pub(super) fn remove(&mut self, slot: u32) {
        let vacant = self.vacant;
        let piece = &mut self[slot];
        debug_assert!(!piece.is_listed());
        piece.run = NO_RUN;
        piece.pages = 0;
        if piece.children == 0 {
            piece.up = vacant;
            self.vacant = slot;
            self.used -= 1;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.used
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Piece>()
    }
}

impl std::ops::Index<u32> for Pieces {
    type Output = Piece;
    fn index(&self, slot: u32) -> &Piece {
        &self.slots[slot as usize]
    }
}

impl std::ops::IndexMut<u32> for Pieces {
    fn index_mut(&mut self, slot: u32) -> &mut Piece {
        &mut self.slots[slot as usize]
    }
}

/// A list of pieces in the order of a policy. Every operation takes constant time.
///
/// Invariant: its pieces form one chain from `oldest` to `newest` in both directions, and `units`
/// is the sum of their units.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    oldest: u32,
    newest: u32,
    units: u64,
}

impl List {
    pub(super) const fn new() -> Self {
        Self { oldest: NONE, newest: NONE, units: 0 }
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    pub(super) fn newest(&self) -> Option<u32> {
        (self.newest != NONE).then_some(self.newest)
    }

    pub(super) fn units(&self) -> u64 {
        self.units
    }

    /// Records that a piece of the list lost `units`.
    pub(super) fn shrunk(&mut self, units: u64) {
        self.units -= units;
    }

    pub(super) fn push_newest(&mut self, pieces: &mut Pieces, slot: u32) {
        self.put(pieces, self.newest, slot, NONE);
    }

    pub(super) fn push_oldest(&mut self, pieces: &mut Pieces, slot: u32) {
        self.put(pieces, NONE, slot, self.oldest);
    }

    /// Inserts `slot` directly after `older`, which is in the list.
    pub(super) fn push_after(&mut self, pieces: &mut Pieces, older: u32, slot: u32) {
        let newer = pieces[older].newer;
        self.put(pieces, older, slot, newer);
    }

    fn put(&mut self, pieces: &mut Pieces, older: u32, slot: u32, newer: u32) {
        let piece = &mut pieces[slot];
        debug_assert!(!piece.is_listed());
        piece.flags |= LISTED;
        (piece.older, piece.newer) = (older, newer);
        self.units += piece.units();
        self.join(pieces, older, slot);
        self.join(pieces, slot, newer);
    }

    /// Makes two slots neighbours. If one of the two is [`NONE`], the other slot becomes an end of
    /// the list.
    fn join(&mut self, pieces: &mut Pieces, older: u32, newer: u32) {
        match older {
            NONE => self.oldest = newer,
            older => pieces[older].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => pieces[newer].older = older,
        }
    }

    pub(super) fn unlink(&mut self, pieces: &mut Pieces, slot: u32) {
        let piece = &mut pieces[slot];
        debug_assert!(piece.is_listed());
        piece.flags &= !LISTED;
        let (older, newer) = (piece.older, piece.newer);
        self.units -= piece.units();
        self.join(pieces, older, newer);
    }

    /// Appends `other`, whose pieces are all newer, and leaves it empty.
    pub(super) fn append(&mut self, pieces: &mut Pieces, other: &mut Self) {
        if other.oldest == NONE {
            return;
        }
        let newest = self.newest;
        self.join(pieces, newest, other.oldest);
        self.newest = other.newest;
        self.units += other.units;
        *other = Self::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(count: u64) -> Pieces {
        let mut pieces = Pieces::new();
        for run in 0..count {
            pieces.add(Piece::new(RunId(run), 1, 2, 1));
        }
        pieces
    }

    fn drain(list: &mut List, pieces: &mut Pieces) -> Vec<u32> {
        let next = || list.oldest().inspect(|&slot| list.unlink(pieces, slot));
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn list_keeps_order_when_pieces_are_unlinked_and_appended() {
        let (mut pieces, mut list) = (pieces(6), List::new());
        [3, 1, 2].into_iter().for_each(|slot| list.push_newest(&mut pieces, slot));
        list.push_oldest(&mut pieces, 0);
        list.unlink(&mut pieces, 1);
        list.push_after(&mut pieces, 3, 4);
        list.push_newest(&mut pieces, 1);
        assert_eq!(list.units(), 15);
        let mut other = List::new();
        other.push_newest(&mut pieces, 5);
        list.append(&mut pieces, &mut other);
        assert_eq!((list.units(), other.units(), list.newest()), (18, 0, Some(5)));
        assert_eq!(drain(&mut list, &mut pieces), [0, 3, 4, 2, 1, 5]);
        assert!(list.oldest().is_none() && list.newest().is_none() && list.units() == 0);
    }

    #[test]
    fn slot_without_children_is_reused() {
        let mut pieces = pieces(2);
        pieces[0].children = 1;
        pieces.remove(0);
        assert!(pieces[0].is_removed());
        assert_eq!(pieces.add(Piece::new(RunId(7), 1, 1, 1)), 2);
        pieces[0].children = 0;
        pieces.remove(0);
        assert_eq!(pieces.add(Piece::new(RunId(8), 1, 1, 1)), 0);
        assert_eq!(pieces.len(), 3);
    }
}
