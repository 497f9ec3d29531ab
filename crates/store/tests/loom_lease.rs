//! A lookup that leases a run, concurrent with its eviction or deletion, in every interleaving:
//! while the lease exists, the run's space is not allocated to another run.
//!
//! `cargo test -p ritornello-store --features loom --test loom_lease`
//!
//! A cell that loom watches stands for the bytes of a run. A read under a lease and a write of
//! another run in the same place hold no lock, and must never overlap. As in the store, the lease
//! table, the free space and the choice of victims share one mutex; the index has a separate lock.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex, RwLock};
use loom::thread;
use ritornello_format::{Extent, SegmentId};
use ritornello_index::RunId;
use ritornello_store::ClientId;
use ritornello_store::lease::{Clock, LeaseTable};
use std::time::Duration;

const RUN: RunId = RunId(1);
const UNITS: u64 = 64;
const PLACE: Extent = Extent { segment: SegmentId(0), start: 0, units: UNITS as u32 };
/// Capacity that the lease table divides among clients: the run fits the share of each client.
const CAPACITY: u64 = 2 * UNITS;

#[derive(Debug)]
struct StoppedClock;

impl Clock for StoppedClock {
    fn now(&self) -> Duration {
        Duration::from_secs(1)
    }
}

struct Owner {
    state: Mutex<State>,
    /// The place of the run; `None` if the run does not exist.
    index: RwLock<Option<Extent>>,
    /// The bytes at [`PLACE`].
    bytes: UnsafeCell<()>,
}

struct State {
    leases: LeaseTable,
    free: Vec<Extent>,
}

impl Owner {
    fn new() -> Arc<Self> {
        let leases = LeaseTable::with_clock(Box::new(StoppedClock));
        Arc::new(Self {
            state: Mutex::new(State { leases, free: Vec::new() }),
            index: RwLock::new(Some(PLACE)),
            bytes: UnsafeCell::new(()),
        })
    }

    /// Finds and pins the run under the lock of the state, so that no eviction happens in between.
    fn lease(&self, client: ClientId) -> Option<u64> {
        let mut state = self.state.lock().unwrap();
        self.index.read().unwrap().as_ref()?;
        let ttl = Duration::from_secs(9);
        let granted = state.leases.grant_leading(&[RUN], |_| UNITS, CAPACITY, ttl, client);
        granted.ok().map(|(lease, _)| lease)
    }

    /// Leases in another order, which the lease table allows: finds the run without the lock, pins
    /// it, and looks it up again.
    fn lease_and_look_again(&self, client: ClientId) -> Option<u64> {
        self.index.read().unwrap().as_ref()?;
        let lease = self.state.lock().unwrap().leases.grant(&[RUN], Duration::MAX, client).unwrap();
        if self.index.read().unwrap().is_some() {
            return Some(lease);
        }
        self.release(lease);
        None
    }

    fn read(&self) {
        self.bytes.with(|_| ());
    }

    fn release(&self, lease: u64) {
        let mut state = self.state.lock().unwrap();
        let freed = state.leases.release(lease);
        state.free.extend(freed);
    }

    /// Removes the run. If `respectful`, acts like an eviction, which does not remove a leased run;
    /// otherwise, like a deletion, which ignores leases.
    fn remove(&self, respectful: bool) {
        let mut state = self.state.lock().unwrap();
        if respectful && state.leases.is_leased(RUN) {
            return;
        }
        if let Some(extent) = self.index.write().unwrap().take() {
            let freed = state.leases.defer(RUN, vec![extent]);
            state.free.extend(freed);
        }
    }

    /// Writes another run to the space if the space is free. Returns whether it was free.
    fn reuse(&self) -> bool {
        let taken = self.state.lock().unwrap().free.pop();
        if taken.is_some() {
            self.bytes.with_mut(|_| ());
        }
        taken.is_some()
    }
}

/// Checks at the end that either the run exists, or its space was freed exactly once.
fn check_end(owner: &Owner, reused: bool) {
    let mut state = owner.state.lock().unwrap();
    let leftover = state.leases.drop_client(ClientId(2));
    assert!(leftover.is_empty() && state.leases.is_empty());
    assert_eq!((state.leases.deferred_units(), state.leases.leased_units()), (0, 0));
    let present = owner.index.read().unwrap().is_some();
    let copies = usize::from(present) + usize::from(reused) + state.free.len();
    assert_eq!(copies, 1, "the run's space was lost, or freed twice");
}

fn check_race(lease: fn(&Owner, ClientId) -> Option<u64>, respectful: bool) {
    loom::model(move || {
        let owner = Owner::new();
        let reader = {
            let owner = Arc::clone(&owner);
            thread::spawn(move || {
                if let Some(lease) = lease(&owner, ClientId(1)) {
                    owner.read();
                    owner.release(lease);
                }
            })
        };
        let remover = {
            let owner = Arc::clone(&owner);
            thread::spawn(move || owner.remove(respectful))
        };
        let reused = owner.reuse();
        reader.join().unwrap();
        remover.join().unwrap();
        let reused = reused || owner.reuse();
        check_end(&owner, reused);
    });
}

#[test]
fn lookup_during_eviction_reads_no_reused_space() {
    check_race(Owner::lease, true);
}

#[test]
fn lookup_during_deletion_reads_no_reused_space() {
    check_race(Owner::lease, false);
}

#[test]
fn rechecked_lookup_during_deletion_reads_no_reused_space() {
    check_race(Owner::lease_and_look_again, false);
}

#[test]
fn two_lookups_during_deletion_read_no_reused_space() {
    loom::model(|| {
        let owner = Owner::new();
        let reader = {
            let owner = Arc::clone(&owner);
            thread::spawn(move || {
                if let Some(lease) = owner.lease(ClientId(1)) {
                    owner.read();
                    owner.release(lease);
                }
            })
        };
        let writer = {
            let owner = Arc::clone(&owner);
            thread::spawn(move || {
                owner.remove(false);
                owner.reuse()
            })
        };
        // This client does not release its lease: its process dies.
        if owner.lease(ClientId(2)).is_some() {
            owner.read();
            let mut state = owner.state.lock().unwrap();
            let freed = state.leases.drop_client(ClientId(2));
            state.free.extend(freed);
        }
        reader.join().unwrap();
        let reused = writer.join().unwrap();
        check_end(&owner, reused);
    });
}
