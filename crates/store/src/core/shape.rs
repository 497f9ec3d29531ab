//! The shape of a store: its capacity and directories, as the manifest records them, and the
//! numbers that the manifest makes unique across owners.

use crate::budget::Budget;
use crate::directory::Directory;
use crate::rounds::Rounds;
use parking_lot::{Mutex, MutexGuard, RwLock};
use ritornello_format::{Error, Manifest, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A unique number has an upper half, from the manifest, and a lower half of 32 bits, a
/// counter. When fewer than `MARGIN` numbers are left, a put takes the next upper half from the
/// manifest.
///
/// If another change of the manifest does not end before the put's deadline, the put continues with
/// the old upper half, and fails only if fewer than `MARGIN / 2` numbers are left. The other
/// `MARGIN / 2` are for concurrent puts, which check how many numbers are left and only then take
/// some.
const MARGIN: u64 = 1 << 26;

/// The manifest and the budget in use.
pub(crate) struct Shape {
    directory: Directory,
    /// The sync rounds, which are poisoned if a change fails that may be on the disk.
    rounds: Arc<Rounds>,
    manifest: RwLock<Arc<Manifest>>,
    budget: RwLock<Budget>,
    /// Locked while the capacity, the directories or the manifest change. In the lock order only
    /// the lock of the index's checkpoints comes before this lock.
    changing: Mutex<()>,
    /// Locked while a segment file is created.
    growing: Mutex<()>,
    next_number: AtomicU64,
}

/// The exclusive right to change the shape, until it is dropped.
pub(crate) struct ShapeChange<'a> {
    shape: &'a Shape,
    _changing: MutexGuard<'a, ()>,
}

impl Shape {
    pub(super) fn new(
        directory: Directory,
        rounds: Arc<Rounds>,
        manifest: Manifest,
        budget: Budget,
    ) -> Self {
        Self {
            directory,
            rounds,
            next_number: AtomicU64::new(first(manifest.generations)),
            manifest: RwLock::new(Arc::new(manifest)),
            budget: RwLock::new(budget),
            changing: Mutex::new(()),
            growing: Mutex::new(()),
        }
    }

    /// The files of the store.
    pub(super) fn directory(&self) -> &Directory {
        &self.directory
    }

    pub(super) fn manifest(&self) -> Arc<Manifest> {
        Arc::clone(&self.manifest.read())
    }

    /// How the capacity is divided between segments, index and scope registry.
    pub(super) fn budget(&self) -> Budget {
        *self.budget.read()
    }

    /// Excludes other changes while the result is held; `None` if another change has not ended by
    /// `deadline`.
    pub(super) fn change_by(&self, deadline: Instant) -> Option<ShapeChange<'_>> {
        let changing = self.changing.try_lock_until(deadline)?;
        Some(ShapeChange { shape: self, _changing: changing })
    }

    /// Excludes the creation of segment files by other threads while the result is held; `None` if
    /// a creation has not ended by `deadline`.
    pub(super) fn pause_growth(&self, deadline: Instant) -> Option<MutexGuard<'_, ()>> {
        self.growing.try_lock_until(deadline)
    }

    /// A number for a run or a reservation, unique across all owners.
    pub(super) fn unique_number(&self) -> u64 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn next_number(&self) -> u64 {
        self.next_number.load(Ordering::Relaxed)
    }

    /// Takes the next upper half, durably, before the lower half overflows into it: otherwise the
    /// next owner, which begins at the upper half after the manifest's, would reuse numbers.
    ///
    /// # Errors
    /// File-system errors; `Retry` if fewer than `MARGIN / 2` numbers are left and another thread's
    /// change of the manifest has not ended by `deadline`.
    pub(super) fn ensure_numbers(&self, deadline: Instant) -> Result<()> {
        let left = || (1 << 32) - (self.next_number() & 0xffff_ffff);
        if left() >= MARGIN {
            return Ok(());
        }
        let Some(change) = self.change_by(deadline) else {
            if left() >= MARGIN / 2 {
                return Ok(());
            }
            return Err(Error::retry("the store's manifest is being changed: put again"));
        };
        if left() < MARGIN {
            let mut manifest = Manifest::clone(&self.manifest());
            manifest.generations += 1;
            change.write(&manifest)?;
            self.next_number.store(first(manifest.generations), Ordering::Relaxed);
            change.publish(manifest);
        }
        Ok(())
    }
}

impl ShapeChange<'_> {
    /// Replaces the manifest on disk.
    ///
    /// # Errors
    /// File-system errors. After a `Fatal` error the next owner may read the old or the new
    /// manifest. The store is then poisoned, so that no acknowledged change depends on which of the
    /// two is read.
    pub(super) fn write(&self, manifest: &Manifest) -> Result<()> {
        let written = self.shape.directory.write_manifest(manifest);
        written.inspect_err(|error| self.shape.rounds.poison_if_fatal(error))
    }

    /// Replaces the manifest in use.
    pub(super) fn publish(&self, manifest: Manifest) {
        *self.shape.manifest.write() = Arc::new(manifest);
    }

    pub(super) fn set_budget(&self, budget: Budget) {
        *self.shape.budget.write() = budget;
    }
}

/// The first number with the upper half `generations`.
fn first(generations: u32) -> u64 {
    (u64::from(generations) << 32) | 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::StoreCore;
    use crate::options::Options;
    use ritornello_medium::SimDisk;
    use std::path::Path;

    #[test]
    fn numbers_stay_below_the_numbers_of_the_next_owner() {
        let disk = SimDisk::new(64 << 20);
        let open = |capacity| {
            let options = Options {
                capacity,
                segment_bytes: Some(1 << 20),
                background_threads: false,
                ..Options::new(Path::new("/store"))
            };
            StoreCore::open(Arc::new(disk.clone()), &options, Arc::new(|_| false)).unwrap()
        };
        let core = open(Some(16 << 20));
        let upper = core.shape.unique_number() >> 32;
        core.shape.next_number.store((upper << 32) + (1 << 32) - 10, Ordering::Relaxed);
        core.shape.ensure_numbers(Instant::now()).unwrap();
        assert_eq!(core.shape.unique_number(), first(upper as u32 + 1));
        // The store is not closed cleanly, but its manifest has the new upper half of the numbers.
        drop(core);
        let next = open(None);
        assert_eq!(next.shape.unique_number(), first(upper as u32 + 2));
    }
}
