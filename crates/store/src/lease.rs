//! Leases: keep the bytes of a prefix in place until a reader has read them.
//!
//! A lease pins runs. The index may remove a pinned run at any time, for example by a deletion; its
//! extents are then deferred in the lease table, and freed when the last lease on the run ends.
//! Runs are looked up and pinned, and extents are allocated and freed, under the lock of the
//! owner's core state, so that no leased extent is allocated (`tests/loom_lease.rs` checks every
//! interleaving).
//!
//! A reader whose lease has expired may read the bytes of another run. The checksums detect this,
//! so leases are needed for hits, not for correctness.
//!
//! The leases and pins of a client may not exceed the leases and pins that are still free (the
//! dynamic threshold of Choudhury and Hahne, 1998). A single client thus has at most half of them,
//! and a later client still gets some.
//!
//! The same threshold bounds the space that a client's *counted* leases keep from eviction. All
//! leases are counted, except leases of reads and of puts in progress. After a grant that adds to
//! the client's units, these are at most the units of the store on which no client has a counted
//! lease. A run counts once for each client that leases it, however many leases the client has on
//! it, and once in the store's total, however many clients lease it. Requests that share a prefix
//! therefore share its units, and a lease on runs that another client has leased does not reduce
//! the shares of other clients. Leases of reads and of puts in progress are not counted, because
//! they end with the call, or after 2 minutes (a read) or 10 minutes (a put), and the I/O in flight
//! is bounded.

use crate::client_id::ClientId;
use ritornello_format::{Error, Extent, Result, UNIT};
use ritornello_index::RunId;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Debug;
use std::time::Duration;

#[cfg(test)]
mod model;

/// Maximum leases of all clients together.
pub const LEASES_MAX: usize = 65_536;
/// Maximum pins over all leases: a lease on three runs is three pins.
pub const PINS_MAX: usize = 1 << 20;
/// Maximum duration of a lease.
pub const LEASE_TTL_MAX: Duration = Duration::from_secs(3600);

/// A monotonic clock.
pub trait Clock: Send + Debug {
    /// Time since a fixed moment. Never decreases.
    fn now(&self) -> Duration;
}

/// The clock `CLOCK_BOOTTIME`, which continues while the machine sleeps, and cannot be set.
#[derive(Clone, Copy, Debug, Default)]
pub struct BootClock;

impl Clock for BootClock {
    fn now(&self) -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        // Both parts are non-negative: the clock starts at zero.
        Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
    }
}

/// All leases of an owner.
///
/// Invariants: the pin of a run counts how often leases name the run, and a run that no lease names
/// has no pin; extents are deferred only for runs in `pins`; `deferred_units` is their sum;
/// `deadlines` and `clients` name exactly the existing leases. The holders of a pin are the clients
/// with counted leases on its run; `leased_units` is the sum of the units of pins with holders, and
/// a client's units are the sum over the pins that it holds.
#[derive(Debug)]
pub struct LeaseTable {
    clock: Box<dyn Clock>,
    leases: HashMap<u64, Lease>,
    deadlines: BTreeSet<(Duration, u64)>,
    clients: BTreeMap<ClientId, Held>,
    pins: HashMap<RunId, Pin>,
    /// Sum of [`Pin::leases`] over all pins.
    pinned: usize,
    deferred_units: u64,
    /// Units of runs with counted leases, each run once.
    leased_units: u64,
    next: u64,
}

#[derive(Debug)]
struct Lease {
    runs: Box<[RunId]>,
    deadline: Duration,
    client: ClientId,
    /// Whether the lease counts towards the client's share of the space.
    counted: bool,
}

/// The leases, pins and leased units of one client.
#[derive(Debug, Default)]
struct Held {
    leases: BTreeSet<u64>,
    pins: usize,
    /// Units of runs that the client has counted leases on, each run once.
    units: u64,
}

#[derive(Debug, Default)]
struct Pin {
    leases: u32,
    /// Clients with counted leases on the run, and the number of these leases.
    holders: Vec<(ClientId, u32)>,
    /// Units that each holder is charged for the run: the run's units when its first holder leased
    /// it. Zero without holders.
    units: u64,
    /// Extents that the index has removed from the run, and that are freed when the last lease on
    /// the run ends.
    deferred: Vec<Extent>,
}

impl Default for LeaseTable {
    fn default() -> Self {
        Self::new()
    }
}

