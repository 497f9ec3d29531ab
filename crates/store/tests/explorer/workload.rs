//! Families of lives: which acts can happen besides those of every life.

use crate::rng::Dice;

/// The family that a seed selects.
#[derive(Clone, Copy, Debug, Default)]
pub struct Family {
    /// The store's space and settings never change.
    pub plain: bool,
    /// A long life with one owner: only then does the journal grow until a checkpoint is due.
    pub steady: bool,
    /// The store is never full: flushed pages stay until they are deleted or dropped.
    pub never_full: bool,
    /// Client processes beside the owner.
    pub clients: usize,
    /// The segments lie in two directories, one of which may be away.
    pub volumes: bool,
    /// Syncs may fail.
    pub faults: bool,
    /// Requests create scopes, more than the registry holds.
    pub salted: bool,
    /// The store begins with an index that persists nothing, and is converted.
    pub converted: bool,
}

impl Family {
    pub fn of(seed: u64, fate: &mut Dice) -> Self {
        let plain = Self { plain: true, converted: fate.one_in(4), ..Self::default() };
        match seed % 6 {
            0 | 2 => Self::default(),
            1 => Self { converted: false, steady: seed % 24 == 1, ..plain },
            3 => {
                let (clients, never_full) = (1 + fate.below(2) as usize, fate.one_in(2));
                Self { clients, never_full, faults: fate.one_in(4), ..plain }
            }
            4 => Self { never_full: true, faults: true, salted: true, ..plain },
            _ => {
                let (faults, clients) = (fate.one_in(2), usize::from(fate.one_in(3)));
                Self { never_full: true, volumes: true, faults, clients, ..plain }
            }
        }
    }

    /// Whether only the acts of every life happen.
    pub fn is_simple(&self) -> bool {
        self.clients == 0 && !self.volumes && !self.faults
    }
}
