//! Reopens a poisoned store in the process that owns it, and closes a store whose path now leads to
//! another directory. In every process, the same thread sends this process's reports (module
//! `reports`) to the owner.
//!
//! A failed sync, or a failed write of metadata, poisons a core permanently, because the kernel may
//! have dropped the pages it could not write and may report success afterwards. The owner therefore
//! closes the core and opens a new core, which recovers as after a kill. The new core writes the
//! index into new files, because a sync of the old files could report success without writing them.
//! It drains the segments before it reuses free space. A dedicated thread reopens the store with
//! back-off; while the disks reject writes, the poisoned core keeps answering lookups and reads. If
//! only some volumes reject writes, the new core opens without these volumes.
//!
//! ```text
//! Owner, poisoned ── disks take writes, no own write in flight ──▶ Reopening ──▶ Owner, next epoch
//! any ── the path leads to another directory ──▶ Leaving ── no call in progress ──▶ Closed
//! ```
//!
//! The second line of the diagram serves late mounts; `departure` has the exact conditions for
//! leaving. An engine that starts before its disk is mounted creates a store below the mount point.
//! After the mount every process leaves this store within seconds, and can then open the path
//! again.

use crate::failover_catalog::FailoverCatalog;
use crate::heal_signal::HealSignal;
use crate::membership::Membership;
use crate::node_directory::Departure;
use crate::open_context::OpenContext;
use crate::owner::Owner;
use crate::reopening::Reopening;
use ritornello_format::{Error, Result};
use ritornello_store::{CatalogStats, Directory};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// First and longest pause between attempts to reopen a store. Clients look for the owner every 1
/// to 5 seconds, so all processes are served again within about 10 seconds of the end of a fault,
/// if recovery is fast.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(4));
/// Time without an attempt after which the pauses begin with the shortest again.
const BACKOFF_RESET: Duration = Duration::from_secs(60);
/// Maximum time an attempt waits for this process's writes in progress.
const WRITES_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time that an attempt to reopen or to leave waits until no call is inside the core; new
/// calls are blocked during this time.
const CALLS_TIMEOUT: Duration = Duration::from_millis(200);
/// Interval between checks of where the directory's path leads, and between reports, while the
/// store works.
const PATH_PERIOD: Duration = Duration::from_secs(2);
/// Shortest interval between log lines about a store that fails or cannot be reopened.
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// Pauses between attempts. The pauses continue to grow if the store fails again soon after it was
/// reopened.
#[derive(Debug, Default)]
struct Backoff {
    last: Option<(Instant, Duration)>,
}

impl Backoff {
    fn next(&mut self, now: Instant) -> Duration {
        let pause = match self.last {
            Some((at, pause)) if now.duration_since(at) < BACKOFF_RESET => {
                (2 * pause).min(PAUSES.1)
            }
            _ => PAUSES.0,
        };
        self.last = Some((now, pause));
        pause
    }
}

/// Limits log lines about a failed store to one in [`LOG_PERIOD`]. Holds the time of the last line.
#[derive(Debug, Default)]
struct LogThrottle(Option<Instant>);

impl LogThrottle {
    fn is_due(&mut self, now: Instant) -> bool {
        let due = self.0.is_none_or(|at| now.duration_since(at) >= LOG_PERIOD);
        if due {
            self.0 = Some(now);
        }
        due
    }
}

/// Starts the thread that runs this module. The thread ends when the store is closed, left or
/// dropped.
///
/// # Errors
/// `Retry` if the thread cannot be created.
pub(crate) fn start(catalog: &Arc<FailoverCatalog>) -> Result<()> {
    let (heal_signal, catalog) =
        (Arc::clone(&catalog.membership.opening.heal_signal), Arc::downgrade(catalog));
    std::thread::Builder::new()
        .name("ritornello-heal".to_owned())
        .spawn(move || run(&catalog, &heal_signal))
        .map(drop)
        .map_err(|error| {
            Error::retry("cannot start the thread that reopens a failed store").because(error)
        })
}

