//! Limits of what may be stored and kept: admission, quotas, retention, the index's memory.

mod admission;
mod index_memory;
pub(crate) mod quota;
pub(crate) mod retention;
