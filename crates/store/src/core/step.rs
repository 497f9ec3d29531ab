//! Limits of the work under one hold of the core state's lock.

use ritornello_format::UNIT;

/// Maximum runs handled under one hold of the core state's lock. Waiting threads take the lock
/// between two steps, so their wait does not grow with the size of the store.
pub(crate) const STEP_RUNS: usize = 1024;

/// Approximate maximum of the units evicted under one hold of the core state's lock, which bounds
/// the delay of waiting threads. The last victim may exceed the maximum by less than two chunks of
/// 16 MiB, one page and one run header: eviction rounds the units that it cuts off a piece up to
/// whole chunks and pages, and takes the rest of the piece too if less than a chunk would remain;
/// with the last pages of a run it takes the run's header.
pub(crate) const STEP_UNITS: u64 = (16 << 20) / UNIT;
