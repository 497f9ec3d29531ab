//! # ritornello-sim
//!
//! Replays request traces through the store's eviction policies, to measure the hit rate and the
//! bytes written at a given capacity. A block is a page of a trace. A replay moves no bytes and
//! needs no files or clocks, so that hours of requests take seconds.
//!
//! A [`Trace`] is [`read`] from a file or made by a [generator](generate). [`replay`] runs the
//! trace against any `dyn Eviction` with the calls that the store makes, [`belady`] against an
//! optimal policy, which knows the future. [`simulate`] runs either of them and returns a [`Row`];
//! [`chart`] draws rows. [`pipeline`] is unrelated to traces: a model of prefill that overlaps
//! transfers.
//!
//! **Promises.** The same trace, policy and sizes always give the same counts. Writes are counted,
//! not estimated: the bytes include the padded pages that the store would write, and, except in
//! [`belady`], which has no runs, the run headers.
//!
//! **Must not know** where pages are stored: a simulation knows space as a number. Fragmentation
//! and the reserve of free space are the concern of `ritornello_volume::space`.

#![forbid(unsafe_code)]

mod belady;
mod chart;
pub mod generate;
pub mod pipeline;
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