impl LeaseTable {
    /// Creates an empty table with the machine's clock.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(Box::new(BootClock))
    }

    /// Creates an empty table with another clock.
    #[must_use]
    pub fn with_clock(clock: Box<dyn Clock>) -> Self {
        // Numbers start at the nanoseconds since boot. An earlier owner since the boot cannot have
        // reached them, because no owner grants a lease every nanosecond. Zero is the null lease.
        let next = u64::try_from(clock.now().as_nanos()).unwrap_or(0).max(1);
        Self {
            clock,
            leases: HashMap::new(),
            deadlines: BTreeSet::new(),
            clients: BTreeMap::new(),
            pins: HashMap::new(),
            pinned: 0,
            deferred_units: 0,
            leased_units: 0,
            next,
        }
    }

    /// Leases `runs` for `ttl` (at most [`LEASE_TTL_MAX`]) for `client`, without counting their
    /// units. Returns the lease's number, which is never zero.
    ///
    /// The caller must have found the runs in the index under the lock that guards this table, or
    /// look them up again afterwards: otherwise a run may have been removed before it is pinned.
    ///
    /// # Errors
    /// `Retry` if the client would hold more of the [`LEASES_MAX`] leases than are left before the
    /// grant, or more of the [`PINS_MAX`] pins than are left after it; nothing is changed.
    pub fn grant(&mut self, runs: &[RunId], ttl: Duration, client: ClientId) -> Result<u64> {
        self.check_numbers(runs.len(), client)?;
        for run in runs {
            self.pins.entry(*run).or_default().leases += 1;
        }
        Ok(self.enter(runs, ttl, client, false))
    }

    /// Like [`grant`](Self::grant), but counted: leases the leading runs that fit the client's
    /// share of a store of `capacity` units. `units` returns the units of a run. Returns the
    /// lease's number and the number of leased runs.
    ///
    /// # Errors
    /// `Retry` as in [`grant`](Self::grant), or if the first run does not fit the rest of the
    /// client's share; nothing is changed.
    pub fn grant_leading(
        &mut self,
        runs: &[RunId],
        units: impl Fn(RunId) -> u64,
        capacity: u64,
        ttl: Duration,
        client: ClientId,
    ) -> Result<(u64, usize)> {
        self.check_numbers(runs.len(), client)?;
        let mut own = self.clients.get(&client).map_or(0, |own| own.units);
        let mut taken = 0;
        for run in runs {
            let pin = self.pins.entry(*run).or_default();
            let held = pin.holders.iter_mut().find(|(holder, _)| *holder == client);
            match held {
                Some((_, leases)) => *leases += 1,
                None => {
                    let first = pin.holders.is_empty();
                    let units = if first { units(*run) } else { pin.units };
                    let leased = self.leased_units + if first { units } else { 0 };
                    if own + units > capacity.saturating_sub(leased) {
                        if pin.leases == 0 {
                            self.pins.remove(run);
                        }
                        break;
                    }
                    pin.holders.push((client, 1));
                    pin.units = units;
                    self.leased_units = leased;
                    own += units;
                }
            }
            pin.leases += 1;
            taken += 1;
        }
        if taken == 0 && !runs.is_empty() {
            return Err(self.share_exceeded(client, capacity));
        }
        let number = self.enter(&runs[..taken], ttl, client, true);
        self.clients.entry(client).or_default().units = own;
        Ok((number, taken))
    }

    pub(crate) fn share_exceeded(&self, client: ClientId, capacity: u64) -> Error {
        Error::retry(
            "leases would keep too much of the store from other clients: release unneeded leases, \
             or make the store larger",
        )
        .with("own_bytes", self.clients.get(&client).map_or(0, |own| own.units) * UNIT)
        .with("leased_bytes", self.leased_units * UNIT)
        .with("capacity_bytes", capacity * UNIT)
    }

    /// Checks that the client may hold another lease, on `runs` runs.
    ///
    /// # Errors
    /// `Retry` as in [`grant`](Self::grant).
    fn check_numbers(&self, runs: usize, client: ClientId) -> Result<()> {
        let own = self.clients.get(&client).map_or((0, 0), |own| (own.leases.len(), own.pins));
        let left = (LEASES_MAX - self.leases.len(), PINS_MAX - self.pinned);
        if own.0 >= left.0 || own.1 + runs > left.1.saturating_sub(runs) {
            return Err(Error::retry("too many leases or leased runs: release unneeded leases")
                .with("leases", self.leases.len())
                .with("pins", self.pinned)
                .with("own", own.0));
        }
        Ok(())
    }

    /// Records a lease whose runs are pinned.
    fn enter(&mut self, runs: &[RunId], ttl: Duration, client: ClientId, counted: bool) -> u64 {
        let number = self.next;
        self.next += 1;
        self.pinned += runs.len();
        let deadline = self.clock.now().saturating_add(ttl.min(LEASE_TTL_MAX));
        self.deadlines.insert((deadline, number));
        let own = self.clients.entry(client).or_default();
        own.leases.insert(number);
        own.pins += runs.len();
        let lease = Lease { runs: runs.into(), deadline, client, counted };
        let old = self.leases.insert(number, lease);
        debug_assert!(old.is_none(), "numbers are not reused");
        number
    }

    /// Ends a lease. Returns the extents that no lease defers any longer. Ignores ended leases and
    /// the null lease.
    pub fn release(&mut self, lease: u64) -> Vec<Extent> {
        let mut freed = Vec::new();
        self.end(lease, &mut freed);
        freed
    }

    /// Ends expired leases. Returns the extents that no lease defers any longer, and the number of
    /// ended leases. Until this call an expired lease protects its runs: usually for at most half a
    /// second, the interval of the owner's periodic thread; longer while this thread waits for a
    /// disk: at most 10 seconds for each sync of pages, and without a limit while the store's own
    /// directory does not complete the write of a checkpoint or of the reservation log.
    pub fn expire(&mut self) -> (Vec<Extent>, u64) {
        let now = self.clock.now();
        let (mut freed, mut count) = (Vec::new(), 0);
        while let Some(&(deadline, lease)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.end(lease, &mut freed);
            count += 1;
        }
        (freed, count)
    }

    /// Ends all leases of a disconnected client. Returns the extents that no lease defers any
    /// longer.
    pub fn drop_client(&mut self, client: ClientId) -> Vec<Extent> {
        let mut freed = Vec::new();
        let leases = self.clients.get(&client).map(|own| own.leases.clone());
        for lease in leases.unwrap_or_default() {
            self.end(lease, &mut freed);
        }
        debug_assert!(!self.clients.contains_key(&client));
        freed
    }

    /// The leased runs.
    pub fn runs(&self) -> impl Iterator<Item = RunId> + '_ {
        self.pins.keys().copied()
    }

    /// Whether a lease is on `run`. An expired lease counts until [`expire`](Self::expire) ends it.
    #[must_use]
    pub fn is_leased(&self, run: RunId) -> bool {
        self.pins.contains_key(&run)
    }

    /// Defers the freeing of extents that the index removed from `run` until no lease is on it.
    /// Returns the extents that can be freed now: all of them if the run is not leased.
    pub fn defer(&mut self, run: RunId, extents: Vec<Extent>) -> Vec<Extent> {
        let Some(pin) = self.pins.get_mut(&run) else { return extents };
        self.deferred_units += units(&extents);
        pin.deferred.extend(extents);
        Vec::new()
    }

    /// The client that holds a lease.
    #[must_use]
    pub fn holder(&self, lease: u64) -> Option<ClientId> {
        self.leases.get(&lease).map(|lease| lease.client)
    }

    /// Number of leases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether the table has no leases.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Number of leased runs.
    #[must_use]
    pub fn leased_runs(&self) -> usize {
        self.pins.len()
    }

    /// Units whose freeing is deferred.
    #[must_use]
    pub fn deferred_units(&self) -> u64 {
        self.deferred_units
    }

    /// Units of the runs that counted leases keep from eviction, each run counted once.
    #[must_use]
    pub fn leased_units(&self) -> u64 {
        self.leased_units
    }

    fn end(&mut self, number: u64, freed: &mut Vec<Extent>) {
        let Some(lease) = self.leases.remove(&number) else { return };
        let timed = self.deadlines.remove(&(lease.deadline, number));
        debug_assert!(timed);
        let released = if lease.counted { self.uncount(&lease) } else { 0 };
        if let Some(own) = self.clients.get_mut(&lease.client) {
            own.leases.remove(&number);
            own.pins -= lease.runs.len();
            own.units -= released;
            if own.leases.is_empty() {
                self.clients.remove(&lease.client);
            }
        }
        self.pinned -= lease.runs.len();
        for run in lease.runs {
            let Some(pin) = self.pins.get_mut(&run) else {
                debug_assert!(false, "{run:?} is leased but not pinned");
                continue;
            };
            pin.leases -= 1;
            if pin.leases == 0 {
                let deferred = self.pins.remove(&run).unwrap_or_default().deferred;
                self.deferred_units -= units(&deferred);
                freed.extend(deferred);
            }
        }
        let sums = (self.deferred_units, self.leased_units, self.pinned);
        debug_assert!(!self.pins.is_empty() || sums == (0, 0, 0));
    }

    /// Removes a counted lease from the holders of its runs. Returns the units that its client no
    /// longer leases.
    fn uncount(&mut self, lease: &Lease) -> u64 {
        let mut released = 0;
        for run in &lease.runs {
            let Some(pin) = self.pins.get_mut(run) else { continue };
            let Some(at) = pin.holders.iter().position(|(holder, _)| *holder == lease.client)
            else {
                debug_assert!(false, "{run:?} is leased but not counted");
                continue;
            };
            pin.holders[at].1 -= 1;
            if pin.holders[at].1 > 0 {
                continue;
            }
            pin.holders.swap_remove(at);
            released += pin.units;
            if pin.holders.is_empty() {
                self.leased_units -= std::mem::take(&mut pin.units);
            }
        }
        released
    }
}

fn units(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| u64::from(extent.units)).sum()
}
