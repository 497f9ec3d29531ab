//! Limits of what may be stored and kept: admission, quotas, retention, the index's memory.

pub(crate) mod admission;
pub(crate) mod index_memory;
pub(crate) mod quota;
pub(crate) mod retained_runs;
pub(crate) mod retention;
pub(crate) mod store_clock;
pub(crate) mod usage;
