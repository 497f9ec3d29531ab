//! Messages to systemd, if it started the command with a notification socket.

use sd_notify::NotifyState;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Maximum time for which a command of several stores that answers over HTTP waits for them before
/// it tells systemd that it is ready. A disk may hang, and systemd ends a command that is not ready
/// in time (`TimeoutStartSec`, by default 90 s), together with the stores that are in use. The
/// recovery of a large store may take longer, too; `/readyz` tells the state of each store.
pub(super) const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// Tells systemd, once, when the command is ready: when each store has an owner, this process or
/// another, or failed and is tried again; or when the command waits for the stores no longer.
pub(super) struct Readiness {
    unopened: AtomicUsize,
    /// Whether systemd was told that the command is ready, or that it ends.
    is_told: AtomicBool,
}

impl Readiness {
    /// The command is ready after `stores` calls of [`Readiness::opened`].
    pub(super) fn new(stores: usize) -> Self {
        let readiness =
            Self { unopened: AtomicUsize::new(stores), is_told: AtomicBool::new(false) };
        if stores == 0 {
            readiness.tell();
        }
        readiness
    }

    /// Notes that a store has an owner, or failed and is tried again.
    pub(super) fn opened(&self) {
        if self.unopened.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.tell();
        }
    }

    /// Tells systemd that the command is ready, unless systemd was told before.
    pub(super) fn tell(&self) {
        if !self.is_told.swap(true, Ordering::AcqRel) {
            send(NotifyState::Ready);
        }
    }

    /// Tells systemd that the command ends.
    pub(super) fn ending(&self) {
        self.is_told.store(true, Ordering::Release);
        send(NotifyState::Stopping);
    }
}

fn send(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "systemd cannot be told the state of the command");
    }
}
