//! Unique numbers for runs and reservations, across all owners of a store.

use crate::core::StoreCore;
use ritornello_format::{Error, Manifest, Result};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A new upper half is taken when fewer numbers than this are left of the lower half. Half of the
/// margin bounds the numbers that concurrent calls take between two checks.
const MARGIN: u64 = 1 << 26;

/// The first number with the upper half `generations`.
pub(crate) fn first(generations: u32) -> u64 {
    (u64::from(generations) << 32) | 1
}

impl StoreCore {
    pub(crate) fn unique_number(&self) -> u64 {
        self.next_generation.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes the next upper half, durably, before the lower half could carry into it: the next
    /// owner begins after the manifest's upper half.
    ///
    /// # Errors
    /// File-system errors; `Retry` if few numbers are left and another thread changes the manifest
    /// until `deadline`.
    pub(crate) fn ensure_numbers(&self, deadline: Instant) -> Result<()> {
        let left = || (1 << 32) - (self.next_generation.load(Ordering::Relaxed) & 0xffff_ffff);
        if left() >= MARGIN {
            return Ok(());
        }
        let Some(_shape) = self.shape.try_lock_until(deadline) else {
            if left() >= MARGIN / 2 {
                return Ok(());
            }
            return Err(Error::retry("the store's manifest is being changed: put again"));
        };
        if left() < MARGIN {
            let mut manifest = Manifest::clone(&self.manifest());
            manifest.generations += 1;
            self.write_manifest(&manifest)?;
            self.next_generation.store(first(manifest.generations), Ordering::Relaxed);
            *self.manifest.write() = manifest.into();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use ritornello_medium::SimDisk;
    use std::path::Path;
    use std::sync::Arc;

    #[test]
    fn numbers_never_reach_the_next_owners() {
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
        let upper = core.unique_number() >> 32;
        core.next_generation.store((upper << 32) + (1 << 32) - 10, Ordering::Relaxed);
        core.ensure_numbers(Instant::now()).unwrap();
        assert_eq!(core.unique_number(), first(upper as u32 + 1));
        // An unclean end: the new upper half is in the manifest nevertheless.
        drop(core);
        let next = open(None);
        assert_eq!(next.unique_number(), first(upper as u32 + 2));
    }
}
