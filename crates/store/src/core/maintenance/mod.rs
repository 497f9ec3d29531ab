//! Background work: periodic passes, emptying segments, scrubbing.

mod periodic;
mod scrub;
pub(crate) mod space;
pub(crate) mod verify;
