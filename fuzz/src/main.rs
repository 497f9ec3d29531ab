//! Feeds the parsers listed in `targets.rs` with nearly valid inputs: valid inputs that are changed
//! in a few bytes, truncated, spliced and extended. Checksums of the store's own formats are
//! recomputed, because a parser would otherwise reject most inputs by the checksum. A parser may
//! refuse an input; a parser must not panic, hang, or allocate the number of bytes that a length
//! field claims. The fuzzer also parses messages of the socket, sends requests to a store, and
//! applies the same random operations to the indexes `run`, `art` and `memory`.
//!
//! ```text
//! cargo run -p ritornello-fuzz -- [SECONDS per target] [SEED] [TARGET]
//! ```
//! The same seed makes the same inputs in the same order. An input is printed if its parser panics,
//! or returns after more than five seconds. It is not printed if its parser aborts the process
//! (as a failed allocation does), or never returns.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a fuzzer fails by panicking")]

mod indexes;
mod mutate;
mod socket;
mod targets;

use mutate::Mutator;
use rustix::process::{Resource, Rlimit, setrlimit};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use targets::{Target, targets};

/// Maximum time of a parser for one input. The time is checked after the parser has returned.
const SLOW: Duration = Duration::from_secs(5);
/// Limit of the process's address space in bytes. A parser that allocates the number of bytes that
/// a length field claims exceeds the limit if the field has a large value, such as 0xffff_ffff.
const MEMORY_MAX: u64 = 2 << 30;

fn main() -> ExitCode {
    setrlimit(Resource::As, Rlimit { current: Some(MEMORY_MAX), maximum: None }).unwrap();
    let mut words = std::env::args().skip(1);
    let mut number = |default: f64| words.next().map_or(default, |word| word.parse().unwrap());
    let seconds = number(2.0);
    let seed = number(0.0) as u64;
    let only = words.next();
    let mut broken = false;
    for target in targets() {
        if only.as_ref().is_none_or(|only| only == target.name) {
            broken |= !fuzz(&target, Duration::from_secs_f64(seconds), seed);
        }
    }
    ExitCode::from(u8::from(broken))
}

/// Returns false after the first input that made the target panic or take longer than [`SLOW`].
/// Panics if the target refuses one of its valid inputs.
fn fuzz(target: &Target, time: Duration, seed: u64) -> bool {
    let mut mutator = Mutator::new(seed, &target.seeds);
    let (started, mut inputs, mut accepted) = (Instant::now(), 0u64, 0u64);
    for good in &target.seeds {
        assert!((target.parse)(good), "{}: a valid input is refused", target.name);
    }
    while started.elapsed() < time {
        let mut input = mutator.next();
        (target.seal)(&mut input);
        let begun = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| (target.parse)(&input)));
        if outcome.is_err() || begun.elapsed() > SLOW {
            let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("{} failed, input {inputs} of seed {seed}:\n{hex}", target.name);
            return false;
        }
        inputs += 1;
        accepted += u64::from(outcome.is_ok_and(|accepted| accepted));
    }
    println!("{:<12} {inputs:>10} inputs, {accepted:>9} accepted", target.name);
    true
}