fn run(catalog: &Weak<FailoverCatalog>, heal_signal: &HealSignal) {
    let mut backoff = Backoff::default();
    let mut throttle = LogThrottle::default();
    let mut reopenings = 0;
    while heal_signal.wait(PATH_PERIOD) {
        let failed = Instant::now();
        let Some(owner) = catalog.upgrade() else { return };
        owner.report_to_owner();
        if let Some(departure) = owner.departure() {
            return owner.leave(departure, heal_signal);
        }
        let membership = &owner.membership;
        let (cause, dir) = (membership.failure(), membership.opening.directory.path().to_owned());
        drop(owner);
        let Some(cause) = cause else { continue };
        let dir = dir.display();
        let told = throttle.is_due(failed);
        if told {
            tracing::error!(
                %dir,
                cause,
                "a write or sync failed: the store refuses writes until it is reopened"
            );
        }
        loop {
            if !heal_signal.sleep(backoff.next(Instant::now())) {
                return;
            }
            let Some(catalog) = catalog.upgrade() else { return };
            catalog.report_to_owner();
            if let Some(departure) = catalog.departure() {
                return catalog.leave(departure, heal_signal);
            }
            match catalog.reopen(reopenings + 1) {
                Ok(reopened) => {
                    reopenings += u64::from(reopened);
                    let seconds = failed.elapsed().as_secs_f64();
                    if reopened && told {
                        tracing::warn!(%dir, seconds, "the store is reopened and takes writes again");
                    }
                    break;
                }
                Err(error) if throttle.is_due(Instant::now()) => {
                    tracing::warn!(%error, %dir, "the failed store cannot be reopened yet");
                }
                Err(error) => {
                    tracing::debug!(%error, %dir, "the failed store cannot be reopened yet")
                }
            }
        }
    }
}

impl FailoverCatalog {
    /// Returns why this process must leave the store, if it must: the store is superseded (see
    /// [`NodeDirectory::superseded`]), or it failed and is no longer found at its path.
    ///
    /// [`NodeDirectory::superseded`]: crate::node_directory::NodeDirectory::superseded
    fn departure(&self) -> Option<Departure> {
        let membership = &self.membership;
        let directory = &membership.opening.directory;
        let failed = || membership.failure().and_then(|_| directory.missing());
        directory.superseded(membership.store).or_else(failed)
    }

    /// Closes the store, so that the process may open the path again. All later calls fail with
    /// `Closed`. Tries again until the store is closed, or until its last handle is closed.
    fn leave(&self, departure: Departure, heal_signal: &HealSignal) {
        self.membership.begin_leaving();
        let OpenContext { directory, medium, .. } = &self.membership.opening;
        let stored = Directory::new(Arc::clone(medium), directory.path()).manifest();
        let volumes: Vec<String> = stored.ok().flatten().map_or_else(Vec::new, |stored| {
            let outside = stored.volumes.into_iter().map(|volume| volume.dir);
            outside.filter(|dir| Path::new(dir).is_absolute()).collect()
        });
        tracing::warn!(
            dir = %directory.path().display(),
            volumes = volumes.join(", "),
            "{departure}: this process closes the store, and may open the path again"
        );
        while !self.try_leave() && heal_signal.sleep(PAUSES.0) {}
    }

