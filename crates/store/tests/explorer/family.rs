//! Kinds of lives: what can happen in them besides the acts of every life.

use crate::dice::Dice;

/// What a life's seed makes of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Family {
    /// Nothing of the store's space and settings ever changes.
    pub plain: bool,
    /// A long life with one owner: only then does the journal grow until a checkpoint is due.
    pub steady: bool,
    /// The store is never full: what is flushed stays until it is deleted or dropped.
    pub letter: bool,
    /// Client processes beside the owner.
    pub clients: usize,
    /// The segments lie in two directories, one of which may be away.
    pub volumes: bool,
    /// Syncs may fail.
    pub faults: bool,
    /// Requests make scopes, more than the registry holds.
    pub salted: bool,
    /// The store begins with an index that keeps nothing, and is converted.
    pub converted: bool,
}

impl Family {
    pub fn of(seed: u64, fate: &mut Dice) -> Self {
        let plain = Self { plain: true, converted: fate.one_in(4), ..Self::default() };
        match seed % 6 {
            0 | 2 => Self::default(),
            1 => Self { converted: false, steady: seed % 24 == 1, ..plain },
            3 => {
                let (clients, letter) = (1 + fate.below(2) as usize, fate.one_in(2));
                Self { clients, letter, faults: fate.one_in(4), ..plain }
            }
            4 => Self { letter: true, faults: true, salted: true, ..plain },
            _ => {
                let (faults, clients) = (fate.one_in(2), usize::from(fate.one_in(3)));
                Self { letter: true, volumes: true, faults, clients, ..plain }
            }
        }
    }

    /// Whether only the acts of every life happen.
    pub fn is_simple(&self) -> bool {
        self.clients == 0 && !self.volumes && !self.faults
    }
}
