//! The workload that a history's seed selects: the kinds of operations that the history has, its
//! clients and its faults.

use crate::rng::Rng;

/// Choices that distinguish the history of one seed from the histories of other seeds. The default
/// is an owner without clients, volumes that stay present, and syncs that succeed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Workload {
    /// No operation changes the store's capacity, directories, settings or clock, or retains or
    /// leases pages.
    pub plain: bool,
    /// A long history with one owner, in which the journal grows until a checkpoint is due.
    pub steady: bool,
    /// The store is never full: flushed pages stay until they are deleted or dropped.
    pub never_full: bool,
    /// Number of client processes in addition to the owner.
    pub clients: usize,
    /// The segments are in two or four directories, one of which may be absent.
    pub volumes: bool,
    /// Syncs of the disk may fail.
    pub faults: bool,
    /// Requests create scopes, more than the registry holds.
    pub salted: bool,
    /// The store begins with the index `memory`, which persists nothing, and is converted to `run`.
    pub converted: bool,
}

impl Workload {
    pub fn of(seed: u64, extra_rng: &mut Rng) -> Self {
        let plain = Self { plain: true, converted: extra_rng.one_in(4), ..Self::default() };
        match seed % 6 {
            0 | 2 => Self::default(),
            1 => Self { converted: false, steady: seed % 24 == 1, ..plain },
            3 => {
                let (clients, never_full) = (1 + extra_rng.below(2) as usize, extra_rng.one_in(2));
                Self { clients, never_full, faults: extra_rng.one_in(4), ..plain }
            }
            4 => Self { never_full: true, faults: true, salted: true, ..plain },
            _ => {
                let (faults, clients) = (extra_rng.one_in(2), usize::from(extra_rng.one_in(3)));
                Self { never_full: true, volumes: true, faults, clients, ..plain }
            }
        }
    }

    /// Returns whether the history has no clients, no absent volumes and no failing syncs. If so,
    /// `Operation::choose` chooses its operations; in a steady history maintenance takes the place
    /// of operations that open the store.
    pub fn is_simple(&self) -> bool {
        self.clients == 0 && !self.volumes && !self.faults
    }
}
