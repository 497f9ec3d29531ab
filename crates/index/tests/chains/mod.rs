//! Chained runs of one scope, inserted one by one or by concurrent threads.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_format::{PageHash, ScopeSlot};
use ritornello_index::conformance::{pages, place};
use ritornello_index::{MatchedRun, NewRun, PrefixIndex, RunId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub const SCOPE: ScopeSlot = ScopeSlot(1);

pub fn insert(
    index: &dyn PrefixIndex,
    generation: u64,
    parent: Option<PageHash>,
    pages: &[PageHash],
) -> ritornello_format::Result<RunId> {
    let place = place(generation, pages.len() as u32);
    let run = NewRun { scope: SCOPE, chained: true, parent, pages, place: &place, recency: 1 };
    index.insert(&run)
}

/// Runs `threads` writers and the same number of readers for two seconds, then sets `stop`. Each
/// reader calls `walk` with a random number, by which `walk` may select its method, and with a
/// sequence of page hashes. The runs that `walk` returns must hold leading pages of the sequence,
/// without gaps.
pub fn check_concurrently(
    index: &dyn PrefixIndex,
    threads: u64,
    length: usize,
    stop: &AtomicBool,
    walk: &(dyn Fn(u64, &[PageHash]) -> Vec<MatchedRun> + Sync),
) {
    let generation = &AtomicU64::new(1);
    std::thread::scope(|scope| {
        for writer in 0..threads {
            scope.spawn(move || {
                for round in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    // Insert the missing pages of a sequence in runs of at most 60 pages. Then
                    // remove one page, and with it all later pages of the sequence.
                    let family = (writer << 20) | (round % 40);
                    let keys = pages(family, length as u64);
                    let mut at = index.probe(SCOPE, &keys);
                    while at < length {
                        let to = (at + 60).min(length);
                        let parent = at.checked_sub(1).map(|at| keys[at]);
                        let next = generation.fetch_add(1, Ordering::Relaxed);
                        insert(index, next, parent, &keys[at..to]).unwrap();
                        at = to;
                    }
                    let cut = round as usize * 97 % length;
                    index.remove(SCOPE, &&keys[cut..=cut]);
                    assert_eq!(index.probe(SCOPE, &keys), cut);
                    if round % 16 == 0 {
                        index.sync().unwrap();
                    }
                }
            });
        }
        for reader in 0..threads {
            scope.spawn(move || {
                let mut seed = reader;
                while !stop.load(Ordering::Relaxed) {
                    seed = ritornello_index::synthetic::mix(seed);
                    let keys = pages(((seed % threads) << 20) | (seed % 40), length as u64);
                    let mut at = 0;
                    for step in walk(seed, &keys) {
                        assert_eq!(step.at, at);
                        at += step.pages;
                        if let Some(view) = index.run(step.run) {
                            let end = (step.first + step.pages) as usize;
                            // The run may have been truncated since the lookup, but its remaining
                            // pages must be equal.
                            let end = end.min(view.pages.len());
                            let from = (step.first as usize).min(end);
                            let keys = &keys[step.at as usize..][..end - from];
                            assert_eq!(&view.pages[from..end], keys);
                            index.touch(step.run, seed);
                        }
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_secs(2));
        stop.store(true, Ordering::Relaxed);
    });
}
