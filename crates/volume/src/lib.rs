//! Placeholder.

pub mod space;
