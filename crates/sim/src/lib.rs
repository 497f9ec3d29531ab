//! # ritornello-sim
//!
//! Request traces, replayed through the store's own eviction policies: which hit rate, at which
//! capacity, for how many writes. Without bytes, files or clocks, so that hours take seconds.
//!
//! A [`Trace`] comes from a file ([`read`]) or from a [`generate`]or. [`replay`] runs it against any
//! `dyn Eviction` in the protocol of the store's engine; [`belady`] against one that knows the
//! future, which no policy can beat. [`simulate`] does both and gives [`Row`]s, [`chart`] draws
//! them.
//!
//! **Promises.** The same trace, policy and capacity give the same figures, always. Nothing is
//! assumed that is counted: bytes written are those of the pages and headers that would have been.
//!
//! **May not know** where pages lie: space is a number here. Fragmentation and the reserve of free
//! space are the concern of `ritornello_volume::space`.

#![forbid(unsafe_code)]

mod belady;
mod chart;
pub mod generate;
mod read;
mod replay;
mod report;
mod sim_index;
mod trace;

pub use belady::belady;
pub use chart::chart;
pub use read::{BadLines, read};
pub use replay::{ReplayCounts, Sizes, replay};
pub use report::{Row, SimPolicy, simulate};
pub use trace::{Trace, TraceBuilder, TracePart};
