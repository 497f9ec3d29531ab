//! The crash explorer: random histories of a whole store on a disk that loses, tears and reorders
//! unsynced writes. At many moments of every history the power fails in several ways, and each
//! resulting disk is opened and checked:
//!
//! * no page ever holds a different page's bytes, and a get delivers every page that a probe
//!   reports, flushed or not;
//! * pages that were flushed, and not deleted, dropped or evicted since, are present; in a store
//!   that is never full no page is evicted, not even after a kill, a failed sync or the absence of
//!   a volume;
//! * pages that were dropped, or deleted and flushed, do not return;
//! * no page of a chained sequence is present without the pages before it, unless a volume is
//!   absent;
//! * retained and leased pages are not evicted, even if the store's capacity changes;
//! * the allocated bytes do not exceed the capacity, or the previous capacity while the store
//!   shrinks;
//! * opening never fails, and the opened store takes a flush, a get and, if it has space, a put.
//!   The opened store completes an interrupted change of capacity;
//! * no file is created under the mount point of an absent volume;
//! * a commit fails only if the owner is poisoned, or is not the owner that reserved the space.
//!
//! The seed selects the history's workload: see [`workload`].
//!
//! A seed determines its history. `RITORNELLO_CRASH_SEED=7` runs history 7 and prints its
//! operations; `RITORNELLO_CRASH_STATES=1000000` runs histories, starting with the seed
//! `RITORNELLO_CRASH_FROM`, until 1,000,000 states were checked.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#[path = "../common/mod.rs"]
mod common;

mod checker;
mod client;
mod client_catalog;
mod history;
mod kinds;
mod mapped;
mod operation;
mod recording_medium;
mod rng;
mod unfinished_put;
mod workload;

use history::History;
use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Default minimum number of crash states.
const STATES: u64 = 110_000;
/// Seeds of histories that once failed:
///
/// 37: a checkpoint made records durable before the data that they name. 108: a directory could not
/// be added again after a kill while it was added. 20066: a put was committed within a flush, and
/// its record reached the disk with earlier records.
const REGRESSIONS: &[u64] = &[37, 108, 20066];

fn number(name: &str) -> Option<u64> {
    env::var(name)
        .ok()
        .map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

/// Returns the number of crash states checked, and whether a page was in several pieces when the
/// history ended.
fn run_history(seed: u64, verbose: bool) -> (u64, bool) {
    let mut history = History::new(seed, verbose);
    let ended = catch_unwind(AssertUnwindSafe(|| history.run()));
    if ended.is_err() {
        panic!(
            "history {seed} failed at {}: to repeat it, run\n    RITORNELLO_CRASH_SEED={seed} \
             cargo test -p ritornello-store --test explorer -- --nocapture",
            history.current
        );
    }
    (history.states, history.has_split_pages)
}

#[test]
fn no_moment_of_power_loss_costs_flushed_pages() {
    if let Some(seed) = number("RITORNELLO_CRASH_SEED") {
        println!("history {seed}: {} crash states", run_history(seed, true).0);
        return;
    }
    let states_min = number("RITORNELLO_CRASH_STATES").unwrap_or(STATES);
    let from = number("RITORNELLO_CRASH_FROM").unwrap_or(0);
    let started = Instant::now();
    for seed in REGRESSIONS {
        run_history(*seed, false);
    }
    let (next, states) = (AtomicU64::new(from), AtomicU64::new(0));
    let split = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while states.load(Ordering::Relaxed) < states_min {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let (checked, is_split) = run_history(seed, false);
                    states.fetch_add(checked, Ordering::Relaxed);
                    split.fetch_add(u64::from(is_split), Ordering::Relaxed);
                }
            });
        }
    });
    let (states, histories) = (states.into_inner(), next.into_inner() - from);
    let rate = states as f64 / started.elapsed().as_secs_f64();
    println!("{states} crash states of {histories} histories, {rate:.0} per second");
    assert!(states >= states_min);
    let split = split.into_inner();
    assert!(split >= histories / 36, "only {split} of {histories} histories split pages");
}

/// A failure is reproducible from its seed: a history repeats the same changes of its disk.
#[test]
fn history_is_deterministic() {
    let changes_digest = |seed| {
        let mut history = History::new(seed, false);
        history.run();
        (history.states, history.changes_digest())
    };
    for seed in 1000..1006 {
        assert_eq!(changes_digest(seed), changes_digest(seed), "history {seed}");
    }
}
