//! The space of a store: what is free soon, how much there may be, and moving runs within it.

pub(crate) mod capacity;
pub(crate) mod limbo;
mod relocate;
