//! Limits of the work under one hold of the core state's lock.

use ritornello_format::UNIT;

/// Maximum runs handled under one hold of the core state's lock. A waiting thread is delayed by at
/// most one step, whatever the size of the store.
pub(crate) const STEP_RUNS: usize = 1024;

/// Maximum units evicted under one hold of the core state's lock, which bounds the delay of waiting
/// threads.
pub(crate) const STEP_UNITS: u64 = (16 << 20) / UNIT;
