//! The crash explorer: random lives of a whole store on a disk that forgets, tears and reorders
//! what was not synced. At many moments of every life power goes in several ways, and each resulting
//! disk is opened and judged:
//!
//! * no page ever holds another's bytes, and every promised page is delivered, flushed or not;
//! * what was flushed, and not deleted, dropped or evicted since, is present; in a store that is never
//!   full nothing is evicted, and a kill, a failed sync or an absent volume is no excuse;
//! * what was dropped, or deleted and flushed, stays gone;
//! * no tail is present without its head, unless the head's volume is away;
//! * retained and leased pages are not evicted, whatever becomes of the store's space;
//! * no more is allocated than the capacity, or than the larger one while it becomes smaller;
//! * opening never fails, and the opened store takes a put, a flush and a get, and completes a change
//!   of its space that was begun;
//! * nothing is created under the mount point of a volume that is away;
//! * a put that is not committed is answered so: by a poisoned owner, or by one that did not reserve
//!   its space.
//!
//! The seed decides the kind of a life: see [`workload`].
//!
//! A life follows from its seed alone. `RITORNELLO_CRASH_SEED=7` runs life 7 and prints its acts;
//! `RITORNELLO_CRASH_STATES=1000000` runs lives until that many states were judged, starting with the
//! seed `RITORNELLO_CRASH_FROM`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![cfg(not(loom))]

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

use history::Life;
use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Default number of crash states.
const STATES: u64 = 110_000;
/// Seeds of lives that once failed:
///
/// 37: a checkpoint made records durable before the data that they name. 108: a directory could not
/// be added again after a kill while it was added. 20066: a put was committed within a flush, and
/// its record reached the disk with earlier ones.
const REGRESSIONS: &[u64] = &[37, 108, 20066];

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value}?")))
}

fn live(seed: u64, tell: bool) -> u64 {
    let mut life = Life::new(seed, tell);
    let ended = catch_unwind(AssertUnwindSafe(|| life.live()));
    if ended.is_err() {
        panic!(
            "life {seed} ended badly at {}: to see it again, run\n    RITORNELLO_CRASH_SEED={seed} \
             cargo test -p ritornello-store --test explorer -- --nocapture",
            life.now
        );
    }
    life.states
}

#[test]
fn no_moment_of_power_loss_costs_flushed_pages() {
    if let Some(seed) = number("RITORNELLO_CRASH_SEED") {
        println!("life {seed}: {} crash states", live(seed, true));
        return;
    }
    let wanted = number("RITORNELLO_CRASH_STATES").unwrap_or(STATES);
    let from = number("RITORNELLO_CRASH_FROM").unwrap_or(0);
    let started = Instant::now();
    for seed in REGRESSIONS {
        live(*seed, false);
    }
    let (next, states) = (AtomicU64::new(from), AtomicU64::new(0));
    let hands = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..hands {
            scope.spawn(|| {
                while states.load(Ordering::Relaxed) < wanted {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    states.fetch_add(live(seed, false), Ordering::Relaxed);
                }
            });
        }
    });
    let (states, lives) = (states.into_inner(), next.into_inner() - from);
    let rate = states as f64 / started.elapsed().as_secs_f64();
    println!("{states} crash states of {lives} lives, {rate:.0} a second");
    assert!(states >= wanted);
}

/// A failure is reproducible from its seed: the same life does the same to its disk.
#[test]
fn life_is_deterministic() {
    let changes_digest = |seed| {
        let mut life = Life::new(seed, false);
        life.live();
        (life.states, life.changes_digest())
    };
    for seed in 1000..1006 {
        assert_eq!(changes_digest(seed), changes_digest(seed), "life {seed}");
    }
}
