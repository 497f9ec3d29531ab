//! Group commit, in every interleaving with at most three preemptions: a page that was reported as
//! durable is durable.
//!
//! `cargo test -p ritornello-store --features loom --test loom_rounds`
//!
//! Every caller marks its page as written and joins a round. A round makes the pages durable that
//! are marked when it begins. The marks are relaxed atomics, so the rounds alone order them. A cell
//! that loom watches stands for the disk, so two concurrent rounds fail the model.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_store::rounds::Rounds;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering as Plain};
use std::time::{Duration, Instant};

const CALLERS: usize = 3;

/// How the rounds of a [`Disk`] end.
#[derive(Clone, Copy, Debug)]
enum First {
    /// Every round succeeds.
    Well,
    /// The first round fails with an error that allows a retry; later rounds succeed.
    Refused,
    /// Every round fails with a fatal error.
    Broken,
}

struct Disk {
    rounds: Rounds,
    written: [AtomicBool; CALLERS],
    /// A standard mutex, which loom does not see: it orders no accesses in the model.
    state: Mutex<State>,
    /// A cell that each round writes: loom fails the model if two rounds overlap.
    busy: UnsafeCell<()>,
    first: First,
}

#[derive(Default)]
struct State {
    durable: [bool; CALLERS],
    /// Number of rounds that have begun.
    rounds: usize,
}

impl Disk {
    fn new(first: First) -> Arc<Self> {
        Arc::new(Self {
            rounds: Rounds::default(),
            written: Default::default(),
            state: Mutex::default(),
            busy: UnsafeCell::new(()),
            first,
        })
    }

    fn round(&self) -> Result<()> {
        // The round makes the pages durable that were written before it began.
        let written = self.written.each_ref().map(|page| page.load(Ordering::Relaxed));
        self.busy.with_mut(|_| ());
        let mut state = self.state.lock().unwrap();
        state.rounds += 1;
        match self.first {
            First::Refused if state.rounds == 1 => return Err(Error::retry("no room")),
            First::Broken => return Err(Error::fatal("the disk is broken")),
            _ => {}
        }
        state.durable = std::array::from_fn(|page| state.durable[page] || written[page]);
        Ok(())
    }

    fn put(&self, page: usize, deadline: Instant) -> Result<()> {
        self.written[page].store(true, Ordering::Relaxed);
        self.rounds.join(deadline, || self.round())?;
        let durable = self.state.lock().unwrap().durable[page];
        assert!(durable, "page {page} was reported as durable, and is not");
        let _turn = self.rounds.between(never())?;
        self.busy.with(|_| ());
        Ok(())
    }
}

fn never() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// `callers` threads put at the same time. Returns each result, and the number of rounds.
fn together(disk: &Arc<Disk>, callers: usize) -> (Vec<Result<()>>, usize) {
    let others: Vec<_> = (1..callers)
        .map(|page| {
            let disk = Arc::clone(disk);
            thread::spawn(move || disk.put(page, never()))
        })
        .collect();
    let mut results = vec![disk.put(0, never())];
    results.extend(others.into_iter().map(|other| other.join().unwrap()));
    (results, disk.state.lock().unwrap().rounds)
}

/// Runs a check in all interleavings with at most three preemptions, a limit that keeps the run to
/// seconds.
fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

#[test]
fn rounds_are_shared_and_durable() {
    static SHARED: AtomicUsize = AtomicUsize::new(0);
    static ALONE: AtomicUsize = AtomicUsize::new(0);
    model(|| {
        let (results, rounds) = together(&Disk::new(First::Well), CALLERS);
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        assert!((1..=CALLERS).contains(&rounds));
        let count = if rounds < CALLERS { &SHARED } else { &ALONE };
        count.fetch_add(1, Plain::Relaxed);
    });
    assert!(SHARED.load(Plain::Relaxed) > 0, "no two callers ever shared a round");
    assert!(ALONE.load(Plain::Relaxed) > 0, "the callers never had a round each");
}

#[test]
fn no_round_runs_after_a_fatal_round() {
    model(|| {
        let disk = Disk::new(First::Broken);
        let (results, rounds) = together(&disk, CALLERS);
        for caller in results {
            assert_eq!(caller.unwrap_err().kind(), ErrorKind::Fatal);
        }
        assert_eq!(rounds, 1, "a round followed a fatal round");
        assert!(disk.rounds.check().is_err() && disk.rounds.cause().is_some());
    });
}

#[test]
fn refused_round_fails_its_leader_only() {
    model(|| {
        let disk = Disk::new(First::Refused);
        let (results, rounds) = together(&disk, CALLERS);
        let failed: Vec<_> = results.into_iter().filter_map(Result::err).collect();
        assert_eq!(failed.len(), 1, "only the leader must fail: the next caller leads a new round");
        assert_eq!(failed[0].kind(), ErrorKind::Retry);
        assert!((2..=CALLERS).contains(&rounds));
        assert!(disk.rounds.check().is_ok());
    });
}

#[test]
fn no_round_begins_once_rounds_are_ended() {
    static BEFORE: AtomicUsize = AtomicUsize::new(0);
    static AFTER: AtomicUsize = AtomicUsize::new(0);
    model(|| {
        let disk = Disk::new(First::Well);
        let other = {
            let disk = Arc::clone(&disk);
            thread::spawn(move || disk.put(1, never()))
        };
        disk.rounds.end(never()).unwrap();
        let rounds = disk.state.lock().unwrap().rounds;
        match other.join().unwrap() {
            Ok(()) => BEFORE.fetch_add(1, Plain::Relaxed),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Closed);
                AFTER.fetch_add(1, Plain::Relaxed)
            }
        };
        assert_eq!(disk.state.lock().unwrap().rounds, rounds, "a round began after the end");
    });
    assert!(BEFORE.load(Plain::Relaxed) > 0 && AFTER.load(Plain::Relaxed) > 0);
}

#[test]
fn expired_caller_does_not_wait() {
    static LATE: AtomicUsize = AtomicUsize::new(0);
    model(|| {
        let disk = Disk::new(First::Well);
        let other = {
            let disk = Arc::clone(&disk);
            thread::spawn(move || disk.put(1, never()))
        };
        match disk.put(0, Instant::now()) {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Retry);
                LATE.fetch_add(1, Plain::Relaxed);
            }
        }
        other.join().unwrap().unwrap();
        // A caller that gave up at its deadline may try again.
        disk.put(0, never()).unwrap();
    });
    assert!(LATE.load(Plain::Relaxed) > 0, "no caller ever timed out");
}
