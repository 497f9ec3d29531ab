//! Results of each policy at each capacity.

use crate::Trace;
use crate::belady::belady;
use crate::replay::{ReplayCounts, Sizes, replay};
use ritornello_format::{Error, Result};
use ritornello_store::eviction::PolicyKind;
use serde::Serialize;
use std::time::Instant;

/// An eviction policy of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimPolicy {
    /// A policy of the store.
    Store(PolicyKind),
    /// The optimal policy: the upper bound.
    Belady,
}

impl SimPolicy {
    /// The name users type.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Store(policy) => policy.word(),
            Self::Belady => "belady",
        }
    }

    /// Parses the name users type.
    ///
    /// # Errors
    /// `Invalid` with the list of names if `word` is not a policy's name.
    pub fn parse(word: &str) -> Result<Self> {
        if word == "belady" {
            return Ok(Self::Belady);
        }
        PolicyKind::parse(word).map(Self::Store).map_err(|_| {
            let words = PolicyKind::ALL.map(PolicyKind::word).join(", ");
            Error::invalid(format!("a policy is one of {words}, belady")).with("given", word)
        })
    }
}

/// The result of one policy at one capacity on one trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Name of the trace.
    pub trace: String,
    /// Name of the policy.
    pub policy: &'static str,
    /// Capacity as a share of the footprint.
    pub capacity_fraction: f64,
    /// Capacity in blocks.
    pub capacity_blocks: u64,
    /// Distinct blocks of the trace.
    pub footprint_blocks: u64,
    /// Requests replayed.
    pub requests: u64,
    /// Block references replayed.
    pub block_references: u64,
    /// Share of the requests, starting at the first, whose hits do not count in `hit_rate`.
    pub warm_up: f64,
    /// Hits per block reference after the warm-up.
    pub hit_rate: f64,
    /// Blocks written.
    pub blocks_written: u64,
    /// Blocks that were not written, because the policy freed no space for them, or for an earlier
    /// run of the same request.
    pub blocks_refused: u64,
    /// Blocks written per distinct block of the trace.
    pub writes_per_unique: f64,
    /// Bytes written (pages, padding, and run headers, which Belady's bound does not have) per byte
    /// of the blocks written; 1 if no block was written.
    pub write_amplification: f64,
    /// Duration of the replay in seconds.
    pub seconds: f64,
    /// Block references replayed per second.
    pub references_per_second: f64,
}

/// Replays `trace` through `policy` with a capacity of `fraction` of the trace's footprint, at
/// least one block. `progress` receives the position in the trace, in requests, every 1,024
/// requests and at the end.
///
/// # Errors
/// `Invalid` if the capacity, the block size or the warm-up is out of range; `Fatal` if a policy
/// violates its contract.
pub fn simulate(
    trace: &Trace,
    policy: SimPolicy,
    fraction: f64,
    block_bytes: u64,
    warm_up: f64,
    progress: &mut dyn FnMut(u64),
) -> Result<Row> {
    if !(fraction > 0.0 && fraction <= 1.0) {
        return Err(Error::invalid("a capacity is above 0 % and at most 100 % of the footprint")
            .with("given", fraction));
    }
    let capacity_blocks = ((trace.footprint() as f64 * fraction).round() as u64).max(1);
    let sizes = Sizes { capacity_blocks, block_bytes, warm_up };
    let started = Instant::now();
    let counts: ReplayCounts = match policy {
        SimPolicy::Belady => belady(trace, &sizes, progress)?,
        SimPolicy::Store(policy) => replay(trace, policy.build().as_mut(), &sizes, progress)?,
    };
    let seconds = started.elapsed().as_secs_f64();
    Ok(Row {
        trace: trace.name().to_owned(),
        policy: policy.word(),
        capacity_fraction: fraction,
        capacity_blocks,
        footprint_blocks: trace.footprint() as u64,
        requests: trace.requests() as u64,
        block_references: trace.references() as u64,
        warm_up,
        hit_rate: counts.hit_rate(),
        blocks_written: counts.admitted,
        blocks_refused: counts.refused,
        writes_per_unique: counts.admitted as f64 / trace.footprint().max(1) as f64,
        write_amplification: counts.write_amplification(),
        seconds,
        references_per_second: trace.references() as f64 / seconds.max(1e-9),
    })
}