    /// Tries once to close the store, and returns whether it is closed. The process keeps its lock
    /// until none of its calls and writes is in progress: otherwise the next owner would reuse the
    /// space of these writes.
    fn try_leave(&self) -> bool {
        let until = Instant::now() + WRITES_TIMEOUT;
        if !self.reservations.close(until) {
            return false;
        }
        let membership = &self.membership;
        let Some(guard) = membership.begin_change(until) else { return false };
        if membership.opening.closing.load(Ordering::Acquire) {
            return false;
        }
        if !matches!(&*membership.get(), Membership::Leaving(_))
            && !guard.try_replace(CALLS_TIMEOUT, |former| Membership::Leaving(Arc::clone(former)))
        {
            return false;
        }
        let dir = membership.opening.directory.path().display();
        match membership.get().close() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(
                    %error,
                    %dir,
                    "the store could not be closed cleanly when the process left it"
                )
            }
            Err(error) => {
                tracing::debug!(%error, %dir, "the store to leave cannot be closed yet");
                return false;
            }
        }
        guard.give_up();
        true
    }

    /// Reopens the store, for the `number`th time, if this process owns it and it is poisoned.
    /// Returns whether it was reopened.
    ///
    /// # Errors
    /// Any error that keeps the store from being reopened now, for example because the disks reject
    /// writes, or calls or writes of this process are in progress. The poisoned core then keeps
    /// serving; if it is closed already, calls return misses. `Fatal` if another store has taken
    /// the place of this store, which is then closed.
    fn reopen(&self, number: u64) -> Result<bool> {
        let busy = || Error::retry("calls of this process still use the failed store");
        let opening = &self.membership.opening;
        let guard =
            self.membership.begin_change(Instant::now() + WRITES_TIMEOUT).ok_or_else(busy)?;
        if opening.closing.load(Ordering::Acquire) {
            return Ok(false);
        }
        if let Membership::Owner(owner) = &*self.membership.get() {
            let core = &owner.core;
            let Some(cause) = core.poisoned() else { return Ok(false) };
            core.check_disks_writable()?;
            // After this step the process reserves no space and writes to none: the next core
            // counts all space without a stored run as free.
            if !self.reservations.close(Instant::now() + WRITES_TIMEOUT) {
                return Err(busy());
            }
            let stats = core.stats().unwrap_or_else(|_| CatalogStats::default());
            let stats = CatalogStats { poisoned: Some(cause), ..stats };
            let reopening = Membership::Reopening(Reopening::new(owner, stats));
            if !guard.try_replace(CALLS_TIMEOUT, |_| reopening) {
                return Err(busy());
            }
        }
        let membership = self.membership.get();
        let Membership::Reopening(reopening) = &*membership else { return Ok(false) };
        reopening.end_former(&opening.directory)?;
        if !opening.directory.try_own()? {
            return Err(Error::retry("another process owns the store")
                .with("dir", opening.directory.path().display()));
        }
        let owner = Owner::reopen(opening)?;
        if owner.epoch.store != self.membership.store {
            let _ = owner.close();
            reopening.stop_refusing();
            return Err(guard.close_as_replaced());
        }
        owner.core.note_reopenings(number);
        self.reservations.reopen(&opening.closing);
        guard.use_owner(Membership::Owner(Arc::new(owner)));
        reopening.stop_refusing();
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_directory::NodeDirectory;
    use ritornello_format::{ErrorKind, Scope};
    use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
    use ritornello_store::{Catalog, Options, ReserveRequest};
    use std::sync::atomic::AtomicBool;

    #[test]
    fn back_off_grows_and_resets() {
        let mut backoff = Backoff::default();
        let mut now = Instant::now();
        let pauses: Vec<Duration> = (0..6)
            .map(|_| {
                let pause = backoff.next(now);
                now += pause;
                pause
            })
            .collect();
        assert_eq!(pauses[..3], [PAUSES.0, 2 * PAUSES.0, 4 * PAUSES.0]);
        assert_eq!(pauses[5], PAUSES.1);
        assert_eq!(backoff.next(now + BACKOFF_RESET), PAUSES.0);
    }

    #[test]
    fn log_repeats_once_a_minute() {
        let (mut throttle, now) = (LogThrottle::default(), Instant::now());
        assert!(throttle.is_due(now) && !throttle.is_due(now + Duration::from_secs(59)));
        assert!(throttle.is_due(now + LOG_PERIOD));
    }

    #[test]
    fn stats_of_failed_store_remain_until_store_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let schedule = Schedule::new();
        let options = Options {
            capacity: Some(64 << 20),
            segment_bytes: Some(1 << 20),
            ..Options::new(dir.path())
        };
        let opening = OpenContext {
            directory: Arc::new(NodeDirectory::open(dir.path()).unwrap()),
            medium: Arc::new(Faulty::new(Arc::new(Host), schedule.clone())),
            options,
            permissions: Arc::default(),
            closing: AtomicBool::new(false),
            heal_signal: Arc::default(),
        };
        let catalog = FailoverCatalog::open(opening, Instant::now()).unwrap();
        let scope = catalog.resolve(&Scope::opaque("a", 4096, true), true).unwrap().unwrap();
        let reserved = catalog.reserve(scope, &[&[1; 16]], None, &ReserveRequest::default());
        assert_eq!(catalog.commit(reserved.unwrap().id, &[Some(0)]).unwrap().stored, 1);
        schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData).at("/index/"));
        assert!(catalog.flush().is_err());
        assert!(
            catalog.reopen(1).is_err(),
            "the index cannot be synced, so the reopening must fail"
        );
        let kind = |result: Result<()>| result.unwrap_err().kind();
        let is_poisoned = || catalog.stats().unwrap().poisoned.is_some();
        assert_eq!((is_poisoned(), kind(catalog.flush())), (true, ErrorKind::Retry));
        catalog.membership.begin_leaving();
        assert_eq!((is_poisoned(), kind(catalog.flush())), (true, ErrorKind::Closed));
        let guard = catalog.membership.begin_change(Instant::now()).unwrap();
        assert!(guard.try_replace(CALLS_TIMEOUT, |former| Membership::Leaving(Arc::clone(former))));
        drop(guard);
        assert_eq!((is_poisoned(), kind(catalog.flush())), (true, ErrorKind::Closed));
        assert!(catalog.try_leave());
        assert_eq!(kind(catalog.stats().map(drop)), ErrorKind::Closed);
    }
}
