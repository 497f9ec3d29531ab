//! Periodic maintenance: expired leases and retentions, dead clients, background syncs, the index's
//! memory, and the copies of manifest and scope registry in the volumes.

use crate::core::StoreCore;
use crate::core::durability::pending_max;
use crate::core::reservations::Abandoned;
use ritornello_format::{Error, Result};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Maximum pause between two passes of the thread.
const PERIODIC_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of syncs while uses of pages are the only unsynced changes.
const RECENCY_INTERVAL: Duration = Duration::from_secs(60);

impl StoreCore {
    /// Starts the thread of periodic maintenance. The thread ends when the core is closed or
    /// dropped.
    ///
    /// # Errors
    /// `Retry` if the thread cannot be started.
    pub(crate) fn start_periodic(self: &Arc<Self>) -> Result<()> {
        let core = Arc::downgrade(self);
        let thread = std::thread::Builder::new()
            .name("ritornello-periodic".to_owned())
            .spawn(move || run_periodically(&core))
            .map_err(|e| {
                Error::retry(
                    "the thread for the store's periodic maintenance could not be started: check \
                     the limit of threads",
                )
                .because(e)
            })?;
        self.maintenance.periodic.set(thread);
        Ok(())
    }

    /// Runs one pass of periodic and space maintenance, for a store opened without background
    /// threads.
    pub fn run_once(self: &Arc<Self>) {
        self.run_periodic_once(&mut Instant::now());
        if let Err(error) = self.reattach_absent() {
            tracing::warn!(%error, "absent volumes could not be reattached");
        }
        self.start_drain();
        if self.needs_maintenance()
            && let Err(error) = self.maintain_space(&self.maintenance.space.control())
        {
            tracing::warn!(
                %error,
                "a pass that empties sealed segments and shrinks the index failed"
            );
        }
    }

    fn run_periodic_once(self: &Arc<Self>, last_sync: &mut Instant) {
        let mut state = self.state.lock();
        let (freed, expired) = state.leases.expire();
        state.space.add_to_limbo(freed);
        self.counters.leases_expired.add(expired);
        let names = state.reservations.withheld_clients();
        let pressing = state.space.is_limbo_large();
        let busy = !state.unsynced.segments.is_empty() || state.space.has_limbo_waiting();
        let touched = state.unsynced.uses && last_sync.elapsed() >= RECENCY_INTERVAL;
        // Clear the mark of unsynced uses if a sync follows, in this pass or, because of other
        // changes, in a later pass: this sync makes the uses durable too.
        state.unsynced.uses &= !(busy || touched);
        drop(state);
        for (id, name) in names {
            if !(self.maintenance.alive)(&name) {
                tracing::info!(
                    client = %name,
                    "a client died and left a reservation: its space is drained"
                );
                self.abandon(id, Abandoned::ByDeath);
            }
        }
        self.retry_drain();
        if self.lifecycle.is_poisoned() {
            return;
        }
        self.free_given_up_copies();
        self.refresh_copies();
        self.maintain_retention();
        self.maintain_index_memory();
        let index = self.index.stats();
        let (pending, most) = (index.pending_bytes, pending_max(index.memory_bytes_max));
        let due = last_sync.elapsed() >= self.options.sync_interval || pending > most;
        if touched || ((busy || pending > 0) && (pressing || due)) {
            // The error needs no handling here: a failed sync poisons the store, so that the next
            // change returns the error; if the round did not end in time, a later pass syncs.
            let _ = self.make_durable_in_background();
            *last_sync = Instant::now();
        }
        if let Err(error) = self.index.maintain_after(&|| self.make_durable_in_background()) {
            self.lifecycle.rounds().poison_if_fatal(&error);
            tracing::error!(%error, "the index could not be maintained");
        }
    }
}

fn run_periodically(core: &Weak<StoreCore>) {
    let mut last_sync = Instant::now();
    loop {
        let Some(core) = core.upgrade() else { return };
        if core.maintenance.periodic.sleep(PERIODIC_INTERVAL) {
            return;
        }
        core.run_periodic_once(&mut last_sync);
    }
}
